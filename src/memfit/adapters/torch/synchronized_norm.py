"""Batch norm over several devices, whose operators exist on GPUs only and have no shape rules in PyTorch."""

from typing import Any

import torch

from memfit.adapters.torch.shapes import HALVES, META, Operator


def _per_channel(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Statistics, one number per channel: float32 for half precision (Normalization.cuh)."""
    dtype = torch.float32 if tensor.dtype in HALVES else tensor.dtype
    return [torch.empty(tensor.shape[1], dtype=dtype, device=META) for _ in range(count)]


def _stats(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Any) -> Any:
    return tuple(_per_channel(args[0], 2))


def _like_input(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Any) -> Any:
    return torch.empty_like(args[0])


def _like_second(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Any) -> Any:
    return torch.empty_like(args[1])


def _reduce(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Any) -> Any:
    """Sums of the gradient and of its product with the input, and gradients of weight and bias."""
    for_input, for_weight, for_bias = args[5:8]
    asked = (for_input, for_input, for_weight, for_bias)
    return tuple(made if wanted else None for made, wanted in zip(_per_channel(args[1], 4), asked, strict=True))


RULES = {
    "aten::batch_norm_stats": _stats,
    "aten::batch_norm_gather_stats": _stats,
    "aten::batch_norm_gather_stats_with_counts": _stats,
    "aten::batch_norm_elemt": _like_input,
    "aten::batch_norm_backward_reduce": _reduce,
    "aten::batch_norm_backward_elemt": _like_second,
}
