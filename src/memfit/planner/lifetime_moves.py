"""Moves that change when memory is given back or how it is laid out, not what is computed: exact, and replayed."""

from collections import Counter
from dataclasses import replace
from typing import Any

from memfit.core.device import Origin
from memfit.core.settings import Keeps
from memfit.core.timeline import Block, Category, Phase
from memfit.core.units import format_size
from memfit.planner.move import Move, Situation
from memfit.planner.retiming import BEFORE, lives, rebuild
from memfit.planner.structure import Spans, of_the_graph

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
    """The same events, with segments that grow instead of new ones beside those that are half empty."""
    if situation.options.expandable_segments:
        return None
    title, how = (
        "let the allocator grow its segments",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment",
    )
    move = situation.move(title, Keeps.EXACT, how, situation.timeline, Origin.SIMULATED)
    return replace(move, options=replace(situation.options, expandable_segments=True))
