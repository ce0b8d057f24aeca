"""RMS norm as CUDA runs it: one kernel that keeps a number per row, instead of seven operators.

PyTorch's own operator for it falls apart into the seven on any device but CUDA, before autograd; so the one step of
autograd that CUDA would make is made here.
"""

from typing import Any

import torch

from memfit.adapters.torch.autocast import Autocast
from memfit.adapters.torch.interception import call_plain
from memfit.adapters.torch.shapes import META, Operator


class FusedRmsNorm:
    """The interceptor of `rms_norm`.

    Args:
        autocast: casts to float32 first, as CUDA's autocast does.
    """

    def __init__(self, autocast: Autocast) -> None:
        self._autocast = autocast

    def __call__(
        self, op: Operator, tensor: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
    ) -> Any:
        """The normalised tensor."""
        if self._autocast.dtype is not None:
            tensor, weight = self._autocast.cast((tensor, weight), torch.float32)
        exists = hasattr(torch.ops.aten, "_fused_rms_norm")
        if not exists or not tensor.is_meta or (weight is not None and weight.dtype is not tensor.dtype):
            return call_plain(op, tensor, normalized_shape, weight, eps)
        return call_plain(_OneKernel.apply, tensor, list(normalized_shape), weight, eps)


class _OneKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, normalized_shape: list[int], weight: Any, eps: float | None) -> Any:
        # Below autograd the operator stays whole.
        with torch._C._AutoDispatchBelowAutograd():
            out, scale = torch.ops.aten._fused_rms_norm.default(tensor, normalized_shape, weight, eps)
        ctx.save_for_backward(tensor, scale, weight)
        ctx.normalized_shape = normalized_shape
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        tensor, scale, weight = ctx.saved_tensors
        needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        of_tensor, of_weight = torch.ops.aten._fused_rms_norm_backward.default(
            gradient, tensor, ctx.normalized_shape, scale, weight, needed
        )
        return of_tensor, None, of_weight if needed[1] else None, None


def forward_rule(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Any) -> Any:
    """Outputs of `_fused_rms_norm`: the normalised tensor and one float32 scale per row."""
    tensor, normalized_shape = args[:2]
    rows = tensor.shape[: tensor.dim() - len(normalized_shape)]
    scale = torch.empty((*rows, *(1 for _ in normalized_shape)), dtype=torch.float32, device=META)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format), scale
