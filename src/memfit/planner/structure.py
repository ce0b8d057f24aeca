"""What a timeline tells about the program behind it: its phases in order, and the blocks of layers that repeat.

Large models are stacks of equal parts, and PyTorch numbers those: `transformer.h.0` to `transformer.h.11`. Such a part
is the natural unit of checkpointing and of sharding; it is found by the numbers in the paths of modules.
"""

from bisect import bisect_right
from itertools import pairwise
from typing import NamedTuple

from memfit.core.timeline import Block, Category, Phase, Timeline


class Span(NamedTuple):
    """A stretch of time in one phase: from `start` up to, not including, `end`."""

    phase: Phase
    step: int
    start: int
    end: int


class Spans:
    """The phases of a timeline in order."""

    def __init__(self, timeline: Timeline) -> None:
        marks = timeline.marks
        ends = [*(mark.tick for mark in marks[1:]), timeline.num_ticks]
        self.all = [Span(m.phase, m.step, m.tick, end) for m, end in zip(marks, ends, strict=False) if m.tick < end]
        self._starts = [span.start for span in self.all]
        self._forward: dict[int, Span] = {}
        self._begins: dict[int, int] = {}
        for span in self.all:
            self._begins.setdefault(span.step, span.start)
            if span.phase is Phase.FORWARD:
                self._forward.setdefault(span.step, span)
        steps = list(self._begins)
        self._after = {step: self._begins[later] for step, later in pairwise(steps)}

    def index(self, tick: int) -> int:
        """Number of the span that holds `tick`; -1 before the first."""
        return bisect_right(self._starts, tick) - 1

    def forward_of(self, tick: int) -> Span | None:
        """The first forward pass of the step that `tick` is in."""
        index = self.index(tick)
        return None if index < 0 else self._forward.get(self.all[index].step)

    def after_step(self, tick: int) -> int | None:
        """First tick of the step after the one that `tick` is in; None when it is the last."""
        index = self.index(tick)
        return None if index < 0 else self._after.get(self.all[index].step)


def unit_of(module: str, level: int) -> str | None:
    """The numbered part of the model that a module lies in; `level` 1 is the outermost, 2 the one inside of that.

    Where there are fewer levels than asked for, the innermost counts.

    >>> unit_of("encoder.layers.3.mlp.experts.7.up", 1), unit_of("encoder.layers.3.mlp.experts.7.up", 2)
    ('encoder.layers.3', 'encoder.layers.3.mlp.experts.7')
    >>> unit_of("encoder.layers.3.norm", 2), unit_of("head", 1)
    ('encoder.layers.3', None)
    """
    parts = module.split(".")
    numbered = [index for index, part in enumerate(parts) if part.isdigit()][:level]
    return ".".join(parts[: numbered[-1] + 1]) if numbered else None


def repeated_units(timeline: Timeline, level: int) -> list[str]:
    """Numbered parts with activations of two or more modules inside, in order of their first; none where only one is.

    A numbered layer of a plain `nn.Sequential` is a single module, and no use as a unit.
    """
    inside: dict[str, set[str]] = {}
    for block in timeline.blocks:
        if block.category is Category.ACTIVATION:
            unit = unit_of(block.module, level)
            if unit is not None:
                inside.setdefault(unit, set()).add(block.module)
    found = [unit for unit, modules in inside.items() if len(modules) > 1]
    return found if len(found) > 1 else []


def parameter_sizes(timeline: Timeline) -> dict[str, set[int]]:
    """Sizes of each module's parameters, and half of each: what a cast to 16 bits makes of them."""
    sizes: dict[str, set[int]] = {}
    for block in timeline.blocks:
        if block.category is Category.PARAMETER:
            sizes.setdefault(block.module, set()).update((block.size_bytes, block.size_bytes // 2))
    return sizes


def total_bytes(timeline: Timeline, category: Category) -> int:
    """Sum of all blocks of a category."""
    return sum(block.size_bytes for block in timeline.blocks if block.category is category)


def has_batch_norm(timeline: Timeline) -> bool:
    """Whether some layer computes statistics over the batch."""
    return any("batch_norm" in block.op for block in timeline.blocks)


def has_dropout(timeline: Timeline) -> bool:
    """Whether some layer drops activations at random."""
    return any("dropout" in block.op or "bernoulli" in block.op for block in timeline.blocks)


def of_the_graph(block: Block) -> bool:
    """Whether a block is made by the forward or backward pass and is no gradient, parameter or workspace."""
    return block.category in (Category.ACTIVATION, Category.TEMPORARY) and block.phase in (
        Phase.FORWARD,
        Phase.BACKWARD,
    )
