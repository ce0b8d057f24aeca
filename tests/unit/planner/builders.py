"""Timelines made by hand for the tests of the moves."""

import dataclasses

from memfit.core.replay import AllocatorOptions
from memfit.core.timeline import Block, Category, Mark, Phase, Timeline
from memfit.core.units import MIB
from memfit.planner.timeline_moves import Situation


class Script:
    """Builds a `Timeline` event by event."""

    def __init__(self) -> None:
        """Start in set-up."""
        self.tick = 0
        self.blocks: list[Block] = []
        self.marks: list[Mark] = []
        self.enter(Phase.SETUP, 0)

    def enter(self, phase: Phase, step: int) -> None:
        """Begin a phase."""
        self.phase = phase
        self.marks.append(Mark(self.tick, phase, step))

    def allocate(self, size_bytes: int, category: Category, module: str = "", op: str = "op", source: str = "") -> int:
        """Allocate a block; gives its index for `free`."""
        self.blocks.append(Block(size_bytes, self.tick, None, category, self.phase, module, op, source))
        self.tick += 1
        return len(self.blocks) - 1

    def free(self, index: int) -> None:
        """Free a block."""
        self.blocks[index] = dataclasses.replace(self.blocks[index], end=self.tick)
        self.tick += 1

    def timeline(self) -> Timeline:
        """What happened so far."""
        return Timeline(tuple(self.blocks), self.tick, tuple(self.marks))


def training(
    num_layers: int = 4,
    num_steps: int = 2,
    *,
    weight: int = 8 * MIB,
    hidden: int = 32 * MIB,
    op: str = "aten.mm",
    zero_late: bool = False,
    foreach: bool = True,
    names: str = "layers.{}",
) -> Timeline:
    """A stack of equal layers trained with Adam.

    Each layer keeps a hidden tensor and half as much as its output, and has one parameter. With `zero_late`, gradients
    of a step live until the next one's backward pass begins.
    """
    script = Script()
    modules = [names.format(layer) for layer in range(num_layers)]
    for module in modules:
        script.allocate(weight, Category.PARAMETER, f"{module}.up")
    batch = script.allocate(4 * MIB, Category.BATCH)
    old: list[int] = []
    states: list[int] = []
    for step in range(1, num_steps + 1):
        script.enter(Phase.FORWARD, step)
        if not zero_late:
            _free_all(script, old)
        kept = []
        for module in modules:
            kept.append(script.allocate(hidden, Category.ACTIVATION, f"{module}.up", op))
            kept.append(script.allocate(hidden // 2, Category.ACTIVATION, f"{module}.down", op))
        script.enter(Phase.BACKWARD, step)
        _free_all(script, old)
        old = []
        for module in reversed(modules):
            flow = script.allocate(hidden // 2, Category.TEMPORARY, f"{module}.down", op)
            script.free(kept.pop())
            old.append(script.allocate(weight, Category.GRADIENT, f"{module}.up", op))
            script.free(kept.pop())
            script.free(flow)
        script.enter(Phase.OPTIMIZER, step)
        if not states:
            states = [script.allocate(weight, Category.OPTIMIZER_STATE, f"{m}.up") for m in modules for _ in range(2)]
        name = "aten._foreach_sqrt" if foreach else "aten.sqrt"
        _free_all(script, [script.allocate(weight, Category.TEMPORARY, "(optimizer)", name) for _ in modules])
    script.free(batch)
    return script.timeline()


def _free_all(script: Script, indexes: list[int]) -> None:
    for index in indexes:
        script.free(index)
    indexes.clear()


def situation(timeline: Timeline, **changes: object) -> Situation:
    """What a move starts from."""
    return dataclasses.replace(Situation(timeline, AllocatorOptions()), **changes)  # type: ignore[arg-type]


def live(timeline: Timeline, category: Category, tick: int) -> int:
    """Live bytes of a category."""
    return sum(b.size_bytes for b in timeline.live_at(tick) if b.category is category)


def most(timeline: Timeline, category: Category) -> int:
    """Greatest live bytes of a category."""
    return max(live(timeline, category, tick) for tick in range(timeline.num_ticks))


def is_sound(timeline: Timeline) -> bool:
    """Whether every tick has exactly one event, blocks are in order and the timeline survives its own format."""
    events = list(timeline.events())
    starts = [block.start for block in timeline.blocks]
    return (
        len(events) == timeline.num_ticks
        and starts == sorted(starts)
        and Timeline.from_json(timeline.to_json()) == timeline
    )
