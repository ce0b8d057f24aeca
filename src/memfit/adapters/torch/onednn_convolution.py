"""One convolution in oneDNN's terms, and the greatest memory of each of its passes.

Given channels-first tensors, oneDNN copies data, weight and result into layouts of its own, with channels in blocks as
wide as a vector register, and the result back at the end. A convolution has three passes, each a primitive of its own:
gather (data to result), scatter (result's gradient to data's gradient) and weigh (both to the weight's gradient).

The passes were watched allocation by allocation under PyTorch's profiler (torch 2.13, AVX-512, float32); the conditions
named after a kernel are those under which oneDNN 3 refuses its vector kernels and multiplies matrices instead.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from memfit.core.units import KIB

# Channels of images: with so few the weigh pass reads the source in place.
_IMAGE_CHANNELS = 3
# Widest kernel of the vector code for the weight's gradient, plain and depthwise (jit_avx512_common, jit_uni_dw).
_WIDEST_KERNEL = 14
_WIDEST_DEPTHWISE_KERNEL = 3
# Registers that hold pixels in the making; one more is kept for the weight.
_REGISTERS = 31
# Pixels that kernels wider than this make at a time, however many channels there are.
_NARROW_KERNEL = 3
_UNROLLED_PIXELS = 28
# Of a matrix to be multiplied, a thread of the gather makes what its core's cache holds (290 to 720 KB measured), one
# of the weigh pass at most this many columns (416 with up to 64 output channels, fewer with more).
_CACHED_COLUMNS_BYTES = 640 * KIB
_UNFOLDED_PIXELS = 416
# The narrowest vector code needs whole groups of this many channels.
_GROUP_MULTIPLE = 8


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
    def multiplies(self) -> bool:
        """No pass has vector code: odd groups, or depthwise in three dimensions."""
        if self.depthwise:
            return len(self.source) == 5
        widths = (self.source[1] // self.groups, self.result[1] // self.groups)
        return self.groups > 1 and any(width % _GROUP_MULTIPLE for width in widths)

    @cached_property
    def narrow(self) -> bool:
        """Fewer source channels than a block, under a kernel of several taps: first layers."""
        return self.groups == 1 and self.source[1] < self.block and prod(self.kernel) > 1

    @cached_property
    def reads_images(self) -> bool:
        """So few source channels that no pass but the scatter copies them."""
        return self.narrow and self.source[1] <= _IMAGE_CHANNELS

    @cached_property
    def wide_depthwise(self) -> bool:
        """Depthwise, with a kernel that its own vector code for the weight's gradient doesn't take."""
        return self.depthwise and (self.kernel[-1] > _WIDEST_DEPTHWISE_KERNEL or self.dilation[-1] > 1)

    @cached_property
    def strided(self) -> bool:
        """Some stride is greater than one."""
        return any(s > 1 for s in self.stride)

    @cached_property
    def weight_bytes(self) -> int:
        """The weight as it is."""
        return self.source[1] * self.result[1] // self.groups * prod(self.kernel) * self.element_size

    def weight_blocks(self, source_channels: int | None = None) -> int:
        """Bytes of the weight with both kinds of channels in blocks, or with as many source channels as given."""
        taps = prod(self.kernel) * self.element_size
        if self.depthwise:
            return _round_up(self.groups, self.block) * taps
        if self.groups > 1:
            return self.weight_bytes
        if source_channels is None:
            source_channels = _round_up(self.source[1], self.block)
        return source_channels * _round_up(self.result[1], self.block) * taps

    @cached_property
    def padded_groups(self) -> int:
        """Bytes of the weight with the channels of each group in blocks."""
        widths = (_round_up(sizes[1] // self.groups, self.block) for sizes in (self.source, self.result))
        return self.groups * prod(widths) * prod(self.kernel) * self.element_size

    def plain(self, sizes: tuple[int, ...]) -> int:
        """Bytes of a tensor of `sizes`."""
        return prod(sizes) * self.element_size

    def blocks(self, sizes: tuple[int, ...]) -> int:
        """Bytes of a tensor of `sizes` with its channels in blocks; groups are never padded."""
        padded = self.groups == 1 or self.depthwise
        channels = _round_up(sizes[1], self.block) if padded else sizes[1]
        return sizes[0] * channels * prod(sizes[2:]) * self.element_size

    @cached_property
    def picked_pixels(self) -> int:
        """Scratch of a 1x1 kernel with a stride: each thread first picks its pixels of one image (rtus_driver)."""
        if not self.strided or prod(self.kernel) > 1 or len(self.source) != 4 or self.groups > 1:
            return 0
        pixels = prod(self.result[2:])
        return self.threads * _round_up(self.source[1], self.block) * pixels * self.element_size

    def columns(self, most_pixels: int | None = None) -> int:
        """Bytes that a thread needs to unfold an image of one group, a slice of its depth and some pixels at a time."""
        if prod(self.kernel) == 1 and not self.strided:
            return 0
        pixels = prod(self.result[-2:]) if len(self.source) > 3 else self.result[-1]
        if most_pixels is not None:
            pixels = min(pixels, most_pixels)
        return self.source[1] // self.groups * prod(self.kernel) * pixels * self.element_size

    @cached_property
    def strided_scratch(self) -> int:
        """Each thread lays one image of the result out for the strided scatter (brgemm_convolution_bwd_strided)."""
        return self.threads * self.plain((1, *self.result[1:]))

    @cached_property
    def reductions(self) -> int:
        """How many extra copies of the weight's gradient there are, of threads that share the batch."""
        return batch_shares(self) - 1

    @cached_property
    def gather_peak(self) -> int:
        """Greatest bytes live in the pass that makes the result, that tensor included."""
        result, plain = self.blocks(self.result), self.plain(self.result)
        if self.multiplies or self._overlaps(self.padding[-1], self.result[1]):
            return plain + max(self.threads * min(self.columns(), _CACHED_COLUMNS_BYTES), plain)
        if self.narrow:
            return result + max(self.weight_blocks(self.source[1]), plain)
        return result + max(self.blocks(self.source) + self.weight_blocks() + self.picked_pixels, plain)

    @cached_property
    def scatter_peak(self) -> int:
        """Greatest bytes live in the pass that makes the source's gradient, that tensor included."""
        source = self.plain(self.source)
        reach = (self.kernel[-1] - 1) * self.dilation[-1]
        if self.multiplies or self._overlaps(reach - self.padding[-1], self.source[1]):
            return source + max(self.threads * self.columns(), source)
        if self.strided and self.groups == 1:
            # Works on channels-last copies, and the gradient is copied twice more on its way out.
            channels = _round_up(self.source[1], self.block) * self.result[1]
            weight = channels * prod(self.kernel) * self.element_size
            return max(self.plain(self.result) + weight + source + self.strided_scratch, 3 * source)
        return self.blocks(self.source) + max(self.blocks(self.result) + self.weight_blocks(), source)

    @cached_property
    def weigh_peak(self) -> int:
        """Greatest bytes live in the pass that makes the weight's gradient, that tensor included."""
        if self._refuses_weigh():
            # The gradients to be summed are booked by bytes where elements are meant: four times as large for float32.
            sums = 4 * self.weight_bytes if self.source[0] > 1 and self.threads > 1 else 0
            scratch = self.threads * (self.columns(_UNFOLDED_PIXELS) + sums)
            return self.weight_bytes + max(scratch, self.weight_bytes)
        if self.reads_images:
            weight = self.weight_blocks(self.source[1])
            inputs, sums = self.blocks(self.result), self.reductions * weight
        elif self.narrow:
            # A kernel for half as wide registers takes over; its threads don't share the batch.
            channels = _round_up(self.source[1], self.block // 2)
            weight, sums = self.weight_blocks(channels), 0
            inputs = self.blocks(self.result) + self.plain((self.source[0], channels, *self.source[2:]))
        else:
            weight = self.weight_blocks()
            inputs = self.blocks(self.result) + self.blocks(self.source)
            sums = self.reductions * weight + self.picked_pixels
        return weight + max(inputs + sums, self.weight_bytes)

    def _overlaps(self, pixels: int, channels: int) -> bool:
        """Whether a dilated kernel reaches over an edge by more pixels than are made at a time.

        Pixels in the making, each with some blocks of channels and a register more, fill the registers; tested with
        16 to 512 channels.
        """
        if self.dilation[-1] == 1 or self.strided:
            return False
        if self.kernel[-1] > _NARROW_KERNEL:
            return pixels > _UNROLLED_PIXELS
        blocks = -(-channels // self.block)
        at_once = next(n for n in (4, 3, 2, 1) if blocks % n == 0)
        return pixels > _REGISTERS // (at_once + 1)

    def _refuses_weigh(self) -> bool:
        """Kernels too wide; dilated ones higher than the data; in three dimensions deeper ones, or few channels."""
        if self.multiplies or self.wide_depthwise or self.kernel[-1] > _WIDEST_KERNEL:
            return True
        extent = (self.kernel[0] - 1) * self.dilation[0] + 1
        too_large = extent > self.source[2]
        if len(self.source) == 5:
            return too_large or (self.narrow and not self.reads_images)
        return len(self.source) == 4 and self.dilation[0] > 1 and too_large


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
    # Its costs: reading counts once, images four times; a weight counts as its write and reduction.
    reading = 4 if geometry.reads_images else 1
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
