"""Moves that shrink what the forward pass keeps: smaller micro-batches, checkpointing, 16-bit arithmetic."""

import re
from dataclasses import replace
from itertools import groupby
from statistics import fmean

from memfit.core.settings import Keeps
from memfit.core.timeline import Block, Category, Phase, Timeline
from memfit.planner.move import Move, Situation
from memfit.planner.retiming import BEFORE, Life, lives, rebuild, resized
from memfit.planner.structure import (
    Spans,
    has_batch_norm,
    of_the_graph,
    parameter_sizes,
    repeated_units,
    total_bytes,
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
    timeline = _halved(situation, accumulates=False)
    if timeline is None:
        return None
    how = "half the samples in each batch, an update after each"
    return replace(situation.move(HALF, Keeps.CHANGES, how, timeline, micro_batches=2), accumulates=False)


def halve_micro_batch(situation: Situation) -> Move | None:
    """Half of each batch at a time, two backward passes for each update.

    Beside what halves, the gradients of the first half are there while the second runs, so that each step's gradients
    begin with its first forward pass.
    """
    timeline = _halved(situation, accumulates=True)
    if timeline is None:
        return None
    statistics = has_batch_norm(situation.timeline)
    note = "; statistics of batch norm are then those of half a batch" if statistics else ""
    keeps = Keeps.CHANGES if statistics else Keeps.ROUNDING
    how = f"half the samples in each batch, (loss / 2).backward(), optimizer.step() every second batch{note}"
    return situation.move(HALF_TWICE, keeps, how, timeline, micro_batches=2)


def _halved(situation: Situation, *, accumulates: bool) -> Timeline | None:
    timeline = situation.timeline
    spans, shaped = Spans(timeline), parameter_sizes(timeline)
    if situation.batch_size == 1 or not any(block.category is Category.ACTIVATION for block in timeline.blocks):
        return None
    moved = []
    for life in lives(timeline):
        block = life.block
        if block.category is Category.GRADIENT and accumulates:
            moved.append(_accumulated(life, spans))
        elif block.category is Category.BATCH or (
            of_the_graph(block) and block.size_bytes not in shaped.get(block.module, ())
        ):
            moved.append(resized(life, -(-block.size_bytes // 2)))
        else:
            moved.append(life)
    return rebuild(moved, timeline.marks)


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
    candidates: list[tuple[list[str], int]] = []
    for level in (1, 2):
        units = repeated_units(timeline, level)
        if units and all(units != known for known, _ in candidates):
            candidates.append((units, level))
    if len(candidates) < 2:
        return candidates[0][1] if candidates else None
    return min(candidates, key=lambda one: checkpointed(timeline, set(one[0]), one[1]).peak()[1])[1]


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
    parameter_bytes = total_bytes(timeline, Category.PARAMETER)
    if (
        situation.uses_autocast
        or not situation.num_parameters
        or parameter_bytes != 4 * situation.num_parameters
        or _has_casts(timeline)
    ):
        return None
    moved: list[Life] = []
    for life in lives(timeline):
        narrow = of_the_graph(life.block) and bool(_NARROWED.search(life.block.op))
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
    shaped = parameter_sizes(timeline)
    casts = [
        block.size_bytes in shaped.get(block.module, ())
        for block in timeline.blocks
        if block.phase is Phase.FORWARD and "_to_copy" in block.op
    ]
    # A cast of something else may have such a size by chance; autocast's are the rule.
    return bool(casts) and fmean(casts) > 0.1
