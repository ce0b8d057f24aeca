"""The timeline: every allocation of a training step, from birth to death.

Everything in memfit produces or consumes a `Timeline`. It holds one `Block` per allocation. Time is counted in ticks:
each allocation and each free is one tick, so that the order of events is exact and two never coincide. A timeline says
what the program asked for; what a device must provide for it is the allocator's answer (`memfit.allocator`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Any

from memfit.core.shown import Shown
from memfit.core.typed_data import header, reading
from memfit.core.units import format_size


class Category(StrEnum):
    """The purpose of a block of memory."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    ACTIVATION = "activation"
    """Kept by the forward pass for the backward pass."""
    TEMPORARY = "temporary"
    BATCH = "input batch"
    WORKSPACE = "workspace"
    """Scratch memory of a kernel library, invisible to the program."""


class Phase(StrEnum):
    """The part of a step in which a block is allocated."""

    SETUP = "setup"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


def is_optional(category: Category, op: str) -> bool:
    """Whether the library does without such a block where there is no room: cuDNN has algorithms that need none."""
    return category is Category.WORKSPACE and "convolution" in op


@dataclass(frozen=True, slots=True)
class Block:
    """One allocation.

    Args:
        size_bytes: what the program asked for, before any rounding by an allocator.
        start: tick of the allocation.
        end: tick of the free; None when the block outlives the timeline.
        category: what it is for.
        phase: part of the step that allocated it.
        module: dotted path of the module, "" for the model itself or outside of it.
        op: operator that allocated it, such as "aten.convolution".
        source: innermost line of code outside the framework, "file.py:31", or "" where there is none.
        at_most: the size depends on data, and is the largest that it can be. Not saved.
        stream: number of the stream that allocated it; 0 is the default one. What one stream has freed serves no other.
    """

    size_bytes: int
    start: int
    end: int | None
    category: Category
    phase: Phase
    module: str = ""
    op: str = ""
    source: str = ""
    at_most: bool = field(default=False, compare=False)
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    """A named moment: from `tick` on, the program is in `phase` of step number `step` (counted from 1; 0 is set-up)."""

    tick: int
    phase: Phase
    step: int


@dataclass(frozen=True, slots=True, repr=False)
class Timeline(Shown):
    """Blocks in order of their start, the number of ticks, and the marks where phases begin."""

    blocks: tuple[Block, ...]
    num_ticks: int
    marks: tuple[Mark, ...] = ()

    def summary(self) -> str:
        """How much it holds."""
        return (
            f"of {len(self.blocks):,} blocks over {self.num_ticks:,} ticks: at most {format_size(self.peak()[1])} live"
        )

    def events(self) -> Iterator[tuple[int, bool]]:
        """(index of the block, True for its allocation or False for its free), in order of time."""
        order: list[tuple[int, bool] | None] = [None] * self.num_ticks
        for index, block in enumerate(self.blocks):
            order[block.start] = (index, True)
            if block.end is not None:
                order[block.end] = (index, False)
        return (event for event in order if event is not None)

    def curve(self) -> list[int]:
        """Live bytes after each tick."""
        change = [0] * self.num_ticks
        for block in self.blocks:
            change[block.start] += block.size_bytes
            if block.end is not None:
                change[block.end] -= block.size_bytes
        return list(accumulate(change))

    def peak(self) -> tuple[int, int]:
        """(tick, live bytes) where the live bytes are greatest for the first time; (0, 0) when nothing is allocated."""
        curve = self.curve()
        if not curve:
            return 0, 0
        most = max(curve)
        return curve.index(most), most

    def live_at(self, tick: int) -> list[Block]:
        """Blocks alive just after `tick`."""
        return [b for b in self.blocks if b.start <= tick and (b.end is None or b.end > tick)]

    def breakdown(self, tick: int, by: Callable[[Block], str]) -> dict[str, int]:
        """Live bytes at `tick` grouped by `by(block)`, largest first."""
        groups: dict[str, int] = {}
        for block in self.live_at(tick):
            key = by(block)
            groups[key] = groups.get(key, 0) + block.size_bytes
        return dict(sorted(groups.items(), key=lambda item: (-item[1], item[0])))

    def without(self, drop: Callable[[Block], bool]) -> "Timeline":
        """The timeline as if the blocks for which `drop` is true had never been."""
        return Timeline(tuple(b for b in self.blocks if not drop(b)), self.num_ticks, self.marks)

    def without_optional(self) -> "Timeline":
        """The timeline without workspaces that a library can do without."""
        return self.without(lambda block: is_optional(block.category, block.op))

    def certain(self) -> "Timeline":
        """The timeline of what a step can't do without: no such workspaces, nothing whose size is an upper bound."""
        return self.without(lambda block: block.at_most or is_optional(block.category, block.op))

    def mark_at(self, tick: int) -> Mark:
        """The mark in force at `tick`."""
        return next((mark for mark in reversed(self.marks) if mark.tick <= tick), Mark(0, Phase.SETUP, 0))

    def to_json(self) -> dict[str, Any]:
        """A plain structure that `json` can write; strings are stored once."""
        strings: dict[str, int] = {}

        def code(text: str) -> int:
            return strings.setdefault(text, len(strings))

        rows = [
            [b.size_bytes, b.start, b.end, code(b.category), code(b.phase), code(b.module), code(b.op), code(b.source)]
            for b in self.blocks
        ]
        streams = [[index, block.stream] for index, block in enumerate(self.blocks) if block.stream]
        return {
            **header("timeline"),
            "num_ticks": self.num_ticks,
            "marks": [[m.tick, m.phase.value, m.step] for m in self.marks],
            "blocks": rows,
            "strings": list(strings),
            # Of the few blocks that aren't on the default stream; timelines that have none look as they always did.
            **({"streams": streams} if streams else {}),
        }

    @classmethod
    def from_json(cls, data: Any) -> "Timeline":
        """The timeline that `to_json` wrote, from its structure or its text."""
        with reading(data, "timeline", "a timeline") as plain:
            s, num_ticks = plain["strings"], _count(plain["num_ticks"])
            if not all(isinstance(text, str) for text in s):
                raise ValueError("a field that should be text is not")
            blocks: list[Block] = []
            streams = {_count(index): _count(stream) for index, stream in plain.get("streams", ())}
            for size, start, end, c, p, *names in plain["blocks"]:
                module, op, source = (s[name] for name in names)
                last = None if end is None else _count(end)
                stream = streams.get(len(blocks), 0)
                block = Block(
                    _count(size), _count(start), last, Category(s[c]), Phase(s[p]), module, op, source, stream=stream
                )
                if not block.start < (num_ticks if last is None else last) <= num_ticks:
                    raise ValueError(f"a block lies outside of the timeline's {num_ticks} ticks")
                blocks.append(block)
            marks = tuple(Mark(_count(t), Phase(p), _count(n)) for t, p, n in plain["marks"])
            return cls(tuple(blocks), num_ticks, marks)


def _count(value: Any) -> int:
    # Anything more is no number of bytes or ticks, and what is computed of it may be too large for a float.
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{value!r} is no number of bytes or ticks")
    return value
