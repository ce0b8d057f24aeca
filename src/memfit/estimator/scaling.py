"""Batch sizes between traces, and beyond them where kernels allow.

A step at batch size n allocates the same blocks in the same order as at another, only larger. Each block's size is a
polynomial in n: constant (weights), linear (activations), quadratic (a similarity matrix over the batch) or cubic (all
triples of a batch). Two traces determine the first two kinds; a negative constant term betrays the others. From then on
further traces decide: a block has the lowest degree whose polynomial gives all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from operator import mul

from memfit.core.timeline import Category, Timeline


@dataclass(frozen=True, slots=True)
class Family:
    """Timelines of one step at the batch sizes between its traces and, elsewhere than on CUDA, beyond them."""

    timeline: Timeline
    """The step at the first of the traced sizes."""
    coefficients: tuple[tuple[float, ...], ...]
    """For each block the terms of its polynomial, lowest first, in bytes."""
    is_settled: bool
    """Whether no further trace is needed to tell how each block grows."""

    def at(self, batch_size: int) -> Timeline:
        """The timeline at `batch_size`."""
        powers = [batch_size**power for power in range(max(map(len, self.coefficients), default=0))]
        blocks = tuple(
            block if len(terms) == 1 else replace(block, size_bytes=max(0, round(sum(map(mul, terms, powers)))))
            for block, terms in zip(self.timeline.blocks, self.coefficients, strict=True)
        )
        return Timeline(blocks, self.timeline.num_ticks, self.timeline.marks)


def fit(*traces: tuple[int, Timeline]) -> Family | None:
    """The family through two or more traces; None when they don't allocate the same blocks in the same order."""
    timelines = [timeline for _, timeline in traces]
    if not all(_is_same_step(timelines[0], other) for other in timelines[1:]):
        return None
    sizes = [n for n, _ in traces]

    @cache
    def polynomial(values: tuple[int, ...], is_scratch: bool) -> tuple[tuple[float, ...], bool]:
        terms, is_known = _polynomial(sizes, values)
        if is_scratch and not is_known:
            # Scratch memory of kernels grows by steps, of which further traces tell no more than the first two.
            terms, is_known = _through(sizes[:2], values[:2]), True
        return tuple(map(float, terms)), is_known

    columns = zip(*(timeline.blocks for timeline in timelines), strict=True)
    found = [
        polynomial(tuple(block.size_bytes for block in column), column[0].category is Category.WORKSPACE)
        for column in columns
    ]
    return Family(timelines[0], tuple(terms for terms, _ in found), all(is_known for _, is_known in found))


def _is_same_step(one: Timeline, other: Timeline) -> bool:
    return (
        one.num_ticks == other.num_ticks
        and len(one.blocks) == len(other.blocks)
        and all(
            x.start == y.start and x.end == y.end and x.op == y.op
            for x, y in zip(one.blocks, other.blocks, strict=True)
        )
    )


def _polynomial(sizes: Sequence[int], values: Sequence[int]) -> tuple[list[Fraction], bool]:
    """(terms of the polynomial of lowest degree that gives all values, whether a value more than it takes is given).

    Where no lower degree does, the polynomial is through all of them. Of two values, a line without a negative constant
    term is taken to be known.
    """
    if all(value == values[0] for value in values):
        return [Fraction(values[0])], True
    for count in range(2, len(sizes)):
        terms = _through(sizes[:count], values[:count])
        others = zip(sizes[count:], values[count:], strict=True)
        if all(sum(term * size**power for power, term in enumerate(terms)) == value for size, value in others):
            return terms, True
    terms = _through(sizes, values)
    return terms, len(sizes) == 2 and terms[0] >= 0


def _through(sizes: Sequence[int], values: Sequence[int]) -> list[Fraction]:
    """Newton's polynomial through the points, as plain coefficients."""
    differences = [Fraction(value) for value in values]
    for order in range(1, len(sizes)):
        for index in range(len(sizes) - 1, order - 1, -1):
            rise = differences[index] - differences[index - 1]
            differences[index] = rise / (sizes[index] - sizes[index - order])
    terms: list[Fraction] = []
    for size, difference in zip(reversed(sizes), reversed(differences), strict=True):
        # What there is times (n - size), plus the difference.
        shifted = [Fraction(0), *terms]
        terms = [term - size * above for term, above in zip(shifted, [*terms, Fraction(0)], strict=True)]
        terms[0] += difference
    return terms
