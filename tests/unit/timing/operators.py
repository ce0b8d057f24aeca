"""Operators made by hand."""

from memfit.core.profile import Work
from memfit.core.timeline import Phase


def product(rows, columns, summed, *, batch=1, dtype="float16", phase=Phase.FORWARD):
    """A matrix product."""
    moved = 2 * batch * (rows * summed + summed * columns + rows * columns)
    flops = 2 * batch * rows * columns * summed
    return Work("", phase, "aten.bmm", flops, moved, dtype, (batch, rows, columns, summed))


def convolution(channels, *, groups=1, images=64, pixels=784, taps=9, last=True, gradients=0, dtype="float16"):
    """A convolution that keeps size and channels."""
    sizes = (images, channels, channels, groups, pixels, pixels, taps, int(last), gradients)
    passes = max(1, (gradients & 1) + (gradients >> 1 & 1))
    flops = 2 * images * pixels * channels * channels // groups * taps * passes
    op, phase = ("aten.convolution_backward", Phase.BACKWARD) if gradients else ("aten.convolution", Phase.FORWARD)
    return Work("", phase, op, flops, 2 * 2 * images * channels * pixels, dtype, sizes)


def elementwise(num_bytes, op="aten.relu", phase=Phase.FORWARD, permuted=0):
    """Reads and writes as many bytes."""
    return Work("", phase, op, 0, 2 * num_bytes, "float16", (num_bytes, permuted, 0))
