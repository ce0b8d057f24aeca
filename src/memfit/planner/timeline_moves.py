"""The moves that a timeline alone can show: each turns the timeline of a step into the one that it would have.

First those that shrink what the forward pass keeps, then those that change when memory is given back or how it is laid
out, and last those on what outlives a step: optimizer temporaries and states, and the sharding of all that.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from statistics import fmean
from typing import Any

from memfit.core.device import Origin
from memfit.core.settings import Keeps, OptimizerKernels
from memfit.core.timeline import Block, Category, Phase, Timeline
from memfit.core.units import format_size
from memfit.planner import timelines
from memfit.planner.timelines import (
    BEFORE,
    Life,
    Move,
    Situation,
    Spans,
    lives,
    rebuild,
    repeated_units,
    resized,
    unit_of,
)

# Share of a unit's activations below which one can't be its output: statistics of norms, seeds of dropout.
_SMALL = 0.001

# Operators whose results autocast leaves in 16 bits. Softmax, norms, losses and sums with a 32-bit residual stay wide.
_NARROWED = re.compile("convolution|mm|linear|attention|relu|gelu|silu|threshold|dropout|batch_norm|pool")


HALF = "halve the batch"
"""An update after each half."""

HALF_TWICE = "halve the batch and accumulate gradients over two"
"""One update for both halves."""


def halve_batch(situation: Situation) -> Move | None:
    """Half as many samples for each update: everything that grows with the batch halves."""
    how = "half the samples in each batch, an update after each"
    return _halved(situation, HALF, Keeps.CHANGES, how, accumulates=False)


def halve_micro_batch(situation: Situation) -> Move | None:
    """Half of each batch at a time, two backward passes for each update.

    Beside what halves, the gradients of the first half are there while the second runs, so that each step's gradients
    begin with its first forward pass.
    """
    statistics = timelines.has_batch_norm(situation.timeline)
    note = "; statistics of batch norm are then those of half a batch" if statistics else ""
    keeps = Keeps.CHANGES if statistics else Keeps.ROUNDING
    how = f"half the samples in each batch, (loss / 2).backward(), optimizer.step() every second batch{note}"
    return _halved(situation, HALF_TWICE, keeps, how, accumulates=True)


def _halved(situation: Situation, title: str, keeps: Keeps, how: str, *, accumulates: bool) -> Move | None:
    timeline = situation.timeline
    spans, shaped = Spans(timeline), timelines.parameter_sizes(timeline)
    if situation.batch_size == 1 or not any(block.category is Category.ACTIVATION for block in timeline.blocks):
        return None
    moved = []
    for life in lives(timeline):
        block = life.block
        if block.category is Category.GRADIENT and accumulates:
            moved.append(_accumulated(life, spans))
        elif block.category is Category.BATCH or (
            timelines.of_the_graph(block) and block.size_bytes not in shaped.get(block.module, ())
        ):
            moved.append(resized(life, -(-block.size_bytes // 2)))
        else:
            moved.append(life)
    move = situation.move(title, keeps, how, rebuild(moved, timeline.marks), micro_batches=2)
    return replace(move, accumulates=accumulates)


def _accumulated(life: Life, spans: Spans) -> Life:
    """A gradient that is there from the beginning of its step, and gone by the next one's."""
    block = life.block
    forward, after = spans.forward_of(block.start), spans.after_step(block.start)
    if forward is None or block.phase is not Phase.BACKWARD:
        return life
    here = spans.all[spans.index(block.start)]
    if life.end is not None and life.end < here.end:
        return life
    end = life.end
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
    statistics = timelines.has_batch_norm(timeline)
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
    moved: list[Life] = []
    for life in lives(timeline):
        narrow = timelines.of_the_graph(life.block) and bool(_NARROWED.search(life.block.op))
        moved.append(resized(life, -(-life.block.size_bytes // 2)) if narrow else life)
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
    shaped = timelines.parameter_sizes(timeline)
    casts = [
        block.size_bytes in shaped.get(block.module, ())
        for block in timeline.blocks
        if block.phase is Phase.FORWARD and "_to_copy" in block.op
    ]
    # A cast of something else may have such a size by chance; autocast's are the rule.
    return bool(casts) and fmean(casts) > 0.1


_NUM_NAMED = 2


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
        if not timelines.of_the_graph(block):
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
    """The same events, with segments that grow instead of new ones beside those that are half empty."""
    if situation.options.expandable_segments:
        return None
    title = "let the allocator grow its segments"
    how = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
    move = situation.move(title, Keeps.EXACT, how, situation.timeline, Origin.SIMULATED)
    return replace(move, options=replace(situation.options, expandable_segments=True))


# bitsandbytes leaves states of fewer elements as they are (min_8bit_size), and keeps a 4-byte scale for each 256.
_MIN_ELEMENTS = 4096
_SCALED_TOGETHER = 256


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
