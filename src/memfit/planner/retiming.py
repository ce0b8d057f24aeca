"""A timeline made anew after its blocks were moved in time.

Ticks are whole numbers, one per event. A move that lets a block begin earlier or end sooner has to put its events
between others; it says so with lives, whose moments may be fractions, and `rebuild` numbers all events again.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from memfit.core.timeline import Block, Mark, Timeline

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
    starts, ends = [0] * len(kept), [None] * len(kept)  # type: tuple[list[int], list[int | None]]
    for tick, (_, begins, index) in enumerate(events):
        if begins:
            starts[index] = tick
        else:
            ends[index] = tick
    # As `replace` would, in a third of the time: a search for a plan makes millions of these.
    blocks = [
        Block(b.size_bytes, starts[i], ends[i], b.category, b.phase, b.module, b.op, b.source)
        for i, b in enumerate(life.block for life in kept)
    ]
    blocks.sort(key=lambda block: block.start)
    moments = [moment for moment, _, _ in events]
    renumbered = tuple(replace(mark, tick=bisect_left(moments, mark.tick)) for mark in marks)
    return Timeline(tuple(blocks), len(events), renumbered)
