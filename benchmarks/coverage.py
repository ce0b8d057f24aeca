"""How often the measured memory of public runs lies within the 95% interval, and how often what "fits" ran.

    python -m benchmarks.coverage [--sample N] [--t4 PATH] [--xmem PATH]

Two kinds of evidence. Runs of which the memory was measured (the T4's and xMem's): is it within the interval, and how
wide is that? And bounds (timm on an RTX 3090): a batch that ran, and a larger one that ran out of memory; of what was
called sure by so much, how much came true? The widths in `memfit.core.spread` follow from mechanisms but for what
nothing explains: 2% of every step, and beside it what steps with convolutions may be off by, below and above. These
were settled on half of the rows, by a hash of their words; the others are the check.
"""

import argparse
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import memfit
from benchmarks import rows, t4_runs, timm_rtx3090, xmem_cnn
from benchmarks.reporting import Bar, bullets, percent, publish, table
from memfit.core.units import MIB

NUM_BOUNDS = 24
COVERAGE_LIMITS = (0.93, 0.98)
WIDTH_LIMIT = 0.06
# Edges of the groups of probabilities.
EDGES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True, slots=True)
class Measured:
    """A run beside its interval, in bytes of reserved memory and CUDA context.

    Args:
        label: the row in words.
        is_check: whether no width was settled on it.
        measured_bytes: as measured.
        estimate: as predicted.
    """

    label: str
    is_check: bool
    measured_bytes: int
    estimate: memfit.Estimate

    @property
    def is_covered(self) -> bool:
        """Whether the interval holds what was measured."""
        least, most = self.estimate.interval_bytes
        return least <= self.measured_bytes <= most

    @property
    def width(self) -> float:
        """Of the interval, as a share of the estimate."""
        least, most = self.estimate.interval_bytes
        return (most - least) / self.estimate.peak_bytes

    @property
    def error(self) -> float:
        """Of the estimate."""
        return self.estimate.peak_bytes / self.measured_bytes - 1


@dataclass(frozen=True, slots=True)
class Tried:
    """A batch that was tried: the probability of fitting, and whether it ran."""

    is_check: bool
    probability: float
    ran: bool


def checking(labels: Sequence[str]) -> set[str]:
    """Every second label in the order of their hashes: half of them, the same ones every time."""
    return set(sorted(labels, key=lambda label: hashlib.sha256(label.encode()).digest())[1::2])


def measured_runs(path: Path, predict: Callable[[rows.Row], t4_runs.Outcome | xmem_cnn.Outcome]) -> list[Measured]:
    """The runs of a file that can be predicted."""
    runs: list[tuple[str, int, memfit.Estimate]] = []
    for place, row in enumerate(rows.read_rows(path)):
        try:
            outcome = predict(row)
        except (memfit.MemfitError, ValueError) as error:
            print(f"{path.name}, row {place}: {str(error).splitlines()[0]}")
            continue
        estimate = outcome.estimate
        context = row.get("context_bytes")
        # Where nobody measured the context, the estimate's own takes no part in the comparison.
        beside = int(context) if context else estimate.context_bytes
        runs.append((outcome.label, int(row["reserved_peak_bytes"]) + beside, estimate))
    checks = checking([label for label, _, _ in runs])
    return [Measured(label, label in checks, size, estimate) for label, size, estimate in runs]


def tried_batches(count: int) -> list[Tried]:
    """Both ends of a sample of the bounds."""
    population = [row for path in timm_rtx3090.DEFAULT_CSVS for row in rows.read_rows(path)]
    bounded = [row for row in population if timm_rtx3090.is_bounded(row)]
    device, tried = timm_rtx3090.device(), []
    chosen = timm_rtx3090.sample(bounded, count)
    checks = checking([str(row) for row in chosen])
    for row in chosen:
        with rows.quietly(), timm_rtx3090.unfused_attention():
            try:
                ran = memfit.estimate(timm_rtx3090.row_job(row), device=device, batch_size=int(row["fits_batch"]))
                ends = (ran, True), (ran.at_batch(int(row["fails_batch"])), False)
            except (memfit.MemfitError, RuntimeError):
                continue
        tried += [Tried(str(row) in checks, end.fit_probability or 0.0, has_run) for end, has_run in ends]
    return tried


def share(marks: Iterable[bool]) -> float:
    """Of those that are true."""
    return fmean(map(float, marks))


def bars(checked: Sequence[Measured]) -> list[Bar]:
    """The claims about the rows that check."""
    covered, width = share(run.is_covered for run in checked), median(run.width for run in checked)
    least, most = COVERAGE_LIMITS
    return [
        Bar(
            f"measured memory within the 95% interval, {len(checked)} rows that no width was settled on",
            f"{covered:.1%}",
            f"{least:.0%} to {most:.0%}",
            # Of few rows, all or all but one are as near as can be.
            least <= covered <= most or (covered > most and len(checked) < 1 / (1 - most)),
        ),
        Bar("width of the interval, median", f"{width:.1%}", f"at most {WIDTH_LIMIT:.0%}", width <= WIDTH_LIMIT),
    ]


def halves(runs: Sequence[Measured]) -> str:
    """Coverage and width of each half."""
    cells = []
    for title, chosen in (
        ("settled on", [run for run in runs if not run.is_check]),
        ("check", [run for run in runs if run.is_check]),
    ):
        widths = [run.width for run in chosen]
        cells.append((title, str(len(chosen)), f"{share(r.is_covered for r in chosen):.1%}", f"{median(widths):.1%}"))
    return table(("rows", "number", "within", "median width"), cells)


def every_run(runs: Sequence[Measured]) -> str:
    """A line for each run."""
    cells = []
    for run in runs:
        least, most = run.estimate.interval_bytes
        sizes = [f"{size / MIB:,.0f}" for size in (run.measured_bytes, run.estimate.peak_bytes, least, most)]
        answer = "yes" if run.is_covered else "**no**"
        cells.append((run.label, *sizes, percent(run.error), f"{run.width:.1%}", answer, "yes" if run.is_check else ""))
    headers = ("run", "measured, MiB", "predicted", "from", "to", "error", "width", "within", "check")
    return table(headers, cells)


def calibration(tried: Sequence[Tried]) -> str:
    """Of what was predicted with about the same probability, how much came true."""
    cells = []
    for low, high in itertools.pairwise(EDGES):
        group = [one for one in tried if low <= one.probability < high or one.probability == high == 1.0]
        if group:
            mean, ran = fmean(one.probability for one in group), share(one.ran for one in group)
            checked = [one.ran for one in group if one.is_check]
            came = f"{share(checked):.0%} of {len(checked)}" if checked else "no rows"
            cells.append((f"{low:.0%} to {high:.0%}", str(len(group)), f"{mean:.0%}", f"{ran:.0%}", came))
    return table(("probability of fitting", "batches", "on average", "ran", "ran, rows that check"), cells)


BOUNDS = """\
## Batches that ran and batches that didn't

{rows} rows of timm on an RTX 3090, each with the largest batch that ran and the next, which ran out of memory. Context
and optimizer are those of the stack of the time ([its rules](../concepts/stacks.md)); nothing is fitted."""


def main() -> None:
    """Score and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=NUM_BOUNDS, metavar="N", help="rows of the bounds; 0: none")
    parser.add_argument("--t4", type=Path, default=t4_runs.DEFAULT_CSV, help="rows of the T4")
    parser.add_argument("--xmem", type=Path, default=xmem_cnn.DEFAULT_CSV, help="rows of xMem")
    options = parser.parse_args()
    runs = [*measured_runs(options.t4, t4_runs.predict), *measured_runs(options.xmem, xmem_cnn.predict)]
    checked = [run for run in runs if run.is_check]
    body = ["## Halves", halves(runs), "## Runs", every_run(runs)]
    wide = [run for run in runs if not run.is_covered]
    if wide:
        body.append("Outside:\n\n" + bullets(f"{run.label}: {percent(run.error)}" for run in wide))
    if options.sample:
        tried = tried_batches(options.sample)
        body += [BOUNDS.format(rows=len(tried) // 2), calibration(tried)]
    is_whole = (options.sample, options.t4, options.xmem) == (NUM_BOUNDS, t4_runs.DEFAULT_CSV, xmem_cnn.DEFAULT_CSV)
    publish("coverage", "How often estimates are as sure as they say", bars(checked), body, save=is_whole)


if __name__ == "__main__":
    main()
