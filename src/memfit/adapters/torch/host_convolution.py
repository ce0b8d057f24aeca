"""What oneDNN's convolutions allocate on a CPU.

Given channels-first tensors, oneDNN copies data, weight and result into layouts of its own, with channels in blocks as
wide as a vector register, and the result back at the end. Channels-last tensors it takes as they are, but for the
weight. A convolution has three passes, each a primitive of its own: gather (data to result), scatter (result's gradient
to data's gradient) and weigh (both to the weight's gradient). A transposed convolution is the same with gather and
scatter exchanged.

The passes were watched allocation by allocation under PyTorch's profiler (torch 2.13, AVX-512, float32); the conditions
named after a kernel are those under which oneDNN 3 refuses its vector kernels and multiplies matrices instead.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import torch

from memfit.adapters.torch.convolution_layout import channels_last_format
from memfit.adapters.torch.shapes import Operator

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# At most this many channels (those of images) are read in place, not copied into blocks.
_FEW_CHANNELS = 3
# Widest kernel of the vector code for the weight's gradient, plain and depthwise (jit_avx512_common, jit_uni_dw).
_WIDEST_KERNEL = 14
_WIDEST_DEPTHWISE_KERNEL = 3
# Pixels that the vector code makes at a time: 7 to 15, fewer with more channels. A dilated kernel must not reach
# further over an edge than that; tested with 16 to 512 channels.
_UNROLLED_PIXELS = 7


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _round_up(count: int, block: int) -> int:
    return -(-count // block) * block


def block_width() -> int:
    """Channels in a block: the float32 elements of a vector register."""
    return 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8


@dataclass(frozen=True)
class Geometry:
    """An ordinary convolution: the gather reads `source` and makes `result`.

    Args:
        source: sizes of what the gather reads: a convolution's input, a transposed one's output.
        result: sizes of what it makes.
        kernel: spatial sizes of the weight.
        stride: as given to the operator, like the next two.
        padding: per side.
        dilation: distance of the kernel's taps.
        groups: of channels.
        element_size: in bytes.
        threads: that share the work.
        block: channels in a block.
    """

    source: tuple[int, ...]
    result: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    element_size: int
    threads: int
    block: int

    @cached_property
    def depthwise(self) -> bool:
        """One channel per group."""
        return self.groups > 1 and self.groups == self.source[1] == self.result[1]

    @cached_property
    def few_channels(self) -> bool:
        """The source is read in place."""
        return self.groups == 1 and self.source[1] <= _FEW_CHANNELS

    @cached_property
    def strided(self) -> bool:
        """Some stride is greater than one."""
        return any(s > 1 for s in self.stride)

    @cached_property
    def weight_bytes(self) -> int:
        """The weight as it is."""
        return self.source[1] * self.result[1] // self.groups * prod(self.kernel) * self.element_size

    @cached_property
    def weight_blocks(self) -> int:
        """Bytes of the weight with both kinds of channels in blocks."""
        taps = prod(self.kernel) * self.element_size
        if self.depthwise:
            return _round_up(self.groups, self.block) * taps
        if self.groups > 1:
            return self.weight_bytes
        sources = self.source[1] if self.few_channels else _round_up(self.source[1], self.block)
        return sources * _round_up(self.result[1], self.block) * taps

    def plain(self, sizes: tuple[int, ...]) -> int:
        """Bytes of a tensor of `sizes`."""
        return prod(sizes) * self.element_size

    def blocks(self, sizes: tuple[int, ...]) -> int:
        """Bytes of a tensor of `sizes` with its channels in blocks; groups are never padded."""
        padded = self.groups == 1 or self.depthwise
        channels = _round_up(sizes[1], self.block) if padded else sizes[1]
        return sizes[0] * channels * prod(sizes[2:]) * self.element_size

    @cached_property
    def source_copy(self) -> int:
        """Bytes of the blocked copy of the source, none where it is read in place."""
        return 0 if self.few_channels else self.blocks(self.source)

    @cached_property
    def picked_pixels(self) -> int:
        """Scratch of a 1x1 kernel with a stride: each thread first picks its pixels of one image (rtus_driver)."""
        if not self.strided or prod(self.kernel) > 1 or len(self.source) != 4 or self.groups > 1:
            return 0
        pixels = prod(self.result[2:])
        return self.threads * _round_up(self.source[1], self.block) * pixels * self.element_size

    @cached_property
    def columns(self) -> int:
        """Scratch of a matrix multiplication: each thread unfolds an image of one group, slice by slice."""
        pixels = prod(self.result[-2:]) if len(self.source) > 3 else self.result[-1]
        return self.threads * self.source[1] // self.groups * prod(self.kernel) * pixels * self.element_size

    @cached_property
    def strided_scratch(self) -> int:
        """Each thread lays one image of the result out for the strided scatter (brgemm_convolution_bwd_strided)."""
        return self.threads * self.plain((1, *self.result[1:]))

    @cached_property
    def reductions(self) -> int:
        """Bytes of the extra weight gradients of threads that share the batch, to be summed at the end."""
        return (batch_shares(self) - 1) * self.weight_blocks

    @cached_property
    def gather_peak(self) -> int:
        """Greatest bytes live in the pass that makes the result, that tensor included."""
        result = self.blocks(self.result)
        if self._refuses(self.padding[-1]):
            plain = self.plain(self.result)
            return max(plain + self.columns, 2 * plain)
        return max(
            self.source_copy + self.weight_blocks + result + self.picked_pixels,
            result + self.plain(self.result),
        )

    @cached_property
    def scatter_peak(self) -> int:
        """Greatest bytes live in the pass that makes the source's gradient, that tensor included."""
        source = self.plain(self.source)
        reach = (self.kernel[-1] - 1) * self.dilation[-1]
        if self._refuses(reach - self.padding[-1]):
            return max(source + self.columns, 2 * source)
        if self.strided and self.groups == 1:
            # Works on channels-last copies, and the gradient is copied twice more on its way out.
            channels = _round_up(self.source[1], self.block) * self.result[1]
            weight = channels * prod(self.kernel) * self.element_size
            return max(self.plain(self.result) + weight + source + self.strided_scratch, 3 * source)
        copy = self.blocks(self.source)
        return max(self.blocks(self.result) + self.weight_blocks + copy, copy + source)

    @cached_property
    def weigh_peak(self) -> int:
        """Greatest bytes live in the pass that makes the weight's gradient, that tensor included."""
        blocks = self.weight_blocks
        if self._refuses_weigh():
            # The gradients to be summed are booked by bytes where elements are meant: four times as large for float32.
            sums = 4 * self.threads * self.weight_bytes if self.source[0] > 1 and self.threads > 1 else 0
            return max(self.weight_bytes + self.columns + sums, 2 * self.weight_bytes)
        copies = self.blocks(self.result) + self.source_copy
        return max(copies + blocks + self.reductions + self.picked_pixels, blocks + self.weight_bytes)

    def _refuses(self, overlap: int) -> bool:
        """A dilated kernel that overlaps an edge by too many pixels."""
        return self.dilation[-1] > 1 and not self.strided and overlap > _UNROLLED_PIXELS

    def _refuses_weigh(self) -> bool:
        """Kernels too wide, or deeper than the data."""
        if self.kernel[-1] > (_WIDEST_DEPTHWISE_KERNEL if self.depthwise else _WIDEST_KERNEL):
            return True
        return len(self.source) == 5 and self.source[2] < self.kernel[0]


def batch_shares(geometry: Geometry) -> int:
    """Into how many parts the threads split the batch when they compute the weight's gradient.

    oneDNN weighs what each thread would read of source and result against the weights it would write, and
    takes the cheapest split over batch, output and input channels (`balance` in jit_avx512_common_conv_kernel).
    """
    threads, block = geometry.threads, geometry.block
    if geometry.groups >= threads:
        return 1
    source_blocks = -(-geometry.source[1] // block)
    result_blocks = -(-geometry.result[1] // block)
    # Its costs: reading counts once, or four times for the first layer's images; a weight counts as its write and
    # reduction.
    reading = 4 if geometry.few_channels else 1
    writing = 12 if prod(geometry.kernel) == 1 else 5
    source_cost = reading * block * prod(geometry.source[2:]) // prod(geometry.stride)
    result_cost = block * prod(geometry.result[2:])
    weight_cost = writing * prod(geometry.kernel) * block * block
    best, shares = None, 1
    for batch in range(1, min(threads, geometry.source[0]) + 1):
        for results in range(1, min(threads // batch, result_blocks) + 1):
            sources = min(threads // batch // results, source_blocks)
            images = -(-geometry.source[0] // batch)
            read, made = -(-source_blocks // sources), -(-result_blocks // results)
            cost = images * (source_cost * read + result_cost * made) + weight_cost * read * made
            if best is None or cost <= best:
                best, shares = cost, batch
    return shares


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
            copies = sum(_bytes(t) for t in (data, weight) if not t.is_contiguous(memory_format=layout))
            return [copies + _bytes(weight)]
        geometry = geometry_of(data, weight, out, options, self._threads, self._block)
        peak = geometry.scatter_peak if options[3] else geometry.gather_peak
        return [_copies(data) + peak - _bytes(out)]

    def backward(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
        """Bytes taken during `convolution_backward`: first the data's gradient, then the weight's."""
        gradient, data, weight = args[:3]
        options, wanted = args[4:10], args[10]
        if not self._uses_onednn(data, weight, options):
            return [_unfolded(data, weight, gradient, options)]
        geometry = geometry_of(data, weight, gradient, options, self._threads, self._block)
        layout = channels_last_format(data, weight)
        kept = sum(_bytes(part) for part in out if part is not None)
        data_bytes = _bytes(data) if wanted[0] else 0
        if layout is not None:
            copies = sum(_bytes(t) for t in (gradient, data, weight) if not t.is_contiguous(memory_format=layout))
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
    return sum(_bytes(t) for t in tensors if not t.is_contiguous())


def _unfolded(data: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, options: tuple[Any, ...]) -> int:
    """Without oneDNN every image is unfolded into a matrix, but for 1x1 kernels (ConvolutionMM2d.cpp)."""
    taps = prod(weight.shape[2:])
    if taps == 1 and all(s == 1 for s in options[0]):
        return 0
    return data.shape[0] * weight.shape[1] * taps * prod(out.shape[2:]) * data.element_size()


def _channels_last_peak(geometry: Geometry, data_bytes: int) -> int:
    """Both backward passes on channels-last tensors: only the weight and its gradient are copied into blocks."""
    weight = geometry.weight_bytes
    blocks = weight
    if geometry.depthwise and geometry.kernel[-1] > _WIDEST_DEPTHWISE_KERNEL:
        # The general kernel takes over and pads each group's only channel to a block, on both sides.
        blocks = weight * geometry.block**2
    scratch = geometry.strided_scratch if geometry.strided and geometry.groups == 1 else 0
    scatter = data_bytes + weight + scratch
    weigh = data_bytes + blocks + geometry.reductions + geometry.picked_pixels
    return max(scatter if data_bytes else 0, weigh, data_bytes + blocks + 2 * weight)
