"""Which batch of a timm model still trains on an RTX 3090 (the timm project's train benchmark).

    python -m benchmarks.timm_rtx3090 [--csv PATH ...] [--jobs N] [--sample N]

Columns: model, image_size, layout (nchw or nhwc), fits_batch, fails_batch. A row says that training ran at one batch
and ran out of memory at the next; it is right when both ends are predicted. Rows without one of the ends are not used.
Conditions: PyTorch 1.12 with CUDA 11.3, float16 autocast without a scaler, SGD with Nesterov momentum, gradients
zeroed in place, attention not fused, cross-entropy.

The verdicts are memfit's own for that stack (`find_device("rtx-3090", stack="torch1.12-cu113")`): nothing is fitted.
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
from typing import Any

import torch

import memfit
from benchmarks import rows
from benchmarks.reporting import Bar, bullets, publish, table
from memfit.allocator import replay
from memfit.core.units import GIB, MIB

DEFAULT_CSVS = tuple(rows.DATA / f"timm_train_rtx3090_{layout}.csv" for layout in ("nchw", "nhwc"))
STACK = "torch1.12-cu113"
NUM_PAIRS = 15
ROW_LIMIT = 0.97

# Parts of a card outside PyTorch's allocator (total - free - reserved) in public out-of-memory messages of RTX 3090s
# from the time of PyTorch 1.12, in GiB, to show how much hangs on the context.
PUBLISHED_CONTEXTS = (1.21, 1.61, 1.65, 1.92)


@dataclass(frozen=True, slots=True)
class End:
    """One end of a row, as predicted.

    Args:
        batch_size: samples per step.
        fits: memfit's verdict.
        needed: bytes of the smallest capacity in which the allocator's replay succeeds, without the workspaces that
            cuDNN can do without, and without the context.
    """

    batch_size: int
    fits: bool
    needed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row beside its prediction."""

    row: rows.Row
    fits: End
    fails: End

    @property
    def ends_right(self) -> int:
        """How many of the two verdicts are right."""
        return int(self.fits.fits) + int(not self.fails.fits)

    def ends_right_within(self, capacity_bytes: float) -> int:
        """How many would be right if that were what is left for the allocator."""
        return int(self.fits.needed <= capacity_bytes) + int(self.fails.needed > capacity_bytes)


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
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, nesterov=True),
        precision="amp-fp16",
    )


def smallest_capacity(timeline: memfit.Timeline, allocated_bytes: int, reserved_bytes: int) -> int:
    """Capacity in which a replay of the timeline just succeeds, to 32 MiB."""
    low, high = allocated_bytes - 1, reserved_bytes
    while high - low > 32 * MIB:
        middle = (low + high) // 2
        low, high = (low, middle) if replay(timeline, capacity_bytes=middle).out_of_memory is None else (middle, high)
    return high


def measure_end(estimate: memfit.Estimate) -> End:
    """The verdict, and what the step needs."""
    lean = estimate.timeline.without_optional()
    played = replay(lean)
    return End(
        batch_size=estimate.batch_size or 0,
        fits=bool(estimate.fits),
        needed=smallest_capacity(lean, played.allocated_peak_bytes, played.reserved_peak_bytes),
    )


def device() -> memfit.Device:
    """The card with the software of its time."""
    return memfit.find_device("rtx-3090", stack=STACK)


def predict(row: rows.Row) -> Outcome | Skipped:
    """A row beside its prediction, or why there is none."""
    with rows.quietly(), unfused_attention():
        try:
            estimate = memfit.estimate(row_job(row), device=device(), batch_size=int(row["fits_batch"]))
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


def score(ends_right: Iterable[int]) -> Score:
    """Shares of rows and ends that are right, from how many ends of each row are."""
    right = list(ends_right)
    num = max(1, len(right))
    return Score(sum(n == 2 for n in right) / num, sum(right) / 2 / num, len(right))


def gib(size_bytes: float) -> str:
    """A size in GiB with two decimals, for columns."""
    return f"{size_bytes / GIB:.2f}"


def describe(row: rows.Row) -> str:
    """A row in words."""
    return f"{row['model']} {row['image_size']} {row['layout']}"


def contradictions(outcomes: Sequence[Outcome]) -> list[str]:
    """Pairs of the same image size and batch: the one that needs less failed, the one that needs more ran."""
    pairs = []
    for failed in outcomes:
        for ran in outcomes:
            same = failed.row["image_size"] == ran.row["image_size"] and failed.fails.batch_size == ran.fits.batch_size
            low, high = failed.fails.needed, ran.fits.needed
            if same and low < high:
                text = f"at {ran.fits.batch_size}: {describe(failed.row)} failed with {gib(low)}"
                pairs.append((high - low, f"{text}, {describe(ran.row)} ran with {gib(high)} GiB"))
    return [text for _, text in sorted(pairs, reverse=True)]


def split_layouts(outcomes: Sequence[Outcome]) -> list[str]:
    """Models that ran at a batch in one layout and failed at it in the other."""
    return [
        f"{ran.row['model']} at {ran.fits.batch_size}: "
        f"ran in {ran.row['layout']} ({gib(ran.fits.needed)} GiB), "
        f"failed in {failed.row['layout']} ({gib(failed.fails.needed)} GiB)"
        for ran in outcomes
        for failed in outcomes
        if ran.row["model"] == failed.row["model"] and ran.fits.batch_size == failed.fails.batch_size
    ]


def score_table(outcomes: Sequence[Outcome]) -> str:
    """The verdicts' scores, and what they would be with other contexts."""
    target = device()
    usable_bytes, context_bytes = target.usable_bytes or 0, target.context_bytes or 0
    today_bytes = memfit.find_device("rtx-3090").context_bytes or 0
    cells = [("**memfit's verdicts, all rows**", gib(context_bytes), score(o.ends_right for o in outcomes))]
    for layout in dict.fromkeys(o.row["layout"] for o in outcomes):
        part = score(o.ends_right for o in outcomes if o.row["layout"] == layout)
        cells.append((f"memfit's verdicts, {layout}", gib(context_bytes), part))
    others = [("today's context", today_bytes), *(("a published context", gib * GIB) for gib in PUBLISHED_CONTEXTS)]
    for name, size in others:
        marks = score(outcome.ends_right_within(usable_bytes - size) for outcome in outcomes)
        cells.append((f"for comparison: {name}", gib(size), marks))
    lines = [(name, size, f"{s.rows:.1%}", f"{s.ends:.1%}", s.num_rows) for name, size, s in cells]
    return table(("scored", "context, GiB", "rows right", "ends right", "rows"), lines)


CAPACITY = """\
## Capacity

The card gives {usable} GiB to a process. PyTorch 1.12 with CUDA 11.3 loads every kernel of a library when it is first
used, so that the context is {context} GiB rather than {today}: the images of the kernels for compute capability 8.6 in
PyTorch's libraries, cuBLAS and cuDNN, read in wheels (`memfit/catalogue/stacks.py`,
[Software stacks](../concepts/stacks.md)). Public out-of-memory messages of RTX 3090s of that time leave {contexts} GiB
outside the allocator, other processes included; the table shows what the score would be with them. No figure is fitted
to these rows. Up to November 2026 one was: 21.70 GiB for the allocator, for a score of 93.9% (92.5% held out)."""

EVIDENCE = """\
## Rows that no threshold can satisfy

Each pair below has the same image size and batch, and the step that needs less memory failed while the one that needs
more ran. No mechanism that we know of tells the sides apart. {num} of {total}, those furthest apart first:"""

ALIKE = """\
Models that are missed the same way in both layouts, which chance explains less well. Where the number is far from the
capacity, a mechanism is missing here that we have not found:"""


def misses_table(misses: Sequence[Outcome]) -> str:
    """Both ends of each row that is not right."""
    cells = [
        (
            describe(outcome.row),
            f"{outcome.fits.batch_size}: {gib(outcome.fits.needed)} {'right' if outcome.fits.fits else '**wrong**'}",
            f"{outcome.fails.batch_size}: {gib(outcome.fails.needed)} {'**wrong**' if outcome.fails.fits else 'right'}",
        )
        for outcome in misses
    ]
    return table(("row", "ran at, GiB", "failed at, GiB"), cells)


def missed_alike(misses: Sequence[Outcome]) -> list[str]:
    """Models that are missed at the same end in every layout, if there are several."""
    ends: dict[tuple[str, str], list[int]] = {}
    for outcome in misses:
        name = outcome.row["model"]
        if not outcome.fits.fits:
            ends.setdefault((f"{name} at {outcome.fits.batch_size}", "ran"), []).append(outcome.fits.needed)
        if outcome.fails.fits:
            ends.setdefault((f"{name} at {outcome.fails.batch_size}", "failed"), []).append(outcome.fails.needed)
    return [
        f"{name}: {verb} with {' and '.join(map(gib, sizes))} GiB"
        for (name, verb), sizes in ends.items()
        if len(sizes) > 1
    ]


def evidence(outcomes: Sequence[Outcome], misses: Sequence[Outcome]) -> list[str]:
    """Rows that contradict each other, and rows that agree in being missed."""
    pairs, layouts = contradictions(outcomes), split_layouts(outcomes)
    shown = pairs[:NUM_PAIRS]
    parts = [EVIDENCE.format(num=len(shown), total=len(pairs)), bullets(shown)] if pairs else []
    alike = missed_alike(misses)
    if layouts:
        parts += ["Models that ran in one layout and failed in the other at the same batch:", bullets(layouts)]
    if alike:
        parts += [ALIKE, bullets(alike)]
    return parts


def sections(outcomes: Sequence[Outcome], skipped: Sequence[Skipped]) -> tuple[list[Bar], list[str]]:
    """(bars, the page's body)."""
    mark = score(outcome.ends_right for outcome in outcomes)
    claim = "models of which the batch that trained and the one that failed are both predicted, nothing fitted"
    bars = [Bar(claim, f"{mark.rows:.1%}", f"at least {ROW_LIMIT:.0%}", mark.rows >= ROW_LIMIT)]
    misses = [outcome for outcome in outcomes if outcome.ends_right < 2]
    target, today = device(), memfit.find_device("rtx-3090")
    sizes = {"usable": target.usable_bytes, "context": target.context_bytes, "today": today.context_bytes}
    described = {name: gib(size or 0) for name, size in sizes.items()}
    body = [
        f"## Scores\n\n{score_table(outcomes)}",
        CAPACITY.format(contexts=", ".join(map(str, PUBLISHED_CONTEXTS)), **described),
        f"## Misses\n\n{len(misses)} of {len(outcomes)} rows, at the batch that ran and at the batch that failed:",
        misses_table(misses),
        *evidence(outcomes, misses),
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
    bars, body = sections(outcomes, skipped)
    publish("timm_rtx3090", "Which batch of a timm model trains on an RTX 3090", bars, body, save=is_whole)


if __name__ == "__main__":
    main()
