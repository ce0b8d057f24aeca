"""Which attention kernel runs, by CUDA's and the CPU's own rules, and what it keeps.

`scaled_dot_product_attention` picks flash, memory-efficient or math by device, dtype, shapes, mask, dropout and the
switches of `torch.backends.cuda`. The rules below follow `sdp_utils.cpp`. The cuDNN kernel, preferred on some Hopper
and Blackwell set-ups, keeps what flash keeps and is counted as flash, or with a mask as memory-efficient.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memfit.core.estimate import LACKS_PRECISION
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.kernels.autocast import Autocast
from memfit.frameworks.torch.kernels.cuda_kernels import capability_name
from memfit.frameworks.torch.kernels.fallbacks import Report
from memfit.frameworks.torch.kernels.linear_layers import linear
from memfit.frameworks.torch.kernels.recurrent import fused_rms_norm, host_lstm, recurrent_interceptors
from memfit.frameworks.torch.shapes.interception import Interceptor, call_plain
from memfit.frameworks.torch.shapes.shapes import HALVES, Operator

# Numbers of torch.nn.attention.SDPBackend, as the order of priority gives them.
_MATH, _FLASH, _EFFICIENT, _CUDNN = range(4)
# Flash attention, and the memory-efficient one in bfloat16, begin here.
_AMPERE = (8, 0)


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of `scaled_dot_product_attention`, in its own order and by its own names."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = field(default=None, kw_only=True)
    enable_gqa: bool = field(default=False, kw_only=True)

    def cast(self, autocast: Autocast) -> "Call":
        """The call as autocast changes it."""
        if autocast.dtype is None:
            return self
        query, key, value, mask = autocast.cast((*self.tensors, self.attn_mask), autocast.dtype)
        return replace(self, query=query, key=key, value=value, attn_mask=mask)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values."""
        return self.query, self.key, self.value

    @property
    def needs_grad(self) -> bool:
        """Whether a backward pass will want what the kernel keeps for it."""
        return any(t.requires_grad for t in self.tensors)

    @property
    def heads_match(self) -> bool:
        """Whether queries, keys and values have as many heads."""
        return self.query.shape[1] == self.key.shape[1] == self.value.shape[1]

    def run_math(self, run: Callable[..., Any]) -> Any:
        """The plain operators, on any device."""
        math = torch.ops.aten._scaled_dot_product_attention_math.default
        options = (self.attn_mask, self.dropout_p, self.is_causal, None)
        return run(math, *self.tensors, *options, scale=self.scale, enable_gqa=self.enable_gqa)[0]


def cuda_attention(capability: tuple[int, int], autocast: Autocast, report: Report) -> Interceptor:
    """The interceptor of `scaled_dot_product_attention` on a CUDA device."""
    reported: set[torch.dtype] = set()

    def attend(op: Operator, *args: Any, **kwargs: Any) -> Any:
        call = Call(*args, **kwargs).cast(autocast)
        kernel = choose_cuda_kernel(call, capability)
        if kernel == "flash":
            return _flash(call)
        run = autocast.suspended_call
        if kernel == "efficient":
            efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
            mask = _padded_mask(_additive_mask(call.attn_mask, call.query.dtype), call.query, call.key)
            keeps = call.needs_grad and torch.is_grad_enabled()
            return run(efficient, *call.tensors, mask, keeps, call.dropout_p, call.is_causal, scale=call.scale)[0]
        dtype = call.query.dtype
        if capability < _AMPERE and dtype not in reported and choose_cuda_kernel(call, _AMPERE) != "math":
            reported.add(dtype)
            report(LACKS_PRECISION, _comparison(call, capability))
        return call.run_math(run)

    return attend


def _math_attention(autocast: Autocast) -> Interceptor:
    """Attention as separate products and a softmax, where no fused kernel can compute it."""

    def attend(op: Operator, *args: Any, **kwargs: Any) -> Any:
        return Call(*args, **kwargs).cast(autocast).run_math(autocast.suspended_call)

    return attend


def _comparison(call: Call, capability: tuple[int, int]) -> str:
    """Says that another device, or another precision on this one, would keep no matrix of scores."""
    dtype = call.query.dtype
    with internals.disable_current_modes():
        # What only decides is on nobody's account.
        query, key, value = (torch.empty_like(tensor, dtype=torch.float16) for tensor in call.tensors)
        mask = call.attn_mask
        if mask is not None and mask.dtype is dtype:
            mask = torch.empty_like(mask, dtype=torch.float16)
        in_half = replace(call, query=query, key=key, value=value, attn_mask=mask)
        better = choose_cuda_kernel(in_half, capability) != "math"
    return (
        f"attention in {str(dtype).removeprefix('torch.')} keeps its whole matrix of scores: kernels that don't "
        f"are for compute capability 8.0 and later, and the device has {capability_name(capability)}"
        + ("; for float16 (amp-fp16, fp16) it has one" if better else "")
    )


def choose_cuda_kernel(call: Call, capability: tuple[int, int]) -> str:
    """The first kernel in PyTorch's order that is switched on and takes the arguments: flash, efficient or math."""
    switches = torch.backends.cuda
    query, key, value = call.tensors
    fused = query.dim() == key.dim() == value.dim() == 4 and 0 not in (query.shape[2], key.shape[2])
    fused = fused and all(t.stride(-1) == 1 for t in call.tensors)
    for backend in internals.sdp_priority_order():
        if backend == _MATH and switches.math_sdp_enabled():
            return "math"
        if not fused:
            continue
        if backend == _FLASH and switches.flash_sdp_enabled() and _flash_fits(call, capability):
            return "flash"
        if backend == _EFFICIENT and switches.mem_efficient_sdp_enabled() and _efficient_fits(call, capability):
            return "efficient"
        if backend == _CUDNN and switches.cudnn_sdp_enabled() and _cudnn_fits(call, capability):
            return "flash" if call.attn_mask is None else "efficient"
    raise RuntimeError(
        "no attention kernel that is switched on takes these arguments: "
        f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} in {query.dtype}, "
        f"{'with' if call.attn_mask is not None else 'without'} a mask. Switch on SDPBackend.MATH as well."
    )


def _flash_fits(call: Call, capability: tuple[int, int]) -> bool:
    query, key, value = call.tensors
    groups_match = call.enable_gqa and key.shape[1] == value.shape[1] and query.shape[1] % key.shape[1] == 0
    head_size = query.shape[-1]
    # Between 192 and 256 the backward pass needs more shared memory than consumer parts of Ampere and Ada have.
    roomy = capability in ((8, 0), (9, 0), (10, 0), (10, 3))
    return (
        capability >= (8, 0)
        and query.dtype in HALVES
        and call.attn_mask is None
        and head_size == key.shape[-1] == value.shape[-1] <= 256
        and (call.heads_match or groups_match)
        and query.shape[0] == key.shape[0]
        and not (call.is_causal and query.shape[2] != key.shape[2])
        and not (call.needs_grad and not roomy and (head_size > 224 or (head_size > 192 and call.dropout_p > 0)))
    )


def _efficient_fits(call: Call, capability: tuple[int, int]) -> bool:
    query, key, value = call.tensors
    dtypes = (torch.float16, torch.float32) if capability < _AMPERE else (*HALVES, torch.float32)
    # Tensor-core kernels load 16 bytes at a time: 8 halves, or 4 floats from Ampere on.
    alignment = 8 if query.dtype in HALVES and capability >= (7, 0) else 4 if capability >= _AMPERE else 1
    mask = call.attn_mask
    return (
        capability >= (5, 0)
        and query.dtype in dtypes
        and call.heads_match
        and query.shape[0] == key.shape[0]
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] % alignment == value.shape[-1] % alignment == 0
        and (mask is None or not mask.requires_grad or mask.dim() in (2, 4))
    )


def _cudnn_fits(call: Call, capability: tuple[int, int]) -> bool:
    query, key, value = call.tensors
    longest = 256 if capability == (9, 0) else 128
    return (
        capability >= (8, 0)
        and query.dtype in HALVES
        and query.shape[-1] == key.shape[-1]
        and all(t.shape[-1] % 8 == 0 and t.shape[-1] <= longest for t in (query, value))
        and query.shape[0] == key.shape[0]
    )


def _flash(call: Call) -> torch.Tensor:
    query, key, value = call.tensors
    scale = call.scale
    head_size = query.shape[-1]
    missing = -head_size % 8
    if missing:
        query, key, value = (torch.nn.functional.pad(t, (0, missing)) for t in call.tensors)
        scale = scale if scale is not None else float(head_size) ** -0.5
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    out: torch.Tensor = call_plain(flash, query, key, value, call.dropout_p, call.is_causal, False, scale=scale)[0]
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


def host_attention(autocast: Autocast) -> Interceptor:
    """The interceptor of `scaled_dot_product_attention` on the CPU."""

    def attend(op: Operator, *args: Any, **kwargs: Any) -> Any:
        call = Call(*args, **kwargs).cast(autocast)
        query, key, value = call.tensors
        mask = call.attn_mask
        flash_fits = (
            torch.backends.cuda.flash_sdp_enabled()
            and query.dim() == key.dim() == value.dim() == 4
            and query.dtype in (torch.float32, torch.float64, *HALVES)
            and call.dropout_p == 0.0
            and query.shape[-1] == key.shape[-1] == value.shape[-1]
            and (call.heads_match or call.enable_gqa)
            and 0 not in (query.shape[2], key.shape[2])
            and not (call.is_causal and (mask is not None or query.shape[2] != key.shape[2]))
            and (mask is None or (not mask.requires_grad and mask.dim() in (2, 4)))
            and all(t.stride(-1) == 1 for t in call.tensors)
        )
        if not flash_fits:
            return call.run_math(call_plain)
        mask = _additive_mask(mask, query.dtype)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return call_plain(flash, *call.tensors, call.dropout_p, call.is_causal, attn_mask=mask, scale=call.scale)[0]

    return attend


def cuda_interceptors(
    capability: tuple[int, int], autocast: Autocast, report: Report, *, fuses_attention: bool = True
) -> dict[str, Interceptor]:
    """What a CUDA device decides above autograd."""
    return {
        **autocast.interceptors(),
        "linear": linear(autocast),
        "scaled_dot_product_attention": (
            cuda_attention(capability, autocast, report) if fuses_attention else _math_attention(autocast)
        ),
        **recurrent_interceptors(autocast),
        "dropout": _native_dropout,
        "rms_norm": fused_rms_norm(autocast),
        "ctc_loss.Tensor": _ctc_by_lengths,
    }


def host_interceptors(autocast: Autocast) -> dict[str, Interceptor]:
    """What the CPU decides above autograd."""
    return {
        **autocast.interceptors(),
        "linear": linear(autocast),
        "scaled_dot_product_attention": host_attention(autocast),
        "lstm.input": host_lstm,
    }


def _ctc_by_lengths(
    op: Operator,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    *options: Any,
) -> Any:
    """CUDA reads the lengths on the host; with a dispatch mode on, PyTorch would take another way."""

    def lengths(tensor: torch.Tensor, most: int) -> list[int]:
        read = [int(length) for length in tensor.to("cpu").flatten().tolist()]
        # Zeros stand in for lengths that are not known.
        return read if any(read) else [most] * len(read)

    given = lengths(input_lengths, log_probs.shape[0]), lengths(target_lengths, targets.shape[-1])
    return torch.ops.aten.ctc_loss.IntList(log_probs, targets, *given, *options)


def _native_dropout(op: Operator, tensor: torch.Tensor, p: float, train: bool) -> Any:
    """CUDA keeps a boolean mask instead of a scaled floating-point one."""
    if train and 0 < p < 1 and tensor.numel():
        return call_plain(torch.ops.aten.native_dropout.default, tensor, p, True)[0]
    return call_plain(op, tensor, p, train)
