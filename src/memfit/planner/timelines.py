"""What moves on timelines are made of: the situation they start from, its phases and repeated blocks, lives of blocks.

Large models are stacks of equal parts, and PyTorch numbers those: `transformer.h.0` to `transformer.h.11`. Such a part
is the natural unit of checkpointing and of sharding; it is found by the numbers in the paths of modules.

Ticks are whole numbers, one per event. A move that lets a block begin earlier or end sooner has to put its events
between others; it says so with lives, whose moments may be fractions, and `rebuild` numbers all events again.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from memfit.core.device import Origin
from memfit.core.replay import AllocatorOptions
from memfit.core.settings import Keeps, Settings
from memfit.core.timeline import Block, Category, Mark, Phase, Timeline


@dataclass(frozen=True, slots=True)
class Situation:
    """What the moves start from.

    Args:
        timeline: of the step as it is.
        options: of its allocator.
        num_parameters: elements of all parameters; 0 when nobody counted.
        num_devices: devices that the step runs on.
        batch_size: samples of a batch; None when unknown.
        uses_autocast: whether autocast is on already.
        is_fusable: whether the optimizers have fused kernels.
        autocast: the precision that the device is good at.
    """

    timeline: Timeline
    options: AllocatorOptions
    num_parameters: int = 0
    num_devices: int = 1
    batch_size: int | None = None
    uses_autocast: bool = False
    is_fusable: bool = True
    autocast: str = "amp-bf16"

    def move(
        self,
        title: str,
        keeps: Keeps,
        how: str,
        timeline: Timeline,
        origin: Origin = Origin.ASSUMED,
        **settings: Any,
    ) -> "Move":
        """The move to another timeline; `settings` are those that a run of the script can have in force, if any."""
        in_force = replace(AS_IT_IS, **settings) if settings else None
        return Move(title, keeps, how, origin, timeline, self.options, in_force)


AS_IT_IS = Settings(set_to_none=False)
"""The script unchanged: `set_to_none` means here that gradients are dropped right after each update."""


@dataclass(frozen=True, slots=True)
class Move:
    """One change.

    Args:
        title: the change in words.
        keeps: what it does to the numbers.
        how: one line of code or the setting.
        origin: simulated where only the order of events or the allocator differs, assumed where sizes are guessed.
        timeline: of the step after the change.
        options: of its allocator after the change.
        settings: the change as a run of the script can have it in force; None where that takes another script, or where
            a replay of the same events tells as much.
        accumulates: whether the micro-batches of the settings make up one update.
    """

    title: str
    keeps: Keeps
    how: str
    origin: Origin
    timeline: Timeline
    options: AllocatorOptions
    settings: Settings | None = None
    accumulates: bool = True


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
        # The first of each step.
        begins = {span.step: span.start for span in reversed(self.all)}
        self._forward = {span.step: span for span in reversed(self.all) if span.phase is Phase.FORWARD}
        self._after = {step: begins[later] for step, later in pairwise(dict.fromkeys(span.step for span in self.all))}

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


def has_batch_norm(timeline: Timeline) -> bool:
    """Whether some layer computes statistics over the batch."""
    return any("batch_norm" in block.op for block in timeline.blocks)


def of_the_graph(block: Block) -> bool:
    """Whether a block is made by the forward or backward pass and is no gradient, parameter or workspace."""
    return block.category in (Category.ACTIVATION, Category.TEMPORARY) and block.phase in (
        Phase.FORWARD,
        Phase.BACKWARD,
    )


BEFORE = -0.5
"""Added to a tick: just before the event there."""


class Life(NamedTuple):
    """A block with its moments; `end` is None when it outlives the timeline."""

    block: Block
    start: float
    end: float | None


def lives(timeline: Timeline) -> list[Life]:
    """Every block of a timeline as it is."""
    return [Life(block, block.start, block.end) for block in timeline.blocks]


def resized(life: Life, size_bytes: int) -> Life:
    """The same life of a block of another size."""
    return life._replace(block=replace(life.block, size_bytes=size_bytes))


def rebuild(moved: Iterable[Life], marks: tuple[Mark, ...]) -> Timeline:
    """The timeline of these lives; a life that ends no later than it begins is left out, as are blocks of 0 bytes."""
    kept = [life for life in moved if life.block.size_bytes and (life.end is None or life.start < life.end)]
    # At the same moment, frees come first: what makes room is asked before what needs it.
    events: list[tuple[float, int, int]] = []
    for index, life in enumerate(kept):
        events.append((life.start, 1, index))
        if life.end is not None:
            events.append((life.end, 0, index))
    events.sort()
    starts = {index: tick for tick, (_, begins, index) in enumerate(events) if begins}
    ends = {index: tick for tick, (_, begins, index) in enumerate(events) if not begins}
    # As `replace` would, in a third of the time: a search for a plan makes millions of these.
    blocks = [
        Block(b.size_bytes, starts[i], ends.get(i), b.category, b.phase, b.module, b.op, b.source)
        for i, b in enumerate(life.block for life in kept)
    ]
    blocks.sort(key=lambda block: block.start)
    moments = [moment for moment, _, _ in events]
    renumbered = tuple(replace(mark, tick=bisect_left(moments, mark.tick)) for mark in marks)
    return Timeline(tuple(blocks), len(events), renumbered)
