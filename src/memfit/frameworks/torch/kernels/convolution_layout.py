"""Shape and layout of the outputs of convolutions and batch norms.

PyTorch's rule for shape-only tensors always answers "contiguous", since they are on no device it could ask. cuDNN and
oneDNN follow their inputs: if the data or the weight is channels-last, so are the result and all gradients.
"""

from collections.abc import Callable
from typing import Any

import torch

from memfit.frameworks.torch.shapes.shapes import HALVES, META, Arguments, Operator, Options, shape_like

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether the strides say so, by the rule of `Tensor.suggest_memory_format` (MemoryFormat.h).

    >>> is_channels_last(torch.empty(2, 8, 4, 4, device="meta").to(memory_format=torch.channels_last))
    True
    """
    dims = tensor.dim()
    if dims not in _FORMATS:
        return False
    sizes, strides = tensor.shape, tensor.stride()
    smallest = 0
    if strides[1] == 0:
        return False
    # From the innermost dimension outwards: channels, then width to depth, then the batch.
    for dim in (1, *range(dims - 1, 1, -1), 0):
        if sizes[dim] == 0 or strides[dim] < smallest or (dim == 0 and smallest == strides[1]):
            return False
        smallest = strides[dim] * max(sizes[dim], 1)
    return True


def channels_last_format(*tensors: torch.Tensor) -> torch.memory_format | None:
    """The channels-last format that an operator on `tensors` works in, if any of them is."""
    return _FORMATS[tensors[0].dim()] if any(is_channels_last(t) for t in tensors) else None


def forward_rule(func: Operator, args: Arguments, kwargs: Options, report: Any) -> Any:
    """Output of `convolution`."""
    out = func(*args, **kwargs)
    layout = channels_last_format(args[0], args[1]) or torch.contiguous_format
    return torch.empty(out.shape, dtype=out.dtype, device=META, memory_format=layout)


def backward_rule(func: Operator, args: Arguments, kwargs: Options, report: Any) -> Any:
    """Gradients of `convolution`: of the data, the weight and the bias, those asked for."""
    gradient, data, weight, bias_sizes = args[:4]
    wanted = args[10]
    layout = channels_last_format(data, weight) or torch.contiguous_format

    def like(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=META, memory_format=layout)

    return (
        like(data) if wanted[0] else None,
        like(weight) if wanted[1] else None,
        torch.empty(bias_sizes, dtype=gradient.dtype, device=META) if wanted[2] else None,
    )


def _dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _batch_norm(func: Operator, args: Arguments, kwargs: Options, report: Any) -> Any:
    """Shapes as by PyTorch's own rule, which is written in Python and takes up to two milliseconds per new shape."""
    tensor, training = args[0], args[5]
    return (shape_like(tensor), *_per_channel(tensor, 2)) if training and _dense(tensor) else NotImplemented


def _batch_norm_backward(func: Operator, args: Arguments, kwargs: Options, report: Any) -> Any:
    """Shapes as by PyTorch's own rule, but without gradients that were not asked for."""
    gradient, tensor, weight = args[:3]
    mask = args[9]
    if not _dense(tensor) or gradient.stride() != tensor.stride():
        return NotImplemented
    dtype = weight.dtype if weight is not None else torch.float32
    parts = [torch.empty(tensor.shape[1], dtype=dtype, device=META) if wanted else None for wanted in mask[1:]]
    return (shape_like(tensor) if mask[0] else None, *parts)


def _per_channel(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Statistics, one number per channel: float32 for half precision (Normalization.cuh)."""
    dtype = torch.float32 if tensor.dtype in HALVES else tensor.dtype
    return [torch.empty(tensor.shape[1], dtype=dtype, device=META) for _ in range(count)]


def _reduce(func: Operator, args: Arguments, kwargs: Options, report: Any) -> Any:
    """Sums of the gradient and of its product with the input, and gradients of weight and bias."""
    for_input, for_weight, for_bias = args[5:8]
    asked = (for_input, for_input, for_weight, for_bias)
    return tuple(made if wanted else None for made, wanted in zip(_per_channel(args[1], 4), asked, strict=True))


def _stats(func: Operator, args: Arguments, kwargs: Options, report: Any) -> Any:
    return tuple(_per_channel(args[0], 2))


# They depend on nothing but shapes and strides.
RULES: dict[str, Callable[..., Any]] = {
    "aten::convolution": forward_rule,
    "aten::convolution_backward": backward_rule,
    "aten::native_batch_norm": _batch_norm,
    "aten::native_batch_norm_backward": _batch_norm_backward,
    # Batch norm over several devices, whose operators exist on GPUs only and have no shape rules in PyTorch.
    "aten::batch_norm_stats": _stats,
    "aten::batch_norm_gather_stats": _stats,
    "aten::batch_norm_gather_stats_with_counts": _stats,
    "aten::batch_norm_elemt": lambda func, args, kwargs, report: torch.empty_like(args[0]),
    "aten::batch_norm_backward_reduce": _reduce,
    "aten::batch_norm_backward_elemt": lambda func, args, kwargs, report: torch.empty_like(args[1]),
}
