"""The moves that a timeline alone can show: each turns the timeline of a step into the one that it would have.

First what moves are made of: the situation they start from, its phases and repeated blocks, lives of blocks. Then the
moves that shrink what the forward pass keeps, those that change when memory is given back or how it is laid out, and
last those on what outlives a step: optimizer temporaries and states, and the sharding of all that.

Large models are stacks of equal parts, and PyTorch numbers those: `transformer.h.0` to `transformer.h.11`. Such a part
is the natural unit of checkpointing and of sharding; it is found by the numbers in the paths of modules.

Ticks are whole numbers, one per event. A move that lets a block begin earlier or end sooner has to put its events
between others; it says so with lives, whose moments may be fractions, and `rebuild` numbers all events again.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from statistics import fmean
from typing import Any, NamedTuple

from memfit.core.device import Origin
from memfit.core.replay import AllocatorOptions
from memfit.core.settings import Keeps, OptimizerKernels, Settings
from memfit.core.timeline import Block, Category, Mark, Phase, Timeline
from memfit.core.units import format_size

# Share of a unit's activations below which one can't be its output: statistics of norms, seeds of dropout.
_SMALL = 0.001

# Operators whose results autocast leaves in 16 bits. Softmax, norms, losses and sums with a 32-bit residual stay wide.
_NARROWED = re.compile("convolution|mm|linear|attention|relu|gelu|silu|threshold|dropout|batch_norm|pool")

# Lines of code that a suggestion names.
_NUM_NAMED = 2

# bitsandbytes leaves states of fewer elements as they are (min_8bit_size), and keeps a 4-byte scale for each 256.
_MIN_ELEMENTS = 4096
_SCALED_TOGETHER = 256

HALF = "halve the batch"
"""An update after each half."""

HALF_TWICE = "halve the batch and accumulate gradients over two"
"""One update for both halves."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What the moves start from: a step as it is, its allocator, and what is known of model and device.

    `num_parameters` are elements, 0 when nobody counted; `autocast` is the precision that the device is good at.
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
        self, title: str, keeps: Keeps, how: str, timeline: Timeline, origin: Origin = Origin.ASSUMED, **settings: Any
    ) -> "Move":
        """The move to another timeline; `settings` are those that a run of the script can have in force, if any."""
        in_force = replace(AS_IT_IS, **settings) if settings else None
        return Move(title, keeps, how, origin, timeline, self.options, in_force)


AS_IT_IS = Settings(set_to_none=False)
"""The script unchanged: `set_to_none` means here that gradients are dropped right after each update."""


@dataclass(frozen=True, slots=True)
class Move:
    """One change, with the timeline and the allocator after it.

    Args:
        title: the change in words.
        keeps: what it does to the numbers.
        how: one line of code or the setting.
        origin: simulated where only the order of events or the allocator differs, assumed where sizes are guessed.
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
        if block.category is Category.ACTIVATION and (unit := unit_of(block.module, level)) is not None:
            inside.setdefault(unit, set()).add(block.module)
    units = [unit for unit, modules in inside.items() if len(modules) > 1]
    return units if len(units) > 1 else []


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
    """The life with a block of another size."""
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
        Block(b.size_bytes, starts[i], ends.get(i), b.category, b.phase, b.module, b.op, b.source, False, b.stream)
        for i, b in enumerate(life.block for life in kept)
    ]
    blocks.sort(key=lambda block: block.start)
    moments = [moment for moment, _, _ in events]
    renumbered = tuple(replace(mark, tick=bisect_left(moments, mark.tick)) for mark in marks)
    return Timeline(tuple(blocks), len(events), renumbered)


def halve_batch(situation: Situation) -> Move | None:
    """Half as many samples for each update: everything that grows with the batch halves."""
    how = "half the samples in each batch, an update after each"
    return _halved(situation, HALF, Keeps.CHANGES, how, accumulates=False)


def halve_micro_batch(situation: Situation) -> Move | None:
    """Half of each batch at a time, two backward passes for each update.

    Beside what halves, the gradients of the first half are there while the second runs, so that each step's gradients
    begin with its first forward pass.
    """
    statistics = has_batch_norm(situation.timeline)
    note = "; statistics of batch norm are then those of half a batch" if statistics else ""
    keeps = Keeps.CHANGES if statistics else Keeps.ROUNDING
    how = f"half the samples in each batch, (loss / 2).backward(), optimizer.step() every second batch{note}"
    return _halved(situation, HALF_TWICE, keeps, how, accumulates=True)


def _halved(situation: Situation, title: str, keeps: Keeps, how: str, *, accumulates: bool) -> Move | None:
    timeline = situation.timeline
    spans, shaped = Spans(timeline), parameter_sizes(timeline)
    if situation.batch_size == 1 or not any(block.category is Category.ACTIVATION for block in timeline.blocks):
        return None

    def halved(life: Life) -> Life:
        block = life.block
        if block.category is Category.GRADIENT and accumulates:
            return _accumulated(life, spans)
        # What a kernel takes for its own work and gives back follows its tensors. Buffers that stay do not, and cuDNN
        # picks another algorithm for another size.
        worked_in = block.category is Category.WORKSPACE and block.end is not None and "convolution" not in block.op
        grows = (of_the_graph(block) or worked_in) and block.size_bytes not in shaped.get(block.module, ())
        return resized(life, -(-block.size_bytes // 2)) if grows or block.category is Category.BATCH else life

    move = situation.move(title, keeps, how, rebuild(map(halved, lives(timeline)), timeline.marks), micro_batches=2)
    return replace(move, accumulates=accumulates)


def _accumulated(life: Life, spans: Spans) -> Life:
    """A gradient that is there from the beginning of its step, and gone by the next one's."""
    block, end = life.block, life.end
    forward, after = spans.forward_of(block.start), spans.after_step(block.start)
    ends_early = end is not None and end < spans.all[spans.index(block.start)].end
    if forward is None or block.phase is not Phase.BACKWARD or ends_early:
        return life
    if after is not None and (end is None or end > after):
        end = after + BEFORE
    return life._replace(start=min(life.start, forward.start + BEFORE / 2), end=end)


def checkpoint_units(situation: Situation) -> Move | None:
    """Each repeated part of the model keeps its output only and computes the rest again for its backward pass.

    Of two levels of nesting, the one that leaves less at its highest is taken.
    """
    timeline = situation.timeline
    level = level_of_units(timeline)
    if level is None:
        return None
    units = repeated_units(timeline, level)
    statistics = has_batch_norm(timeline)
    note = "; running statistics of batch norm then update twice a step" if statistics else ""
    return situation.move(
        f"checkpoint activations of {len(units)} blocks",
        Keeps.CHANGES if statistics else Keeps.EXACT,
        f"torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) around each of {units[0]} to {units[-1]}; "
        f"transformers: model.gradient_checkpointing_enable(){note}",
        checkpointed(timeline, set(units), level),
        checkpoint=tuple(units),
    )


def level_of_units(timeline: Timeline) -> int | None:
    """The level of nesting whose units, all computed again, leave less at the highest; None where there are none."""
    outer, inner = (repeated_units(timeline, level) for level in (1, 2))
    if not outer or not inner or outer == inner:
        return 1 if outer else 2 if inner else None
    return min((1, 2), key=lambda level: checkpointed(timeline, set((outer, inner)[level - 1]), level).peak()[1])


def checkpointed(timeline: Timeline, units: set[str], level: int) -> Timeline:
    """The timeline in which these units of a level, not necessarily all, are computed again."""
    spans = Spans(timeline)
    groups: dict[tuple[str, int], list[Block]] = {}
    begun: dict[tuple[str, int], float] = {}
    for block in timeline.blocks:
        unit = unit_of(block.module, level)
        if unit not in units or unit is None:
            continue
        if block.category is Category.ACTIVATION and block.phase is Phase.FORWARD and block.end is not None:
            group = (unit, spans.index(block.start))
            groups.setdefault(group, []).append(block)
            begun[group] = min(begun.get(group, block.end), block.end)
        elif block.phase is Phase.BACKWARD:
            # The backward pass belongs to the forward pass before it.
            group = (unit, spans.index(block.start) - 1)
            if group in begun:
                begun[group] = min(begun[group], block.start)
    again: dict[int, float] = {}
    for group, blocks in groups.items():
        # The block that leaves the unit is the last that isn't tiny.
        least = _SMALL * sum(block.size_bytes for block in blocks)
        output = next(block for block in reversed(blocks) if block.size_bytes >= least)
        again.update({block.start: begun[group] + BEFORE for block in blocks if block is not output})
    moved = [life._replace(start=again.get(life.block.start, life.start)) for life in lives(timeline)]
    return rebuild(moved, timeline.marks)


def autocast(situation: Situation) -> Move | None:
    """Products, convolutions and what follows them in 16 bits; parameters, gradients and states stay in 32.

    Only where the parameters are known to have 32 bits and no copies in 16 are seen. The copies that autocast makes of
    the parameters are added for the time of forward and backward pass.
    """
    timeline = situation.timeline
    parameter_bytes = sum(block.size_bytes for block in timeline.blocks if block.category is Category.PARAMETER)
    if (
        situation.uses_autocast
        or not situation.num_parameters
        or parameter_bytes != 4 * situation.num_parameters
        or _has_casts(timeline)
    ):
        return None
    moved = [
        resized(life, -(-life.block.size_bytes // 2))
        if of_the_graph(life.block) and _NARROWED.search(life.block.op)
        else life
        for life in lives(timeline)
    ]
    copies = Block(parameter_bytes // 2, 0, None, Category.TEMPORARY, Phase.FORWARD, op="aten._to_copy")
    for passes, spans in groupby(Spans(timeline).all, key=lambda span: span.phase in (Phase.FORWARD, Phase.BACKWARD)):
        if passes:
            together = list(spans)
            moved.append(Life(copies, together[0].start + BEFORE, together[-1].end + BEFORE))
    width, scaler = ("bfloat16", "") if situation.autocast == "amp-bf16" else ("float16", ", with a GradScaler")
    return situation.move(
        "compute in 16 bits with autocast",
        Keeps.ROUNDING,
        f'with torch.autocast("cuda", dtype=torch.{width}): around model and loss{scaler}',
        rebuild(moved, timeline.marks),
        precision=situation.autocast,
    )


def _has_casts(timeline: Timeline) -> bool:
    """Whether the forward pass makes 16-bit copies of parameters, as autocast does."""
    shaped = parameter_sizes(timeline)
    casts = [
        block.size_bytes in shaped.get(block.module, ())
        for block in timeline.blocks
        if block.phase is Phase.FORWARD and "_to_copy" in block.op
    ]
    # A cast of something else may have such a size by chance; autocast's are the rule.
    return bool(casts) and fmean(casts) > 0.1


def free_gradients(situation: Situation) -> Move | None:
    """Gradients are freed right after the optimizer step instead of living on into the next one.

    Where the next backward pass adds to a gradient, it makes a block of the same size for the same module first; with
    nothing to add to, that block becomes the gradient. A gradient for which there is none stays as it is.
    """
    timeline = situation.timeline
    spans = Spans(timeline)
    passes = [span for span in spans.all if span.phase is Phase.BACKWARD]
    fresh: dict[tuple[str, int, int], list[Block]] = {}
    for block in timeline.blocks:
        if block.phase is Phase.BACKWARD and block.category in (Category.TEMPORARY, Category.GRADIENT):
            fresh.setdefault((block.module, block.size_bytes, spans.index(block.start)), []).append(block)
    ends: dict[int, float] = {}
    for block in timeline.blocks:
        after = spans.after_step(block.start)
        if block.category is not Category.GRADIENT or after is None or (block.end is not None and block.end <= after):
            continue
        later = [span for span in passes if span.start >= after and (block.end is None or block.end > span.end)]
        pools = [fresh.get((block.module, block.size_bytes, spans.index(span.start)), []) for span in later]
        if not all(pools):
            continue
        ends[block.start] = after + BEFORE
        for pool in pools:
            heir = pool.pop(0)
            next_step = spans.after_step(heir.start)
            ends[heir.start] = timeline.num_ticks if next_step is None else next_step + BEFORE
    return _ending(
        situation,
        ends,
        "free gradients right after the optimizer step",
        "optimizer.zero_grad(set_to_none=True) directly after optimizer.step()",
        set_to_none=True,
    )


def free_leftovers(situation: Situation) -> Move | None:
    """What the forward and backward pass leave to the next step, held by a variable or a list, ends with its step.

    A block that the first step makes once and keeps, such as a table of positions, is no leftover.
    """
    timeline = situation.timeline
    spans = Spans(timeline)
    kept: list[tuple[Block, int]] = []
    for block in timeline.blocks:
        if not of_the_graph(block):
            continue
        after = spans.after_step(block.start)
        if after is not None and (block.end is None or block.end > after):
            kept.append((block, after))

    def kind(block: Block) -> tuple[str, str, str, int]:
        return block.module, block.op, block.source, block.size_bytes

    seen = Counter(kind(block) for block, _ in kept)
    ends: dict[int, float] = {}
    by_source: Counter[str] = Counter()
    for block, after in kept:
        then = spans.after_step(after)
        ends_soon = block.end is not None and (then is None or block.end <= then)
        if ends_soon or seen[kind(block)] > 1:
            ends[block.start] = after + BEFORE
            by_source[block.source or block.op] = max(by_source[block.source or block.op], block.size_bytes)
    lines = ", ".join(f"{format_size(size)} of {line}" for line, size in by_source.most_common(_NUM_NAMED))
    return _ending(
        situation,
        ends,
        "free what one step leaves to the next",
        f"del the variables that hold it at the end of the step, and keep loss.item(), not loss: {lines}",
    )


def _ending(situation: Situation, ends: dict[int, float], title: str, how: str, **settings: Any) -> Move | None:
    """The move after which the blocks that begin at these ticks end at these moments."""
    if not ends:
        return None
    moved = [life._replace(end=ends.get(life.block.start, life.end)) for life in lives(situation.timeline)]
    timeline = rebuild(moved, situation.timeline.marks)
    return situation.move(title, Keeps.EXACT, how, timeline, Origin.SIMULATED, **settings)


def expand_segments(situation: Situation) -> Move | None:
    """The same events, with segments that grow where the allocator would take new ones beside half-empty ones."""
    if situation.options.expandable_segments:
        return None
    title = "let the allocator grow its segments"
    how = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
    move = situation.move(title, Keeps.EXACT, how, situation.timeline, Origin.SIMULATED)
    return replace(move, options=replace(situation.options, expandable_segments=True))


def fuse_optimizer(situation: Situation) -> Move | None:
    """The update of one parameter after the other, or in one fused kernel, instead of all at once."""
    timeline = situation.timeline
    spans = Spans(timeline)
    largest: dict[int, Block] = {}
    dropped: set[int] = set()
    for block in timeline.blocks:
        if block.phase is Phase.OPTIMIZER and block.category is Category.TEMPORARY and "_foreach" in block.op:
            dropped.add(block.start)
            index = spans.index(block.start)
            if index not in largest or block.size_bytes > largest[index].size_bytes:
                largest[index] = block
    if not dropped:
        return None
    dropped -= {block.start for block in largest.values()}
    fused = situation.is_fusable
    return situation.move(
        "update parameters with a fused optimizer" if fused else "update one parameter at a time",
        Keeps.ROUNDING,
        f"{'fused=True' if fused else 'foreach=False'} in the constructor of the optimizer",
        rebuild([life for life in lives(timeline) if life.block.start not in dropped], timeline.marks),
        kernels=OptimizerKernels.FUSED if fused else OptimizerKernels.SINGLE,
    )


def shrink_states(situation: Situation) -> Move | None:
    """Optimizer states in 8 bits with a scale per group instead of 32."""
    timeline = situation.timeline
    moved = lives(timeline)
    for index, (block, _, _) in enumerate(moved):
        if block.category is Category.OPTIMIZER_STATE and block.size_bytes >= 4 * _MIN_ELEMENTS:
            num_elements = block.size_bytes // 4
            moved[index] = resized(moved[index], num_elements + 4 * -(-num_elements // _SCALED_TOGETHER))
    if moved == lives(timeline):
        return None
    return situation.move(
        "keep the optimizer's state in 8 bits",
        Keeps.CHANGES,
        "the 8-bit variant of the optimizer, such as bitsandbytes.optim.AdamW8bit or torchao.optim.AdamW8bit",
        rebuild(moved, timeline.marks),
    )


def shard(situation: Situation) -> Move | None:
    """Parameters, gradients and states split over two devices, each of which gathers one unit at a time.

    What fully sharded training must hold beside its shard: the parameters outside of any unit, two units gathered (the
    one in use and the next), and in the backward pass the gradient of one before it is reduced.
    """
    timeline = situation.timeline
    units = repeated_units(timeline, 1)
    if situation.num_devices > 1 or not units:
        return None
    sizes: dict[str | None, int] = {}
    for block in timeline.blocks:
        if block.category is Category.PARAMETER:
            unit = unit_of(block.module, 1)
            key = unit if unit in units else None
            sizes[key] = sizes.get(key, 0) + block.size_bytes
    outside = sizes.pop(None, 0)
    if not sizes:
        return None
    largest = max(sizes.values())
    persistent = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE)

    def is_sharded(block: Block) -> bool:
        of_update = block.phase is Phase.OPTIMIZER and block.category is Category.TEMPORARY
        return block.category in persistent or of_update

    moved = [
        resized(life, -(-life.block.size_bytes // 2)) if is_sharded(life.block) else life for life in lives(timeline)
    ]
    gathered = {Phase.FORWARD: outside + 2 * largest, Phase.BACKWARD: outside + 3 * largest}
    for span in Spans(timeline).all:
        if span.phase in gathered:
            block = Block(gathered[span.phase], 0, None, Category.TEMPORARY, span.phase, op="all_gather")
            moved.append(Life(block, span.start + BEFORE, span.end + BEFORE))
    return situation.move(
        "shard parameters, gradients and states over 2 devices",
        Keeps.ROUNDING,
        f"torchrun --nproc-per-node 2, fully_shard(block) for each of {units[0]} to {units[-1]}, then "
        "fully_shard(model)",
        rebuild(moved, timeline.marks),
    )


MOVES: tuple[Callable[[Situation], Move | None], ...] = (
    halve_batch,
    halve_micro_batch,
    checkpoint_units,
    autocast,
    free_gradients,
    free_leftovers,
    expand_segments,
    fuse_optimizer,
    shrink_states,
    shard,
)
"""Every one of them."""
