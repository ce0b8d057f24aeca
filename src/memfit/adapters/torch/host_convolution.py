"""What a convolution allocates on a CPU.

oneDNN runs it, with copies of channels-first tensors in layouts of its own (`onednn_convolution`). Channels-last
tensors it takes as they are, but for the weight. A transposed convolution is an ordinary one with gather and scatter
exchanged. Small convolutions and other types of numbers go to PyTorch's own kernels, which unfold images into matrices.
"""

from functools import lru_cache
from math import prod
from typing import Any

import torch

from memfit.adapters.torch.convolution_layout import channels_last_format
from memfit.adapters.torch.onednn_convolution import Geometry, block_width
from memfit.adapters.torch.shapes import Operator, size_bytes

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# Layers repeat: what is known about one serves the next.
_known_geometry = lru_cache(maxsize=4096)(Geometry)


def geometry_of(
    data: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, options: tuple[Any, ...], threads: int, block: int
) -> Geometry:
    """The ordinary convolution behind `convolution(data, weight)`, whose `options` are those after the bias."""
    stride, padding, dilation, transposed, _, groups = options
    source, result = (out, data) if transposed else (data, out)
    kernel, element_size = weight.shape[2:], data.element_size()
    steps = (tuple(stride), tuple(padding), tuple(dilation))
    return _known_geometry(source.shape, result.shape, kernel, *steps, groups, element_size, threads, block)


class HostConvolution:
    """Workspace of forward and backward convolutions."""

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        self._block = block_width()

    def forward(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
        """Bytes taken during `convolution`."""
        data, weight, options = args[0], args[1], args[3:9]
        if not self._uses_onednn(data, weight, options):
            return [_unfolded(data, weight, out, options)]
        layout = channels_last_format(data, weight)
        if layout is not None:
            copies = sum(size_bytes(t) for t in (data, weight) if not t.is_contiguous(memory_format=layout))
            return [copies + size_bytes(weight)]
        geometry = geometry_of(data, weight, out, options, self._threads, self._block)
        peak = geometry.scatter_peak if options[3] else geometry.gather_peak
        return [_copies(data) + peak - size_bytes(out)]

    def backward(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
        """Bytes taken during `convolution_backward`: first the data's gradient, then the weight's."""
        gradient, data, weight = args[:3]
        options, wanted = args[4:10], args[10]
        if not self._uses_onednn(data, weight, options):
            return [_unfolded(data, weight, gradient, options)]
        geometry = geometry_of(data, weight, gradient, options, self._threads, self._block)
        layout = channels_last_format(data, weight)
        kept = sum(size_bytes(part) for part in out if part is not None)
        data_bytes = size_bytes(data) if wanted[0] else 0
        if layout is not None:
            copies = sum(size_bytes(t) for t in (gradient, data, weight) if not t.is_contiguous(memory_format=layout))
            return [copies + _channels_last_peak(geometry, data_bytes) - kept]
        peak = 0
        if wanted[0]:
            peak = geometry.gather_peak if options[3] else geometry.scatter_peak
        if wanted[1]:
            peak = max(peak, data_bytes + geometry.weigh_peak)
        return [_copies(gradient, data) + peak - kept]

    def _uses_onednn(self, data: torch.Tensor, weight: torch.Tensor, options: tuple[Any, ...]) -> bool:
        """Whether oneDNN is worth its copies (ConvParams::use_mkldnn in Convolution.cpp)."""
        stride, _, dilation, _, _, groups = options
        if data.dtype not in _DTYPES:
            return False
        width, height = weight.shape[-1], weight.shape[-2] if weight.dim() > 3 else 1
        moves = any(s != 1 for s in stride) or any(d != 1 for d in dilation)
        shared = moves or data.shape[0] >= 16 or width != 1 or height != 1 or self._threads > 1
        large = groups > 1 or (width > 3 and height > 3) or data.shape[0] > 1 or data.numel() > 20480
        return bool(shared and large)


def _copies(*tensors: torch.Tensor) -> int:
    return sum(size_bytes(t) for t in tensors if not t.is_contiguous())


def _unfolded(data: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, options: tuple[Any, ...]) -> int:
    """Without oneDNN every image is unfolded into a matrix, but for 1x1 kernels (ConvolutionMM2d.cpp)."""
    taps = prod(weight.shape[2:])
    if taps == 1 and all(s == 1 for s in options[0]):
        return 0
    return data.shape[0] * weight.shape[1] * taps * prod(out.shape[2:]) * data.element_size()


def _channels_last_peak(geometry: Geometry, data_bytes: int) -> int:
    """Both backward passes on channels-last tensors: only the weight and its gradient are copied into blocks."""
    weight = geometry.weight_bytes
    # The general kernel pads the channels of each group to a block, on both sides.
    padded = geometry.wide_depthwise or (geometry.groups > 1 and not geometry.depthwise)
    blocks = geometry.padded_groups if padded else weight
    scratch = geometry.strided_scratch if geometry.strided and not geometry.depthwise else 0
    scatter = data_bytes + (weight if geometry.depthwise else blocks) + scratch
    weigh = data_bytes + (1 + geometry.reductions) * blocks + geometry.picked_pixels
    return max(scatter if data_bytes else 0, weigh, data_bytes + blocks + 2 * weight)
