"""Which attention kernel runs, by CUDA's and the CPU's own rules, and what it keeps.

`scaled_dot_product_attention` picks flash, memory-efficient or math by device, dtype, shapes, mask, dropout and the
switches of `torch.backends.cuda`. The rules below follow `sdp_utils.cpp`. The cuDNN kernel, preferred on some Hopper
and Blackwell set-ups, keeps what flash keeps and is counted as flash, or with a mask as memory-efficient.
"""

from typing import Any

import torch

from memfit.adapters.torch.autocast import Autocast
from memfit.adapters.torch.interception import Interceptor, call_plain
from memfit.adapters.torch.shapes import Operator

_HALVES = (torch.float16, torch.bfloat16)
# Numbers of torch.nn.attention.SDPBackend, as the order of priority gives them.
_MATH, _FLASH, _EFFICIENT, _CUDNN = range(4)


class Attention:
    """Chooses the kernel of a CUDA device.

    Args:
        capability: compute capability, (8, 6).
        autocast: casts queries, keys and values first, as CUDA's autocast does.
    """

    def __init__(self, capability: tuple[int, int], autocast: Autocast) -> None:
        self._capability = capability
        self._autocast = autocast

    def interceptors(self) -> dict[str, Interceptor]:
        """The interceptor of `scaled_dot_product_attention`."""
        return {"scaled_dot_product_attention": self._attend}

    def _attend(
        self,
        op: Operator,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        dtype = self._autocast.dtype
        if dtype is not None:
            query, key, value, attn_mask = self._autocast.cast((query, key, value, attn_mask), dtype)
        kernel = choose_cuda_kernel(
            query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, capability=self._capability
        )
        run = self._autocast.suspended_call
        if kernel == "flash":
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if kernel == "efficient":
            mask = _additive_mask(attn_mask, query.dtype)
            keep = query.requires_grad or key.requires_grad or value.requires_grad
            return run(
                torch.ops.aten._scaled_dot_product_efficient_attention.default,
                query,
                key,
                value,
                _padded_mask(mask, query, key),
                keep and torch.is_grad_enabled(),
                dropout_p,
                is_causal,
                scale=scale,
            )[0]
        return run(
            torch.ops.aten._scaled_dot_product_attention_math.default,
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            None,
            scale=scale,
            enable_gqa=enable_gqa,
        )[0]


def choose_cuda_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    grouped: bool,
    *,
    capability: tuple[int, int],
) -> str:
    """The first kernel in PyTorch's order that is switched on and takes the arguments: flash, efficient or math."""
    switches = torch.backends.cuda
    fused = query.dim() == key.dim() == value.dim() == 4 and 0 not in (query.shape[2], key.shape[2])
    fused = fused and all(t.stride(-1) == 1 for t in (query, key, value))
    for backend in torch._C._get_sdp_priority_order():
        if backend == _MATH and switches.math_sdp_enabled():
            return "math"
        if not fused:
            continue
        if backend == _FLASH and switches.flash_sdp_enabled():
            if _flash_fits(query, key, value, mask, dropout, is_causal, grouped, capability):
                return "flash"
        elif backend == _EFFICIENT and switches.mem_efficient_sdp_enabled():
            if _efficient_fits(query, key, value, mask, capability):
                return "efficient"
        elif backend == _CUDNN and switches.cudnn_sdp_enabled() and _cudnn_fits(query, key, value, capability):
            return "flash" if mask is None else "efficient"
    raise RuntimeError(
        "no attention kernel that is switched on takes these arguments: "
        f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} in {query.dtype}, "
        f"{'with' if mask is not None else 'without'} a mask. Switch on SDPBackend.MATH as well."
    )


def _flash_fits(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    grouped: bool,
    capability: tuple[int, int],
) -> bool:
    heads_match = query.shape[1] == key.shape[1] == value.shape[1]
    groups_match = grouped and key.shape[1] == value.shape[1] and query.shape[1] % key.shape[1] == 0
    head_size = query.shape[-1]
    # Between 192 and 256 the backward pass needs more shared memory than consumer parts of Ampere and Ada have.
    roomy = capability in ((8, 0), (9, 0), (10, 0), (10, 3))
    needs_grad = query.requires_grad or key.requires_grad or value.requires_grad
    return (
        capability >= (8, 0)
        and query.dtype in _HALVES
        and mask is None
        and head_size == key.shape[-1] == value.shape[-1] <= 256
        and (heads_match or groups_match)
        and query.shape[0] == key.shape[0]
        and not (is_causal and query.shape[2] != key.shape[2])
        and not (needs_grad and not roomy and (head_size > 224 or (head_size > 192 and dropout > 0)))
    )


def _efficient_fits(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    capability: tuple[int, int],
) -> bool:
    dtypes = (torch.float16, torch.float32) if capability < (8, 0) else (*_HALVES, torch.float32)
    if query.dtype not in dtypes or capability < (5, 0):
        return False
    if not (query.shape[1] == key.shape[1] == value.shape[1] and query.shape[0] == key.shape[0]):
        return False
    # Tensor-core kernels load 16 bytes at a time: 8 halves, or 4 floats from Ampere on.
    alignment = 1
    if query.dtype in _HALVES and capability >= (7, 0):
        alignment = 8
    elif capability >= (8, 0):
        alignment = 4
    if query.shape[-1] % alignment or value.shape[-1] % alignment or query.shape[-1] != key.shape[-1]:
        return False
    return mask is None or not mask.requires_grad or mask.dim() in (2, 4)


def _cudnn_fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, capability: tuple[int, int]) -> bool:
    longest = 256 if capability == (9, 0) else 128
    return (
        capability >= (8, 0)
        and query.dtype in _HALVES
        and query.shape[-1] == key.shape[-1]
        and all(t.shape[-1] % 8 == 0 and t.shape[-1] <= longest for t in (query, value))
        and query.shape[0] == key.shape[0]
    )


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    head_size = query.shape[-1]
    missing = -head_size % 8
    if missing:
        query, key, value = (torch.nn.functional.pad(t, (0, missing)) for t in (query, key, value))
        scale = scale if scale is not None else float(head_size) ** -0.5
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    out: torch.Tensor = call_plain(flash, query, key, value, dropout, is_causal, False, scale=scale)[0]
    return out[..., :head_size] if missing else out


def _additive_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _padded_mask(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """The mask as the efficient kernel wants it: rows aligned to 16 elements, expanded to every head."""
    if mask is None:
        return None
    length = mask.shape[-1]
    if length % 16:
        mask = torch.nn.functional.pad(mask, (0, 16 - length % 16))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


class HostAttention:
    """Chooses the kernel of the CPU.

    Args:
        autocast: casts queries, keys and values first, as the CPU's autocast does.
    """

    def __init__(self, autocast: Autocast) -> None:
        self._autocast = autocast

    def interceptors(self) -> dict[str, Interceptor]:
        """The interceptor of `scaled_dot_product_attention`."""
        return {"scaled_dot_product_attention": self._attend}

    def _attend(
        self,
        op: Operator,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        dtype = self._autocast.dtype
        if dtype is not None:
            query, key, value, attn_mask = self._autocast.cast((query, key, value, attn_mask), dtype)
        if self._flash_fits(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
            mask = _additive_mask(attn_mask, query.dtype)
            flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
            return call_plain(flash, query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]
        math = torch.ops.aten._scaled_dot_product_attention_math.default
        return call_plain(
            math, query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]

    @staticmethod
    def _flash_fits(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        is_causal: bool,
        grouped: bool,
    ) -> bool:
        return (
            torch.backends.cuda.flash_sdp_enabled()
            and query.dim() == key.dim() == value.dim() == 4
            and query.dtype in (torch.float32, torch.float64, *_HALVES)
            and dropout == 0.0
            and query.shape[-1] == key.shape[-1] == value.shape[-1]
            and (query.shape[1] == key.shape[1] == value.shape[1] or grouped)
            and 0 not in (query.shape[2], key.shape[2])
            and not (is_causal and (mask is not None or query.shape[2] != key.shape[2]))
            and (mask is None or (not mask.requires_grad and mask.dim() in (2, 4)))
            and all(t.stride(-1) == 1 for t in (query, key, value))
        )
