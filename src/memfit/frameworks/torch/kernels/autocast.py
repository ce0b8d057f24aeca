"""Autocast for shape-only tensors: which operators run in which precision, and which casts are kept.

The state itself (enabled, dtype, nesting, cache) is PyTorch's own, so that the user's `torch.autocast("cuda")` blocks,
`torch.is_autocast_enabled` and checkpointing's replay of the state all work. Only the casts are made here, by the lists
of PyTorch's `autocast_mode.h` for CUDA and of `autocast_mode.cpp` for the CPU, which differ in most operators.
"""

from functools import cache
from typing import Any

import torch

from memfit.frameworks.torch import internals
from memfit.frameworks.torch.shapes.interception import Interceptor, call_plain, overload
from memfit.frameworks.torch.shapes.shapes import HALVES, Operator, map_nested, tensors

# Words rather than lists of strings: a hundred quoted names would hide what is in them.
LOWER_PRECISION = """
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul
    einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
    _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention
""".split()  # noqa: SIM905

FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm group_norm rms_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
    kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
""".split()  # noqa: SIM905

# The reduction gets dtype=float32 instead of a cast input, so that no float32 copy of the input is made.
FLOAT32_BY_DTYPE_ARGUMENT = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""".split()  # noqa: SIM905

FLOAT32_BY_EXTRA_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}

WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()  # noqa: SIM905

BANNED = ["binary_cross_entropy"]

HOST_LOWER_PRECISION = """
    conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input _convolution.deprecated bmm mm linalg_vecdot baddbmm addmm _addmm_activation addbmm linear
    matmul prelu mkldnn_rnn_layer scaled_dot_product_attention _native_multi_head_attention
""".split()  # noqa: SIM905

HOST_WIDEST = ["stack", "cat", "index_copy"]


@cache
def host_float32() -> tuple[str, ...]:
    """Every other operator that PyTorch's autocast for the CPU knows: those run in float32."""
    known = (
        name.removeprefix("aten::")
        for name in internals.all_operator_names()
        if name.startswith("aten::") and internals.has_kernel(name, "AutocastCPU")
    )
    return tuple(sorted(set(known) - {*HOST_LOWER_PRECISION, *HOST_WIDEST}))


# Past classes that say something else, as PyTorch's compiler is told.
_is_meta = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class Autocast:
    """Makes the casts, by the autocast state of `device_type`, "cuda" or "cpu"."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._suspended = 0
        self.was_used = False
        """Whether an operator has run in lower precision so far."""

    def interceptors(self) -> dict[str, Interceptor]:
        """An interceptor for every operator on the lists."""
        if self._device_type == "cpu":
            return {
                **dict.fromkeys(HOST_LOWER_PRECISION, self._lower),
                **dict.fromkeys(HOST_WIDEST, self._widest),
                **dict.fromkeys(host_float32(), self._float32),
            }
        return {
            **dict.fromkeys(LOWER_PRECISION, self._lower),
            **dict.fromkeys(FLOAT32, self._float32),
            **dict.fromkeys(FLOAT32_BY_DTYPE_ARGUMENT, self._by_dtype),
            **dict.fromkeys(WIDEST, self._widest),
            **dict.fromkeys(BANNED, self._banned),
            **{name: self._with_extra_dtype(longer) for name, longer in FLOAT32_BY_EXTRA_DTYPE.items()},
        }

    @property
    def dtype(self) -> torch.dtype | None:
        """The lower precision in force, or None when autocast is off."""
        if self._suspended or not torch.is_autocast_enabled(self._device_type):
            return None
        return torch.get_autocast_dtype(self._device_type)

    def clear_cache(self) -> None:
        """Forgets the kept casts, as the end of the outermost autocast block does."""
        self._cache.clear()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """`value` with its eligible tensors cast to `dtype`; casts of parameters to a lower precision are kept."""

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point() or not _is_meta(tensor) or tensor.dtype in (torch.float64, dtype):
                return tensor
            is_leaf = tensor.requires_grad and tensor.is_leaf and not internals.is_view(tensor)
            lowers = tensor.dtype is torch.float32 and dtype is not torch.float32
            if not (is_leaf and lowers and torch.is_autocast_cache_enabled()):
                return tensor.to(dtype)
            if id(tensor) not in self._cache:
                self._cache[id(tensor)] = (tensor, tensor.to(dtype))
            return self._cache[id(tensor)][1]

        return map_nested(value, cast)

    def lower(self, values: Any) -> Any:
        """`values` as an operator that runs in lower precision gets them."""
        dtype = self.dtype
        self.was_used |= dtype is not None
        return values if dtype is None else self.cast(values, dtype)

    def suspended_call(self, op: Operator, *args: Any, **kwargs: Any) -> Any:
        """Calls `op` with casts off but every other interception on."""
        self._suspended += 1
        try:
            return op(*args, **kwargs)
        finally:
            self._suspended -= 1

    def _lower(self, op: Operator, *args: Any, **kwargs: Any) -> Any:
        return call_plain(op, *self.lower(args), **{name: self.lower(value) for name, value in kwargs.items()})

    def _float32(self, op: Operator, *args: Any, **kwargs: Any) -> Any:
        if self.dtype is None:
            return call_plain(op, *args, **kwargs)
        to = torch.float32
        return call_plain(op, *self.cast(args, to), **{name: self.cast(value, to) for name, value in kwargs.items()})

    def _by_dtype(self, op: Operator, *args: Any, **kwargs: Any) -> Any:
        position = next(i for i, a in enumerate(internals.schema_of(op).arguments) if a.name == "dtype")
        given = args[position] if position < len(args) else kwargs.get("dtype")
        eligible = isinstance(args[0], torch.Tensor) and args[0].dtype in HALVES
        if self.dtype is not None and given is None and eligible:
            args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
        name = internals.name_of(op)
        if name in ("aten::softmax", "aten::log_softmax"):
            dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
            # CUDA's softmax reads float16 and writes float32 without a float32 copy of its input.
            if args[0].dtype is torch.float16 and dtype is torch.float32:
                fused = torch.ops.aten._softmax if name == "aten::softmax" else torch.ops.aten._log_softmax
                return call_plain(fused.default, args[0], args[1], True)
        return call_plain(op, *args, **kwargs)

    def _with_extra_dtype(self, longer: str) -> Interceptor:
        extended = overload(longer)

        def intercept(op: Operator, *args: Any, **kwargs: Any) -> Any:
            if self.dtype is None or args[0].dtype not in HALVES:
                return call_plain(op, *args, **kwargs)
            if internals.schema_of(extended).overload_name == "ScalarOpt_dtype":
                return call_plain(extended, *args, dtype=torch.float32, **kwargs)
            keepdim = args[3] if len(args) > 3 else kwargs.get("keepdim", False)
            return call_plain(extended, *args[:3], keepdim, dtype=torch.float32)

        return intercept

    def _banned(self, op: Operator, *args: Any, **kwargs: Any) -> Any:
        if self.dtype is not None:
            name = internals.name_of(op).replace("aten::", "")
            raise RuntimeError(
                f"{name} can't run under autocast on CUDA, because its gradient overflows in half precision. "
                f"Use {name}_with_logits on the values before the sigmoid."
            )
        return call_plain(op, *args, **kwargs)

    def _widest(self, op: Operator, *args: Any, **kwargs: Any) -> Any:
        if self.dtype is not None and any(tensor.dtype is torch.float32 for tensor in tensors(args)):
            args = self.cast(args, torch.float32)
        return call_plain(op, *args, **kwargs)
