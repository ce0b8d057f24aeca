"""Batch sizes between two traces, and beyond them where kernels allow.

A step at batch size n allocates the same blocks in the same order as at another, only larger. Each block's size is a
polynomial in n: constant (weights), linear (activations) or quadratic (a similarity matrix over the batch). Two traces
determine the first two kinds; a negative constant term betrays the third, and a third trace settles it.
"""

from dataclasses import dataclass, replace
from operator import mul

from memfit.core.timeline import Category, Timeline


@dataclass(frozen=True, slots=True)
class Family:
    """Timelines of one step at the batch sizes between its traces and, elsewhere than on CUDA, beyond them."""

    timeline: Timeline
    """The step at the first of the traced sizes."""
    coefficients: tuple[tuple[float, ...], ...]
    """For each block the terms of its polynomial, lowest first, in bytes."""

    def at(self, batch_size: int) -> Timeline:
        """The timeline at `batch_size`."""
        powers = (1, batch_size, batch_size**2)
        blocks = tuple(
            block if len(terms) == 1 else replace(block, size_bytes=max(0, round(sum(map(mul, terms, powers)))))
            for block, terms in zip(self.timeline.blocks, self.coefficients, strict=True)
        )
        return Timeline(blocks, self.timeline.num_ticks, self.timeline.marks)


def needs_third(first: tuple[int, Timeline], second: tuple[int, Timeline]) -> bool:
    """Whether some tensor grows faster than the batch.

    Scratch memory of kernels does so by steps, of which a third trace tells no more than two.
    """
    (n, a), (m, b) = first, second
    return any(
        x.size_bytes != y.size_bytes
        and x.size_bytes * (m - n) < n * (y.size_bytes - x.size_bytes)
        and x.category is not Category.WORKSPACE
        for x, y in zip(a.blocks, b.blocks, strict=True)
    )


def fit(*traces: tuple[int, Timeline]) -> Family | None:
    """The family through two or three traces; None when they don't allocate the same blocks in the same order."""
    timelines = [timeline for _, timeline in traces]
    if not all(_is_same_step(timelines[0], other) for other in timelines[1:]):
        return None
    sizes = [n for n, _ in traces]
    columns = zip(*(timeline.blocks for timeline in timelines), strict=True)
    return Family(timelines[0], tuple(_interpolate(sizes, [b.size_bytes for b in column]) for column in columns))


def _is_same_step(one: Timeline, other: Timeline) -> bool:
    return (
        one.num_ticks == other.num_ticks
        and len(one.blocks) == len(other.blocks)
        and all(
            x.start == y.start and x.end == y.end and x.op == y.op
            for x, y in zip(one.blocks, other.blocks, strict=True)
        )
    )


def _interpolate(points: list[int], values: list[int]) -> tuple[float, ...]:
    """Newton's polynomial through the points, as plain coefficients."""
    if all(v == values[0] for v in values):
        return (values[0],)
    n0, n1 = points[:2]
    slope = (values[1] - values[0]) / (n1 - n0)
    if len(points) == 2:
        return (values[0] - slope * n0, slope)
    n2 = points[2]
    curve = ((values[2] - values[1]) / (n2 - n1) - slope) / (n2 - n0)
    linear = slope - curve * (n0 + n1)
    return (values[0] - linear * n0 - curve * n0 * n0, linear, curve)
