"""Plans of Keras models against what they take once they are put into practice, on the CPU, on each backend.

    python -m benchmarks.keras_plans [case ...] [--backends torch jax tensorflow] [--share 0.5] [--rows FILE]

Each model is planned for a share of what its plain step takes. A process of its own puts the plan into practice and
measures steps, as benchmarks/keras_accuracy.py does it for plain ones.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.keras_accuracy import LIMITS, MEASURING
from benchmarks.reporting import ROOT, Bar, bullets, percent, publish, table
from memfit.core.units import MIB

_MOST_SECONDS = 900
_REFUSAL = "no plan fits"


@dataclass(frozen=True, slots=True)
class Row:
    """One model on one backend.

    Attributes:
        case: name of the model.
        backend: of Keras.
        share: of what the plain step takes.
        plain: bytes that the plain step is predicted to take.
        budget: bytes that were planned for.
        predicted: bytes of the plan.
        measured: bytes of the steps.
        least: bytes of the step that took least, where steps differ.
        greatest: of the one that took most.
        moves: what the plan does.
        seconds: that the plan took.
        how: the truth was measured.
        trouble: why there are no figures.
    """

    case: str
    backend: str
    share: float
    plain: int = 0
    budget: int = 0
    predicted: int = 0
    measured: int = 0
    least: int = 0
    greatest: int = 0
    moves: str = ""
    seconds: float = 0.0
    how: str = ""
    trouble: str = ""

    @property
    def is_refused(self) -> bool:
        """Whether no plan was promised."""
        return _REFUSAL in self.trouble

    @property
    def error(self) -> float:
        """Of the prediction, relative."""
        return self.predicted / self.measured - 1


def one(backend: str, name: str, what: str, share: float, path: Path) -> None:
    """Plans or measures in this process and prints what it found."""
    import importlib

    import memfit
    from benchmarks.keras_models import case

    chosen = case(name)
    found: dict[str, Any]
    if what == "measure":
        plan = memfit.Plan.load(path)

        def planned() -> Any:
            model = chosen.make()
            plan.apply(model)
            return model

        module = importlib.import_module(f"benchmarks.measuring_keras_{backend}")
        found = {**module.measure(replace(chosen, make=planned)), "how": module.HOW}
    else:
        model, batch = chosen.make(), chosen.batch(chosen.batch_size)
        plain = memfit.estimate(model, batch=batch, device="cpu").peak_bytes
        started = time.perf_counter()
        plan = memfit.plan(
            model, batch=batch, device="cpu", budget=int(plain * share), options=memfit.PlanOptions(measure=False)
        )
        plan.save(path)
        found = {
            "plain": plain,
            "budget": int(plain * share),
            "predicted": plan.after.peak_bytes,
            "moves": ", ".join(move.title for move in plan.moves),
            "seconds": time.perf_counter() - started,
        }
    print(json.dumps(found))


def row_of(backend: str, name: str, share: float) -> Row:
    """Both, in processes of their own."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        for what in ("plan", "measure"):
            words = ["--one", backend, name, what, str(share), str(path)]
            environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
            if what == "measure":
                environment |= MEASURING[backend]
            try:
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks.keras_plans", *words],
                    cwd=ROOT,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=_MOST_SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return Row(name, backend, share=share, trouble=f"{what}: not done in {_MOST_SECONDS} s")
            lines = done.stdout.strip().splitlines()
            if done.returncode or not lines:
                reason = next((line for line in done.stderr.splitlines() if _REFUSAL in line), "")
                reason = reason or (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
                return Row(name, backend, share=share, trouble=f"{what}: {reason[:200]}")
            found |= json.loads(lines[-1])
    return Row(name, backend, share=share, **found)


def bars(rows: Sequence[Row]) -> list[Bar]:
    """The claims, with what was measured."""
    claims = []
    for backend, limit in LIMITS.items():
        known = [row for row in rows if row.backend == backend and not row.is_refused]
        measured = [row for row in known if not row.trouble]
        if not known:
            continue
        worst = max(measured, key=lambda row: abs(row.error), default=None)
        shown = "nothing" if worst is None else f"{abs(worst.error):.2%} ({worst.case})"
        met = worst is not None and abs(worst.error) <= limit and len(measured) == len(known)
        claims.append(Bar(f"{backend}: greatest error of {len(measured)} plans", shown, f"at most {limit:.0%}", met))
        within = sum(row.measured <= row.budget for row in measured)
        text = f"{within} of {len(measured)}"
        claims.append(Bar(f"{backend}: plans that stay within their budget", text, "all", within == len(known)))
    return claims


def cells(row: Row) -> tuple[str, ...]:
    """Of the table."""
    if row.trouble:
        return row.case, row.backend, "", "", "", "", row.trouble.replace("|", "/")
    spread = f" ({row.least / MIB:,.1f} to {row.greatest / MIB:,.1f})" if row.greatest > row.least else ""
    sizes = (f"{row.budget / MIB:,.1f}", f"{row.measured / MIB:,.1f}{spread}", f"{row.predicted / MIB:,.1f}")
    return row.case, row.backend, *sizes, percent(row.error), f"{row.moves} ({row.seconds:.0f} s)"


def main() -> int:
    """Compares the named cases, or all, and publishes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="default: all")
    parser.add_argument("--backends", nargs="*", default=list(LIMITS), choices=list(LIMITS))
    parser.add_argument("--share", type=float, default=0.5, help="of what the plain step takes (default: 0.5)")
    parser.add_argument("--rows", type=Path, help="file of rows that are known, to which others are added")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        backend, name, what, share, path = given.one
        one(backend, name, what, float(share), Path(path))
        return 0
    os.environ["KERAS_BACKEND"] = given.backends[0]
    from benchmarks.keras_models import CASES

    known = {}
    if given.rows and given.rows.exists():
        found = [Row(**json.loads(line)) for line in given.rows.read_text(encoding="utf-8").splitlines()]
        known = {(row.backend, row.case): row for row in found if row.share == given.share}
    rows = []
    for backend in given.backends:
        for name in given.cases or [case.name for case in CASES]:
            row = known.get((backend, name)) or row_of(backend, name, given.share)
            rows.append(row)
            print(" | ".join(cells(row)), flush=True)
            if given.rows and (backend, name) not in known and not row.trouble:
                with given.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    claims = bars(rows)
    headers = ("model", "backend", "budget, MiB", "measured, MiB", "predicted, MiB", "error", "plan")
    how = {row.backend: row.how for row in rows if row.how}
    sections = [
        f"Budgets are {given.share:.0%} of what the plain step is predicted to take.",
        "## How",
        bullets(f"{backend}: {words}." for backend, words in how.items()),
        "## Plans",
        table(headers, map(cells, rows)),
    ]
    whole = not given.cases and set(given.backends) == set(LIMITS)
    publish("keras_plans", "Keras: plans against measured memory", claims, sections, save=whole)
    return 0 if all(claim.met for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
