"""The data behind the page: small enough to embed, exact where it matters.

A timeline can have hundreds of thousands of ticks, a screen has a thousand columns. Long curves are sampled at the
highest and lowest tick of equal stretches, so that no peak is lost. Numbers are stored as differences, which are mostly
zero, and strings once.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from memfit.core.estimate import CONTEXT, Estimate
from memfit.core.timeline import Category, Timeline
from memfit.core.units import format_size
from memfit.reports.estimate import figures

MAX_SAMPLES = 4000
MAX_BLOCKS = 8000

# Bottom to top: what lives longest lies lowest, so that the areas above it don't jump about.
STACK = (
    Category.PARAMETER,
    Category.BUFFER,
    Category.OPTIMIZER_STATE,
    Category.GRADIENT,
    Category.BATCH,
    Category.ACTIVATION,
    Category.TEMPORARY,
    Category.WORKSPACE,
)


def build_payload(estimate: Estimate) -> dict[str, Any]:
    """Everything the page shows, as a plain structure that `json` can write."""
    timeline, lost, at_peak = estimate.timeline, estimate.replay.out_of_memory, estimate.breakdown
    views = {
        "module": at_peak.by_module,
        "op": at_peak.by_op,
        "source line": at_peak.by_source,
        "category": at_peak.by_category,
    }
    return {
        "memfit": figures.package_version(),
        "headline": figures.headline(estimate),
        "demand": figures.demand(estimate),
        "answer": figures.sure_answer(estimate),
        "certainty": figures.certainty(estimate),
        "failure": figures.failure(estimate),
        "failureTick": None if lost is None else lost.tick,
        "fits": estimate.fits,
        "figures": [[f.label, f.value, f.origin] for f in figures.figures(estimate)],
        "ranges": list(figures.ranges(estimate)),
        "parameters": figures.parameters(estimate),
        "seconds": round(estimate.seconds, 2),
        "source": ", ".join(part for part in (estimate.device.source, estimate.device.date) if part),
        "moment": estimate.moment,
        "needed": estimate.peak_bytes,
        "neededText": figures.needed(estimate),
        "capacity": estimate.capacity_bytes,
        "breakdown": {view: list(groups.items()) for view, groups in views.items()},
        "overheads": list(figures.OVERHEADS),
        "peakBytes": estimate.peak_bytes,
        "host": [[row.name, row.size_bytes] for row in figures.rows(estimate.host.parts, estimate.host.total_bytes)],
        "hostTotal": figures.host_total(estimate),
        "hostOrigin": figures.host_origin(estimate),
        "notes": [[note.code, note.text, note.source] for note in estimate.notes],
        "run": None,
        **build_curves(estimate),
        **_blocks(timeline, _categories(timeline)),
    }


def build_curves(estimate: Estimate, max_samples: int = MAX_SAMPLES) -> dict[str, Any]:
    """What a chart of memory over time is drawn from."""
    timeline, replay = estimate.timeline, estimate.replay
    # A replay that ran out of memory stops early; the timeline never does.
    curve = replay.allocated if len(replay.allocated) == timeline.num_ticks else timeline.curve()
    keep = [estimate.peak_tick, *(mark.tick for mark in timeline.marks)]
    ticks = sample_ticks(curve, keep, max_samples)
    categories = _categories(timeline)
    series = _category_series(timeline, categories, ticks)
    return {
        "context": estimate.context_bytes,
        "contextName": CONTEXT,
        "peakTick": estimate.peak_tick,
        "numTicks": timeline.num_ticks,
        "marks": [[m.tick, m.phase.value, m.step] for m in timeline.marks],
        "categories": [c.value for c in categories],
        "ticks": differences(ticks),
        "series": [differences(values) for values in series],
        "allocated": differences(_values_at(replay.allocated, ticks)),
        "reserved": differences(_values_at(replay.reserved, ticks)),
    }


def _categories(timeline: Timeline) -> list[Category]:
    present = {block.category for block in timeline.blocks}
    return [category for category in STACK if category in present]


def sample_ticks(curve: Sequence[int], keep: Iterable[int], budget: int) -> list[int]:
    """Ticks to draw `curve` at, in order: about `budget` of them, and all of `keep`.

    >>> sample_ticks([1, 2, 3, 2, 1, 5, 5, 4, 3, 2], keep=[], budget=4)
    [0, 2, 5, 9]
    """
    length = len(curve)
    if length <= budget:
        return list(range(length))
    # The highest and the lowest tick of equal stretches.
    num_stretches = max(1, budget // 2)
    edges = [length * index // num_stretches for index in range(num_stretches + 1)]
    stretches = [range(start, end) for start, end in itertools.pairwise(edges) if start < end]
    chosen = {pick(ticks, key=curve.__getitem__) for ticks in stretches for pick in (max, min)}
    return sorted(chosen | {tick for tick in keep if 0 <= tick < length} | {0, length - 1})


def differences(values: Sequence[int]) -> list[int]:
    """The first value, then each value minus the one before.

    >>> differences([5, 7, 7, 4])
    [5, 2, 0, -3]
    """
    return [value - before for before, value in zip((0, *values), values, strict=False)]


def _values_at(values: Sequence[int], ticks: list[int]) -> list[int]:
    return [values[tick] for tick in ticks if tick < len(values)]


def _category_series(timeline: Timeline, categories: list[Category], ticks: list[int]) -> list[list[int]]:
    """Live bytes of each category at each of `ticks`."""
    change: dict[int, list[tuple[int, int]]] = {}
    for block in timeline.blocks:
        index = categories.index(block.category)
        change.setdefault(block.start, []).append((index, block.size_bytes))
        if block.end is not None:
            change.setdefault(block.end, []).append((index, -block.size_bytes))
    live = [0] * len(categories)
    series: list[list[int]] = [[] for _ in categories]
    wanted = set(ticks)
    for tick in range(timeline.num_ticks):
        for index, delta in change.get(tick, ()):
            live[index] += delta
        if tick in wanted:
            for values, value in zip(series, live, strict=True):
                values.append(value)
    return series


def _blocks(timeline: Timeline, categories: list[Category]) -> dict[str, Any]:
    """The largest blocks as rows of numbers, and the strings that the numbers stand for."""
    strings: dict[str, int] = {}

    def code(text: str) -> int:
        return strings.setdefault(text, len(strings))

    largest = sorted(timeline.blocks, key=lambda block: -block.size_bytes)
    kept = sorted(largest[:MAX_BLOCKS], key=lambda block: block.start)
    rows = [
        [b.size_bytes, b.start, b.end, categories.index(b.category), code(b.module), code(b.op), code(b.source)]
        for b in kept
    ]
    left_out = largest[MAX_BLOCKS:]
    limit = format_size(max(b.size_bytes for b in left_out)) if left_out else None
    return {"blocks": rows, "strings": list(strings), "numLeftOut": len(left_out), "leftOutUpTo": limit}
