"""Predicted against measured peaks of the zoo's training steps on the CPU.

    python -m benchmarks.cpu_accuracy [case ...]

The truth is tests/accuracy/cpu_measured.json, written by `python -m benchmarks.measure_cpu`: the greatest sum of live
bytes of PyTorch's CPU allocator in two training steps. The prediction is the peak of the timeline for the same steps,
model and batch. It is made with as many threads as the measurement had, whatever this machine has. Cases whose shapes
depend on data are held to another bar: their prediction is an upper bound.
"""

import argparse
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are built from configurations, nothing is fetched

import torch

import memfit
from benchmarks.measure_cpu import NUM_THREADS, RESULTS, make_optimizer
from benchmarks.reporting import Bar, percent, publish, table
from benchmarks.zoo import CASES
from benchmarks.zoo.case import OPTIMIZERS

LIMIT = 0.03
DATA_DEPENDENT = "data-dependent"


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of the truth.

    Args:
        case: name of the zoo's case.
        optimizer: name of its optimizer.
        peak_bytes: greatest sum of live bytes.
        torch: version it was measured with.
        cpu_capability: vector instructions it was measured with.
    """

    case: str
    optimizer: str
    peak_bytes: int
    torch: str
    cpu_capability: str

    @property
    def is_bound(self) -> bool:
        """Whether its shapes depend on data, so that its prediction is an upper bound."""
        return CASES[self.case].kind == DATA_DEPENDENT

    def difference_here(self) -> str | None:
        """Why kernels may allocate differently on this machine, or None."""
        capability = torch.backends.cpu.get_cpu_capability()
        if capability != self.cpu_capability:
            return f"measured with {self.cpu_capability} instructions, this machine has {capability}"
        if _minor(torch.__version__) != _minor(self.torch):
            return f"measured with torch {self.torch}, this is {torch.__version__}"
        return None


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def read_measured() -> list[Measured]:
    """All rows of the truth, in the order of the zoo."""
    fields = ("case", "optimizer", "peak_bytes", "torch", "cpu_capability")
    return [Measured(*(row[name] for name in fields)) for row in json.loads(RESULTS.read_text())]


def predict(case_name: str, optimizer_name: str) -> int:
    """Predicted peak of live bytes."""
    case = CASES[case_name]
    threads = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    try:
        model = case.build()
        optimizer = make_optimizer(optimizer_name, model)
        estimate = memfit.estimate(model, case.loss, case.batch(), optimizer=optimizer, device="cpu")
    finally:
        torch.set_num_threads(threads)
    return estimate.timeline.peak()[1]


def error(row: Measured) -> float:
    """Relative error of the prediction for one row."""
    return predict(row.case, row.optimizer) / row.peak_bytes - 1


def bars(errors: dict[Measured, float]) -> list[Bar]:
    """The claims, with what was measured."""
    exact = {row: value for row, value in errors.items() if not row.is_bound}
    bounds = {row: value for row, value in errors.items() if row.is_bound}
    claims = []
    if exact:
        worst = max(exact, key=lambda row: abs(exact[row]))
        measured = f"{abs(exact[worst]):.2%} ({worst.case}, {worst.optimizer})"
        claims.append(
            Bar(f"greatest error of {len(exact)} peaks", measured, f"at most {LIMIT:.0%}", abs(exact[worst]) <= LIMIT)
        )
        mean = fmean(map(abs, exact.values()))
        claims.append(Bar(f"mean error of {len(exact)} peaks", f"{mean:.3%}", f"at most {LIMIT:.0%}", mean <= LIMIT))
    if bounds:
        least = min(bounds.values())
        claims.append(Bar("shapes that depend on data: upper bound", percent(least), "at least 0%", least >= 0))
    return claims


def error_table(errors: dict[Measured, float]) -> str:
    """Errors by case and optimizer."""
    cells = {(row.case, row.optimizer): value for row, value in errors.items()}
    names = dict.fromkeys(row.case for row in errors)
    rows = []
    for name in names:
        shown = (percent(cells[name, o]) if (name, o) in cells else "" for o in OPTIMIZERS)
        rows.append((name, CASES[name].kind, *shown))
    return table(("case", "kind", *OPTIMIZERS), rows)


def run(rows: Iterable[Measured]) -> dict[Measured, float]:
    """Errors of the rows, each printed as it is known."""
    errors = {}
    for row in rows:
        errors[row] = error(row)
        print(f"{row.case:28}{row.optimizer:8}{percent(errors[row]):>10}", flush=True)
    return errors


def main() -> None:
    """Predict the named cases, or all, and show the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", choices=[[], *CASES], help="default: all")
    names = parser.parse_args().cases
    measured = read_measured()
    differences = {text for row in measured if (text := row.difference_here()) is not None}
    errors = run(row for row in measured if not names or row.case in names)
    notes = [f"Not comparable: {text}." for text in sorted(differences)]
    notes.append(
        f"Error of the predicted peak of live bytes, two training steps on the CPU with {NUM_THREADS} threads, "
        f"measured with {measured[0].cpu_capability} instructions. Blank: the case can't train with that optimizer."
    )
    title = "Accuracy on the CPU"
    publish("cpu_accuracy", title, bars(errors), [*notes, error_table(errors)], save=not names and not differences)


if __name__ == "__main__":
    main()
