"""How long steps of timm models take on real GPUs, predicted and measured (the timm project's benchmark results).

    python -m benchmarks.step_times [--csv PATH] [--jobs N] [--sample N] [--tables FILE]

Columns: gpu, torch, cuda, layout, precision, compiled, mode, model, image_size, batch, step_ms. Training is a step with
SGD, Nesterov momentum in a loop over the parameters, gradients zeroed in place, attention not fused; inference is a
forward pass without gradients, attention fused. Each step is traced on shapes, on the software stack of its row, and
its time computed by the packaged model (`memfit.timing`). Its parameters were fitted to the families of models in one
half (benchmarks/fit_step_times.py); the claims are about the other half. Families are split by a hash of their name.

`--tables` takes the operators from a file that the fit has kept; rows that aren't in it are left out.
"""

import argparse
import hashlib
import pickle
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

import memfit
from benchmarks import rows
from benchmarks.reporting import Bar, bullets, publish, table
from benchmarks.timm_rtx3090 import row_job, unfused_attention
from memfit.api.jobs import adapter_of
from memfit.catalogue import find_device
from memfit.core.estimate import NOT_COMPILED
from memfit.core.profile import Work
from memfit.timing import rates_of, step_time
from memfit.timing.step import with_interval

DEFAULT_CSV = rows.DATA / "timm_step_times.csv"
TRACED_ON = "rtx-3090"
FITTED, HELD_OUT = "fitted", "held out"
NUM_MISSES = 25
NEAR = 0.25
_PREFIXES = re.compile(r"^(tf_|legacy_|adv_|jx_|dm_|test_)")


def family_of(model: str) -> str:
    """The family of a model: the letters that its name begins with, without prefixes that say where weights are from.

    >>> family_of("tf_efficientnet_b0"), family_of("resnetv2_50d"), family_of("jx_nest_base")
    ('efficientnet', 'resnetv', 'nest')
    """
    match = re.match(r"[a-z]+", _PREFIXES.sub("", model))
    return match[0] if match else model


def half_of(model: str) -> str:
    """The half that a model's family belongs to: parity of the first byte of the SHA-256 of the family's name."""
    return HELD_OUT if hashlib.sha256(family_of(model).encode()).digest()[0] % 2 else FITTED


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row beside its prediction, in seconds."""

    row: rows.Row
    predicted: float
    lower: float
    upper: float

    @property
    def measured(self) -> float:
        """The measured time."""
        return float(self.row["step_ms"]) / 1e3

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that could not be predicted, and why."""

    row: rows.Row
    reason: str


Subject = tuple[str, str, str, str, str]
"""Model, image size, layout, mode and whether it is compiled: what takes a trace of its own."""


def subject_of(row: rows.Row) -> Subject:
    """What a row is a measurement of."""
    return row["model"], row["image_size"], row["layout"], row["mode"], row["compiled"]


def step_job(row: rows.Row) -> memfit.Job:
    """The step that a row describes, at any batch size."""
    job = replace(row_job(row), compile=row["compiled"] == "1")
    if row["mode"] == "training":
        return job

    def build() -> Any:
        model: Any = job.model()
        return model.eval()

    return replace(job, model=build, mode="inference", optimizer=None, loss=lambda model, batch: model(batch[0]))


@contextmanager
def _conditions(row: rows.Row) -> Iterator[None]:
    """Attention as the row's PyTorch computed it."""
    with rows.quietly(), unfused_attention() if row["mode"] == "training" else nullcontext():
        yield


def operators(some: Sequence[rows.Row]) -> Callable[[int], tuple[Sequence[Work], Any]]:
    """The operators of a subject's step at the batch sizes of its rows, as arguments of `step_time`."""
    sizes, row = sorted({int(row["batch"]) for row in some}), some[0]
    device = find_device(TRACED_ON, stack=f"torch{row['torch']}-cu{row['cuda'].replace('.', '')}")
    with _conditions(row):
        job = step_job(row)
        tracer = adapter_of(job).open_job(job, device, sizes[0])
        # The compiler may fuse otherwise at each size.
        traced = {size: tracer.trace(size) for size in (sizes if job.compile else {sizes[0], sizes[-1]})}
    if any(note.code == NOT_COMPILED for trace in traced.values() for note in trace.notes):
        raise memfit.MemfitError("the compiler failed on shapes")
    first, last = traced[sizes[0]].work, traced[sizes[-1]].work

    def at(size: int) -> tuple[Sequence[Work], Any]:
        if size in traced:
            return traced[size].work, None
        return first, (size, sizes[0], (sizes[-1], last))

    return at


def predict(some: Sequence[rows.Row]) -> list[Outcome | Skipped]:
    """All rows of one subject beside their predictions."""
    try:
        work_at = operators(some)
    except (memfit.MemfitError, RuntimeError) as error:
        return [Skipped(row, str(error).splitlines()[0]) for row in some]
    found: list[Outcome | Skipped] = []
    for row in some:
        work, at = work_at(int(row["batch"]))
        device = find_device(row["gpu"])
        told = step_time(work, device, row["mode"], at=at)
        if told is None:
            found.append(Skipped(row, f"the rates of {device.name} are unknown"))
        else:
            found.append(Outcome(row, told.seconds, told.lower_seconds, told.upper_seconds))
    return found


def table_key(row: rows.Row) -> tuple[Any, ...]:
    """What has operators of its own."""
    return (*subject_of(row), int(row["batch"]))


def predict_kept(chosen: Sequence[rows.Row], path: Path) -> list[Outcome | Skipped]:
    """Predictions from operators that were traced before."""
    tables = pickle.loads(path.read_bytes())
    found: list[Outcome | Skipped] = []
    for row in chosen:
        table = tables.get(table_key(row))
        if table is None:
            found.append(Skipped(row, f"{row['mode']}, {row['layout']}: not among the operators kept"))
            continue
        device = find_device(row["gpu"])
        told = with_interval(table, rates_of(device), device, row["mode"])
        found.append(Outcome(row, told.seconds, told.lower_seconds, told.upper_seconds))
    return found


def predict_all(chosen: Sequence[rows.Row], num_jobs: int) -> list[Outcome | Skipped]:
    """Predictions, from several processes, with a line of progress."""
    subjects: dict[Subject, list[rows.Row]] = defaultdict(list)
    for row in chosen:
        subjects[subject_of(row)].append(row)
    started, found = time.monotonic(), []
    pool = ProcessPoolExecutor(
        num_jobs, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    )
    with pool:
        pending = [pool.submit(predict, some) for some in subjects.values()]
        for number, future in enumerate(as_completed(pending), 1):
            found += future.result()
            line = f"{number}/{len(pending)} models, {time.monotonic() - started:.0f} s"
            print(f"\r{line:60}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return sorted(found, key=lambda one: tuple(one.row.values()))


def sampled(population: Sequence[rows.Row], num_subjects: int | None) -> list[rows.Row]:
    """The rows of so many subjects, chosen by a hash of their names; all by default."""
    ordered = sorted(
        {subject_of(row) for row in population}, key=lambda one: hashlib.sha256(repr(one).encode()).digest()
    )
    kept = set(ordered[:num_subjects])
    return [row for row in population if subject_of(row) in kept]


def ranks(values: Sequence[float]) -> Any:
    """The rank of each value."""
    return np.argsort(np.argsort(np.array(values)))


@dataclass(frozen=True, slots=True)
class Score:
    """How near predictions are.

    Args:
        num_rows: how many.
        median: of the absolute relative errors.
        near: share within 25%.
        rank: Spearman's correlation of predicted and measured time of a step over all these rows.
        rank_of_sample: the same of the time for one sample, in which models are compared.
        covered: share of measured times within the interval.
    """

    num_rows: int
    median: float
    near: float
    rank: float
    rank_of_sample: float
    covered: float


def score(outcomes: Sequence[Outcome]) -> Score:
    """The score of some rows."""
    errors = [abs(one.ratio - 1) for one in outcomes]
    batches = [int(one.row["batch"]) for one in outcomes]
    times = [[one.measured for one in outcomes], [one.predicted for one in outcomes]]
    samples = [[seconds / size for seconds, size in zip(some, batches, strict=True)] for some in times]
    whole, single = (float(np.corrcoef(ranks(some[0]), ranks(some[1]))[0, 1]) for some in (times, samples))
    covered = [one.lower <= one.measured <= one.upper for one in outcomes]
    near = float(np.mean([error <= NEAR for error in errors]))
    return Score(len(outcomes), float(np.median(errors)), near, whole, single, float(np.mean(covered)))


def _cells(name: Sequence[str], marks: Score) -> tuple[str, ...]:
    shares = (f"{marks.median:.1%}", f"{marks.near:.1%}", f"{marks.rank:.3f}", f"{marks.rank_of_sample:.3f}")
    return (*name, str(marks.num_rows), *shares, f"{marks.covered:.1%}")


_HEADERS = ("rows", "median error", "within 25%", "rank, step", "rank, sample", "in the 95% interval")


def by_conditions(outcomes: Sequence[Outcome]) -> str:
    """The scores of every GPU, mode, layout and half."""
    groups: dict[tuple[str, ...], list[Outcome]] = defaultdict(list)
    for one in outcomes:
        row = one.row
        kind = row["mode"] + (", compiled" if row["compiled"] == "1" else "")
        groups[(kind, row["gpu"], f"PyTorch {row['torch']}", row["layout"], half_of(row["model"]))].append(one)
    cells = [_cells(key, score(some)) for key, some in sorted(groups.items()) if len(some) > 2]
    return table(("mode", "GPU", "software", "layout", "half", *_HEADERS), cells)


def by_family(outcomes: Sequence[Outcome]) -> str:
    """The scores of every family of the half that was held out."""
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for one in outcomes:
        groups[family_of(one.row["model"]), one.row["mode"]].append(one)
    cells = [
        (*key, str(len(some)), f"{np.median([one.ratio for one in some]):.2f}", f"{score(some).median:.1%}")
        for key, some in sorted(groups.items())
    ]
    return table(("family", "mode", "rows", "predicted over measured, median", "median error"), cells)


def misses(outcomes: Sequence[Outcome]) -> str:
    """The rows that are furthest off."""
    worst = sorted(outcomes, key=lambda one: -abs(np.log(one.ratio)))[:NUM_MISSES]
    cells = [
        (
            f"{one.row['model']} {one.row['image_size']}, {one.row['batch']} a batch",
            f"{one.row['mode']}{', compiled' if one.row['compiled'] == '1' else ''}, {one.row['layout']}",
            one.row["gpu"],
            f"{one.measured * 1e3:.0f} ms",
            f"{one.predicted * 1e3:.0f} ms",
            f"{one.ratio:.2f}",
        )
        for one in worst
    ]
    return table(("model", "step", "GPU", "measured", "predicted", "ratio"), cells)


def bars_of(held_out: Sequence[Outcome]) -> list[Bar]:
    """The claims, about families that nothing was fitted to."""
    found: list[Bar] = []
    for mode in ("training", "inference"):
        some = [one for one in held_out if one.row["mode"] == mode]
        if len(some) < 3:
            continue
        marks, name = score(some), f"{mode}, {len(some)} rows of families that nothing was fitted to"
        limit = 0.10 if mode == "training" else 0.15
        found.append(Bar(f"median error, {name}", f"{marks.median:.1%}", f"at most {limit:.0%}", marks.median <= limit))
        if mode == "training":
            found.append(Bar(f"within 25%, {name}", f"{marks.near:.1%}", "at least 90%", marks.near >= 0.9))
        found.append(Bar(f"rank correlation, {name}", f"{marks.rank:.3f}", "at least 0.970", marks.rank >= 0.97))
        is_right = 0.93 <= marks.covered <= 0.98
        found.append(Bar(f"in the 95% interval, {name}", f"{marks.covered:.1%}", "93% to 98%", is_right))
    return found


SPLIT = """\
## The split

A family is the letters that a model's name begins with, without the prefixes tf_, legacy_, adv_, jx_, dm_ and test_; it
belongs to the fitted half where the first byte of the SHA-256 of its name is even. Fitted: {fitted}. Held out:
{held_out}. Parameters and intervals come from the first alone (`python -m benchmarks.fit_step_times`, which writes
`src/memfit/timing/parameters.json`); nothing of the second was used. The rank correlation is Spearman's, over all rows
of a line: of the time of a step, and of the time for one sample."""


def main() -> None:
    """Score the rows and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=DEFAULT_CSV, help="measured rows")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--sample", type=int, metavar="N", help="only so many models, chosen by a hash of their names")
    parser.add_argument("--tables", type=Path, help="operators that the fit has kept, in place of traces")
    parser.add_argument("--save", action="store_true", help="publish a part too")
    options = parser.parse_args()
    population = rows.read_rows(options.csv)
    chosen = sampled(population, options.sample)
    results = predict_kept(chosen, options.tables) if options.tables else predict_all(chosen, options.jobs)
    outcomes = [one for one in results if isinstance(one, Outcome)]
    skipped = [one for one in results if isinstance(one, Skipped)]
    held_out = [one for one in outcomes if half_of(one.row["model"]) == HELD_OUT]
    families = {
        half: sorted({family_of(r["model"]) for r in chosen if half_of(r["model"]) == half}) for half in _HALVES
    }
    lines = SPLIT.format(fitted=", ".join(families[FITTED]), held_out=", ".join(families[HELD_OUT]))
    body = [
        f"{len(outcomes)} of {len(population)} rows"
        + (f", a sample of {options.sample} models by a hash of their names." if options.sample else "."),
        lines,
        "## Scores",
        by_conditions(outcomes),
        "## Families that nothing was fitted to",
        by_family(held_out),
        "## The worst of these",
        misses(held_out),
    ]
    if skipped:
        counted = Counter(one.reason if options.tables else f"{one.row['model']}: {one.reason}" for one in skipped)
        reasons = [f"{reason} ({count} rows)" for reason, count in sorted(counted.items())]
        body.append(f"## Skipped\n\n{len(skipped)} rows are in no score:\n\n{bullets(reasons)}")
    is_whole = options.sample is None and options.tables is None and options.csv == DEFAULT_CSV
    publish("step_times", "How long steps take on real GPUs", bars_of(held_out), body, save=is_whole or options.save)


_HALVES = (FITTED, HELD_OUT)


if __name__ == "__main__":
    main()
