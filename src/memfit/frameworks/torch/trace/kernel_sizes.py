"""The sizes of an operator's kernel, from which its time follows."""

from math import prod
from typing import Any

import torch

from memfit.core.profile import ConvolutionSizes, MovingSizes, ProductSizes

_FIRST_FACTOR = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::addbmm": 1}
_NUM_POSITIONS = {
    "aten::convolution": 9,
    "aten::convolution_backward": 11,
    **{name: first + 2 for name, first in _FIRST_FACTOR.items()},
}
_COPIES = {"aten::clone", "aten::_to_copy", "aten::copy_", "aten::copy", "aten::cat"}
_CONTIGUOUS, _CHANNELS_LAST = torch.contiguous_format, torch.channels_last
_Sizes = ProductSizes[int] | ConvolutionSizes[int] | MovingSizes[int]


def sizes_of(name: str, args: tuple[Any, ...], inputs: list[Any], outputs: list[Any]) -> _Sizes | None:
    """Sizes of the kernel of operator `name`; None where its arguments don't tell.

    `inputs` and `outputs` are the tensors among arguments and results.
    """
    first = _FIRST_FACTOR.get(name)
    if len(args) < _NUM_POSITIONS.get(name, 0):
        # Given by keyword, which autograd and modules don't do.
        return None
    if first is not None:
        left, right = args[first], args[first + 1]
        batch = left.shape[0] if left.dim() == 3 else 1
        return ProductSizes(batch, left.shape[-2], right.shape[-1], left.shape[-1])
    if name == "aten::convolution":
        return _convolution(args[0], args[1], outputs[0], args[6], args[8], 0)
    if name == "aten::convolution_backward":
        gradients = sum(bit for bit, wanted in zip((1, 2, 4), args[10], strict=True) if wanted)
        return _convolution(args[1], args[2], args[0], args[7], args[9], gradients)
    written = sum(tensor.numel() * tensor.element_size() for tensor in outputs)
    permuted = name in _COPIES and any(_runs_otherwise(tensor, out) for tensor in inputs for out in outputs[:1])
    statistics = name.endswith("batch_norm") and any(value is True for value in args[5:6])
    return MovingSizes(written, int(permuted), int(statistics))


def flops_of(sizes: _Sizes | None) -> int | None:
    """Floating-point operations that follow from these sizes; None where they don't tell."""
    if isinstance(sizes, ProductSizes):
        return 2 * int(prod(sizes))
    if isinstance(sizes, ConvolutionSizes):
        passes = max(1, (sizes.gradients & 1) + (sizes.gradients >> 1 & 1))
        channels = sizes.inputs * sizes.outputs // sizes.groups
        return int(2 * sizes.images * channels * sizes.output_pixels * sizes.taps * passes)
    return None


def _convolution(source: Any, weight: Any, out: Any, is_transposed: bool, groups: int, gradients: int) -> _Sizes:
    taps = prod(weight.shape[2:])
    if is_transposed:
        # It is the gradient of the input of the convolution from its output to its input.
        source, out = out, source
        gradients = 1 if gradients == 0 else gradients
    last = int(any(_is_channels_last(tensor) for tensor in (source, weight)))
    pixels, out_pixels = prod(source.shape[2:]), prod(out.shape[2:])
    channels = source.shape[1], out.shape[1]
    return ConvolutionSizes(out.shape[0], *channels, groups, pixels, out_pixels, taps, last, gradients)


def _is_channels_last(tensor: Any) -> bool:
    return (
        tensor.dim() == 4
        and tensor.is_contiguous(memory_format=_CHANNELS_LAST)
        and not tensor.is_contiguous(memory_format=_CONTIGUOUS)
    )


def _runs_otherwise(tensor: Any, out: Any) -> bool:
    """Whether a large tensor lies in another order than the one that is made of it."""
    if tensor.numel() < 2 or out.dim() != tensor.dim():
        return False
    both = (tensor.is_contiguous(), out.is_contiguous())
    if all(both):
        return False
    return both[0] != both[1] and not (_is_channels_last(tensor) and _is_channels_last(out))
