"""Which batch of a timm model still trains on an RTX 3090 (the timm project's train benchmark).

    python -m benchmarks.timm_rtx3090 [--csv PATH ...] [--jobs N] [--sample N]

Columns: model, image_size, layout (nchw or nhwc), fits_batch, fails_batch. A row says that training ran at one batch
and ran out of memory at the next; it is right when both ends are predicted. Rows without one of the ends are not used.
Conditions: PyTorch 1.12 with CUDA 11.3, float16 autocast without a scaler, SGD with Nesterov momentum in a loop over
the parameters (foreach was not the default then), gradients zeroed in place, attention not fused, cross-entropy.

All usual rows together settle one constant anew, the memory left for PyTorch's allocator on that machine; other rows,
or a sample, are scored with the constant written down here (`SETTLED`).
"""

import argparse
import importlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

import memfit
from benchmarks import rows
from benchmarks.reporting import Bar, bullets, publish, table
from memfit.allocator import replay
from memfit.core.units import GIB, MIB

DEFAULT_CSVS = tuple(rows.DATA / f"timm_train_rtx3090_{layout}.csv" for layout in ("nchw", "nhwc"))
DEVICE = "rtx-3090"
NUM_PAIRS = 15
ROW_LIMIT = 0.97

# Bytes left for PyTorch's allocator, as a grid in GiB.
GRID = tuple(20.5 + 0.05 * step for step in range(51))

# Parts of a card outside PyTorch's allocator (total - free - reserved) in public out-of-memory messages of RTX 3090s
# from the time of PyTorch 1.12, in GiB: kernels were loaded eagerly until CUDA 11.7.
PUBLISHED_CONTEXTS = (1.21, 1.61, 1.65, 1.92)

QUANTITIES = {
    "allocated": "allocated peak, without the workspaces that cuDNN can do without",
    "needed": "smallest capacity in which the allocator's replay succeeds, without those workspaces",
    "tensors": "bytes of live tensors alone, unrounded",
}
CANDIDATES = ("allocated", "needed", "tensors")

# (quantity, bytes) settled by a run over all usual rows: docs/results/timm_rtx3090.md.
SETTLED = ("allocated", 21.7 * GIB)


@dataclass(frozen=True, slots=True)
class End:
    """One end of a row, as predicted, in bytes by `QUANTITIES`.

    Args:
        batch_size: samples per step.
        allocated: see `QUANTITIES`.
        needed: see `QUANTITIES`.
        tensors: see `QUANTITIES`.
        fits_today: what memfit answers for an RTX 3090 with a PyTorch of today, whose context is smaller.
    """

    batch_size: int
    allocated: int
    needed: int
    tensors: int
    fits_today: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row beside its prediction."""

    row: rows.Row
    fits: End
    fails: End

    def ends_right(self, quantity: str, capacity_bytes: float) -> int:
        """How many of the two ends a threshold gets right."""
        return int(getattr(self.fits, quantity) <= capacity_bytes) + int(getattr(self.fails, quantity) > capacity_bytes)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that could not be predicted, and why."""

    row: rows.Row
    reason: str


@dataclass(frozen=True, slots=True)
class Score:
    """Share of rows with both ends right, and share of ends."""

    rows: float
    ends: float
    num_rows: int

    def __str__(self) -> str:
        return f"{self.rows:.1%} of {self.num_rows} rows, {self.ends:.1%} of ends" if self.num_rows else "no rows"


def is_bounded(row: rows.Row) -> bool:
    """Whether both ends are known."""
    return bool(row["fits_batch"]) and bool(row["fails_batch"])


@contextmanager
def unfused_attention() -> Iterator[None]:
    """Makes timm's models compute attention step by step, as the rows' did."""
    layers: Any = importlib.import_module("timm.layers")
    before = layers.use_fused_attn(), layers.use_fused_attn(experimental=True)
    layers.set_fused_attn(False)
    try:
        yield
    finally:
        layers.set_fused_attn(*before)


def row_job(row: rows.Row) -> memfit.Job:
    """The training step that a row describes, at any batch size."""
    import timm

    name, size, channels_last = row["model"], int(row["image_size"]), row["layout"] == "nhwc"
    memfit.named_job(f"timm:{name}")  # says so when there is no such model
    config = timm.get_pretrained_cfg(name)
    fixed = config is not None and config.fixed_input_size and config.input_size[-1] != size
    options: dict[str, Any] = {"img_size": size} if fixed else {}

    def build() -> Any:
        model: Any = timm.create_model(name, **options)
        layout = torch.channels_last if channels_last else torch.preserve_format
        return model.to(memory_format=layout).train()

    return memfit.Job(
        model=build,
        loss=rows.classify,
        batch=rows.images(size, channels_last=channels_last),
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, nesterov=True, foreach=False),
        precision="amp-fp16",
        set_to_none=False,
    )


def smallest_capacity(timeline: memfit.Timeline, allocated_bytes: int, reserved_bytes: int) -> int:
    """Capacity in which a replay of the timeline just succeeds, to 32 MiB."""
    low, high = allocated_bytes - 1, reserved_bytes
    while high - low > 32 * MIB:
        middle = (low + high) // 2
        low, high = (low, middle) if replay(timeline, capacity_bytes=middle).out_of_memory is None else (middle, high)
    return high


def measure_end(estimate: memfit.Estimate) -> End:
    """What is compared with the capacity."""
    lean = estimate.timeline.without_optional()
    played = replay(lean)
    return End(
        batch_size=estimate.batch_size or 0,
        allocated=played.allocated_peak_bytes,
        needed=smallest_capacity(lean, played.allocated_peak_bytes, played.reserved_peak_bytes),
        tensors=lean.peak()[1],
        fits_today=bool(estimate.fits),
    )


def predict(row: rows.Row) -> Outcome | Skipped:
    """A row beside its prediction, or why there is none."""
    with rows.quietly(), unfused_attention():
        try:
            estimate = memfit.estimate(row_job(row), device=DEVICE, batch_size=int(row["fits_batch"]))
            larger = estimate.at_batch(int(row["fails_batch"]))
        except (memfit.MemfitError, RuntimeError) as error:
            return Skipped(row, str(error).splitlines()[0])
        return Outcome(row, measure_end(estimate), measure_end(larger))


def predict_all(chosen: Sequence[rows.Row], num_jobs: int) -> list[Outcome | Skipped]:
    """Predictions in the order of the rows, from several processes, with a line of progress."""
    started, found = time.monotonic(), {}
    pool = ProcessPoolExecutor(
        num_jobs, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    )
    with pool:
        pending = {pool.submit(predict, row): index for index, row in enumerate(chosen)}
        for future in as_completed(pending):
            found[pending[future]] = future.result()
            spent = time.monotonic() - started
            left = spent / len(found) * (len(chosen) - len(found))
            line = f"{len(found)}/{len(chosen)} rows, {spent:.0f} s, about {left:.0f} s left"
            print(f"\r{line:60}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return [found[index] for index in range(len(chosen))]


def sample(population: Sequence[rows.Row], count: int | None) -> list[rows.Row]:
    """Rows at equal distances: the same for the same file."""
    if count is None or count >= len(population):
        return list(population)
    return [population[index * len(population) // count] for index in range(count)]


def score(outcomes: Iterable[Outcome], quantity: str, capacity_bytes: float) -> Score:
    """How a threshold on a quantity does."""
    right = [outcome.ends_right(quantity, capacity_bytes) for outcome in outcomes]
    num = len(right)
    return Score(sum(n == 2 for n in right) / num, sum(right) / 2 / num, num) if num else Score(0, 0, 0)


def score_today(outcomes: Sequence[Outcome]) -> Score:
    """How memfit's own verdict for a PyTorch of today does."""
    right = [o.fits.fits_today + (not o.fails.fits_today) for o in outcomes]
    num = max(1, len(right))
    return Score(sum(n == 2 for n in right) / num, sum(right) / 2 / num, len(right))


def fit_capacity(outcomes: Sequence[Outcome], quantity: str) -> float:
    """The capacity of `GRID` that gets most rows, then most ends right; the middle one of equals."""
    marks = [(score(outcomes, quantity, gib * GIB), gib) for gib in GRID]
    best = max((mark.rows, mark.ends) for mark, _ in marks)
    return median([gib for mark, gib in marks if (mark.rows, mark.ends) == best]) * GIB


def halves(outcomes: Sequence[Outcome]) -> tuple[list[Outcome], list[Outcome]]:
    """(even, odd) by the position of the model, so that both layouts of a model are in the same half."""
    position = {name: index for index, name in enumerate(dict.fromkeys(o.row["model"] for o in outcomes))}
    return tuple([o for o in outcomes if position[o.row["model"]] % 2 == side] for side in (0, 1))  # type: ignore[return-value]


def gib(size_bytes: float) -> str:
    """A size in GiB with two decimals, for columns."""
    return f"{size_bytes / GIB:.2f}"


def describe(row: rows.Row) -> str:
    """A row in words."""
    return f"{row['model']} {row['image_size']} {row['layout']}"


def contradictions(outcomes: Sequence[Outcome], quantity: str) -> list[str]:
    """Pairs of the same image size and batch: the one that needs less failed, the one that needs more ran."""
    pairs = []
    for failed in outcomes:
        for ran in outcomes:
            same = failed.row["image_size"] == ran.row["image_size"] and failed.fails.batch_size == ran.fits.batch_size
            low, high = getattr(failed.fails, quantity), getattr(ran.fits, quantity)
            if same and low < high:
                text = f"at {ran.fits.batch_size}: {describe(failed.row)} failed with {gib(low)}"
                pairs.append((high - low, f"{text}, {describe(ran.row)} ran with {gib(high)} GiB"))
    return [text for _, text in sorted(pairs, reverse=True)]


def split_layouts(outcomes: Sequence[Outcome], quantity: str) -> list[str]:
    """Models that ran at a batch in one layout and failed at it in the other."""
    return [
        f"{ran.row['model']} at {ran.fits.batch_size}: "
        f"ran in {ran.row['layout']} ({gib(getattr(ran.fits, quantity))} GiB), "
        f"failed in {failed.row['layout']} ({gib(getattr(failed.fails, quantity))} GiB)"
        for ran in outcomes
        for failed in outcomes
        if ran.row["model"] == failed.row["model"] and ran.fits.batch_size == failed.fails.batch_size
    ]


def score_table(outcomes: Sequence[Outcome], quantity: str, capacity: float, *, settled: bool) -> str:
    """All scores side by side."""
    even, odd = halves(outcomes)
    usable_bytes = memfit.find_device(DEVICE).usable_bytes or 0
    published = usable_bytes - median(PUBLISHED_CONTEXTS) * GIB
    bare = fit_capacity(outcomes, "tensors")
    cells: list[tuple[str, str, Score]] = [("all rows", gib(capacity), score(outcomes, quantity, capacity))]
    for layout in dict.fromkeys(o.row["layout"] for o in outcomes):
        part = [o for o in outcomes if o.row["layout"] == layout]
        cells.append((layout, gib(capacity), score(part, quantity, capacity)))
    if not settled:
        for name, part, other in (("even", even, odd), ("odd", odd, even)):
            from_other = fit_capacity(other, quantity)
            cells.append((f"{name} models, constant of the others", gib(from_other), score(part, quantity, from_other)))
    cells += [
        ("nothing fitted: median of the published contexts", gib(published), score(outcomes, quantity, published)),
        ("nothing fitted: memfit for a PyTorch of today", gib(usable_bytes), score_today(outcomes)),
        ("bare threshold on tensor bytes, tuned on all rows", gib(bare), score(outcomes, "tensors", bare)),
    ]
    lines = [(name, size, f"{s.rows:.1%}", f"{s.ends:.1%}", s.num_rows) for name, size, s in cells]
    return table(("scored", "capacity, GiB", "rows right", "ends right", "rows"), lines)


def held_out(outcomes: Sequence[Outcome], quantity: str) -> Score:
    """How a quantity does when each half is scored with the constant of the other."""
    even, odd = halves(outcomes)
    marks = [
        score(even, quantity, fit_capacity(odd, quantity)),
        score(odd, quantity, fit_capacity(even, quantity)),
    ]
    num = max(1, sum(mark.num_rows for mark in marks))
    rows_right = sum(mark.rows * mark.num_rows for mark in marks) / num
    return Score(rows_right, sum(mark.ends * mark.num_rows for mark in marks) / num, num)


def choose(outcomes: Sequence[Outcome]) -> tuple[str, float, str]:
    """(quantity, capacity, table of candidates), of the candidate that does best on rows its constant never saw."""
    marks = {quantity: held_out(outcomes, quantity) for quantity in CANDIDATES}
    best = max(CANDIDATES, key=lambda quantity: (marks[quantity].rows, marks[quantity].ends))
    fitted = {quantity: fit_capacity(outcomes, quantity) for quantity in CANDIDATES}
    cells = [
        (QUANTITIES[q], gib(fitted[q]), str(score(outcomes, q, fitted[q])), str(marks[q]), "yes" if q == best else "")
        for q in CANDIDATES
    ]
    return best, fitted[best], table(("quantity", "capacity, GiB", "fitted", "held out", "chosen"), cells)


CAPACITY = """\
## Capacity

PyTorch 1.12 with CUDA 11.3 loads every kernel when the context is made, so that the context is far larger than today's
and what is left for the allocator on that machine is not known. Public out-of-memory messages of RTX 3090s of that
time leave {contexts} GiB outside the allocator, of 23.69. The capacity is therefore one constant,
fitted to these rows; the scores called held out are of each half of the models with the constant of the other half,
and decide which quantity is compared with the capacity. Variants of one architecture (such as tf_efficientnet_b0, _ap
and _ns) can fall into both halves, so that these are not as independent as their sizes suggest."""

EVIDENCE = """\
## Rows that no threshold can satisfy

Each pair below has the same image size and batch, and the step that needs less memory failed while the one that needs
more ran. No mechanism that we know of tells the sides apart. {num} of {total}, those furthest apart first:"""

ALIKE = """\
Models that are missed the same way in both layouts, which chance explains less well. Where the number is far from the
capacity, a mechanism is missing here that we have not found:"""


def misses_table(misses: Sequence[Outcome], quantity: str, capacity: float) -> str:
    """Both ends of each row that is not right."""
    cells = []
    for outcome in misses:
        ran, failed = getattr(outcome.fits, quantity), getattr(outcome.fails, quantity)
        cells.append(
            (
                describe(outcome.row),
                f"{outcome.fits.batch_size}: {gib(ran)} {'right' if ran <= capacity else '**wrong**'}",
                f"{outcome.fails.batch_size}: {gib(failed)} {'right' if failed > capacity else '**wrong**'}",
            )
        )
    return table(("row", "ran at, GiB", "failed at, GiB"), cells)


def missed_alike(misses: Sequence[Outcome], quantity: str, capacity: float) -> list[str]:
    """Models that are missed at the same end in every layout, if there are several."""
    ends: dict[tuple[str, str], list[int]] = {}
    for outcome in misses:
        name, ran, failed = outcome.row["model"], getattr(outcome.fits, quantity), getattr(outcome.fails, quantity)
        if ran > capacity:
            ends.setdefault((f"{name} at {outcome.fits.batch_size}", "ran"), []).append(ran)
        if failed <= capacity:
            ends.setdefault((f"{name} at {outcome.fails.batch_size}", "failed"), []).append(failed)
    return [
        f"{name}: {verb} with {' and '.join(map(gib, sizes))} GiB"
        for (name, verb), sizes in ends.items()
        if len(sizes) > 1
    ]


def evidence(outcomes: Sequence[Outcome], misses: Sequence[Outcome], quantity: str, capacity: float) -> list[str]:
    """Rows that contradict each other, and rows that agree in being missed."""
    pairs, layouts = contradictions(outcomes, quantity), split_layouts(outcomes, quantity)
    shown = pairs[:NUM_PAIRS]
    parts = [EVIDENCE.format(num=len(shown), total=len(pairs)), bullets(shown)] if pairs else []
    alike = missed_alike(misses, quantity, capacity)
    if layouts:
        parts += ["Models that ran in one layout and failed in the other at the same batch:", bullets(layouts)]
    if alike:
        parts += [ALIKE, bullets(alike)]
    return parts


def score_bars(scored: str, mark: Score) -> list[Bar]:
    """The claims about some rows."""
    return [
        Bar(
            f"models of which the batch that trained and the one that failed are both predicted, {scored}",
            f"{mark.rows:.1%}",
            f"at least {ROW_LIMIT:.0%}",
            mark.rows >= ROW_LIMIT,
        )
    ]


def sections(outcomes: Sequence[Outcome], skipped: Sequence[Skipped], *, settle: bool) -> tuple[list[Bar], list[str]]:
    """(bars, the page's body); the constant is settled anew or taken from `SETTLED`."""
    body = []
    if settle:
        quantity, capacity, candidates = choose(outcomes)
        body = [CAPACITY.format(contexts=", ".join(map(str, PUBLISHED_CONTEXTS))), candidates]
    else:
        quantity, capacity = SETTLED
    bars = score_bars("constant fitted to them" if settle else "all", score(outcomes, quantity, capacity))
    if settle:
        bars += score_bars("held out", held_out(outcomes, quantity))
    misses = [o for o in outcomes if o.ends_right(quantity, capacity) < 2]
    body = [
        f"## Scores\n\nCompared with the capacity: {QUANTITIES[quantity]}.",
        score_table(outcomes, quantity, capacity, settled=not settle),
        *body,
        f"## Misses\n\n{len(misses)} of {len(outcomes)} rows, at the batch that ran and at the batch that failed:",
        misses_table(misses, quantity, capacity),
        *evidence(outcomes, misses, quantity, capacity),
    ]
    if skipped:
        reasons = bullets(f"{describe(s.row)}: {s.reason}" for s in skipped)
        body.append(f"## Skipped\n\n{len(skipped)} rows are in no score:\n\n{reasons}")
    return bars, body


def main() -> None:
    """Score the rows and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, nargs="+", default=list(DEFAULT_CSVS), help="measured rows")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--sample", type=int, metavar="N", help="only so many rows, at equal distances")
    options = parser.parse_args()
    population = [row for path in options.csv for row in rows.read_rows(path) if is_bounded(row)]
    results = predict_all(sample(population, options.sample), options.jobs)
    outcomes = [r for r in results if isinstance(r, Outcome)]
    skipped = [r for r in results if isinstance(r, Skipped)]
    is_whole = options.sample is None and tuple(options.csv) == DEFAULT_CSVS
    bars, body = sections(outcomes, skipped, settle=is_whole)
    publish("timm_rtx3090", "Which batch of a timm model trains on an RTX 3090", bars, body, save=is_whole)


if __name__ == "__main__":
    main()
