"""Predicted against measured peaks of Keras models on TensorFlow, JAX and PyTorch, on the CPU.

    python -m benchmarks.keras_accuracy [case ...] [--backends torch jax tensorflow] [--rows FILE]

A whole run takes half an hour; with --rows, what is in the file isn't done again, so that it can be interrupted.

Each model is made, estimated and trained in processes of its own, one for each backend. How the truth is measured
differs by backend, and each module says how: benchmarks/measuring_keras_torch.py, measuring_keras_jax.py and
measuring_keras_tensorflow.py.
The reports of the three backends are also compared: parameters, gradients and optimizer state must be equal.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.reporting import ROOT, Bar, bullets, percent, publish, table
from memfit.core.units import MIB

LIMITS = {"torch": 0.03, "jax": 0.10, "tensorflow": 0.08}
SHARED = ("parameter", "gradient", "optimizer state")
# What has to be set before a process begins; each module under benchmarks/measuring_keras_* says why.
MEASURING = {
    "torch": {},
    "jax": {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
        "MALLOC_TOP_PAD_": "0",
        "MALLOC_ARENA_MAX": "1",
        "JAX_PLATFORMS": "cpu",
    },
    "tensorflow": {"TF_CPU_ALLOCATOR_USE_BFC": "1"},
}
_MOST_SECONDS = 900


@dataclass(frozen=True, slots=True)
class Row:
    """One model on one backend.

    Attributes:
        case: name of the model.
        backend: of Keras.
        predicted: bytes.
        measured: bytes.
        least: bytes of the step that took least, where steps differ.
        greatest: of the one that took most.
        seconds: that the estimate took.
        state: bytes by category.
        how: the truth was measured.
        trouble: why there are no figures.
    """

    case: str
    backend: str
    predicted: int = 0
    measured: int = 0
    least: int = 0
    greatest: int = 0
    seconds: float = 0.0
    state: dict[str, int] = field(default_factory=dict)
    how: str = ""
    trouble: str = ""

    @property
    def error(self) -> float:
        """Of the prediction, relative."""
        return self.predicted / self.measured - 1


def one(backend: str, name: str, what: str) -> None:
    """Predicts or measures in this process and prints what it found."""
    import importlib

    from benchmarks.keras_models import case

    chosen = case(name)
    found: dict[str, Any]
    if what == "measure":
        module = importlib.import_module(f"benchmarks.measuring_keras_{backend}")
        found = {**module.measure(chosen), "how": module.HOW}
    else:
        import memfit

        model, batch = chosen.make(), chosen.batch(chosen.batch_size)
        started = time.perf_counter()
        estimate = memfit.estimate(model, batch=batch, device="cpu")
        found = {
            "predicted": estimate.peak_bytes,
            "seconds": time.perf_counter() - started,
            "state": estimate.state_bytes,
        }
    print(json.dumps(found))


def row_of(backend: str, name: str) -> Row:
    """Both, in processes of their own."""
    found: dict[str, Any] = {}
    for what in ("predict", "measure"):
        command = [sys.executable, "-m", "benchmarks.keras_accuracy", "--one", backend, name, what]
        environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
        if what == "measure":
            environment |= MEASURING[backend]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_MOST_SECONDS, check=False
        )
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            return Row(name, backend, trouble=f"{what}: {reason[:200]}")
        found |= json.loads(lines[-1])
    return Row(name, backend, **found)


def _read(path: Path | None) -> dict[tuple[str, str], Row]:
    if path is None or not path.exists():
        return {}
    found = [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(row.backend, row.case): row for row in found}


def bars(rows: Sequence[Row]) -> list[Bar]:
    """The claims, with what was measured."""
    claims = []
    for backend, limit in LIMITS.items():
        known = [row for row in rows if row.backend == backend]
        if not known:
            continue
        measured = [row for row in known if not row.trouble]
        worst = max(measured, key=lambda row: abs(row.error), default=None)
        shown = "nothing" if worst is None else f"{abs(worst.error):.2%} ({worst.case})"
        met = worst is not None and abs(worst.error) <= limit and len(measured) == len(known)
        claims.append(Bar(f"{backend}: greatest error of {len(known)} models", shown, f"at most {limit:.0%}", met))
    by_case: dict[str, list[Row]] = {}
    for row in rows:
        if not row.trouble:
            by_case.setdefault(row.case, []).append(row)
    several = {name: found for name, found in by_case.items() if len(found) > 1}
    if several:
        alike = [
            name
            for name, found in several.items()
            if len({tuple(row.state.get(part, 0) for part in SHARED) for row in found}) == 1
        ]
        claims.append(
            Bar(
                "models whose parameters, gradients and optimizer state agree on all backends",
                f"{len(alike)} of {len(several)}",
                "all",
                len(alike) == len(several),
            )
        )
    return claims


def cells(row: Row) -> tuple[str, ...]:
    """Of the table."""
    if row.trouble:
        return row.case, row.backend, "", "", row.trouble.replace("|", "/"), ""
    spread = f" ({row.least / MIB:,.1f} to {row.greatest / MIB:,.1f})" if row.greatest > row.least else ""
    sizes = (f"{row.measured / MIB:,.1f}{spread}", f"{row.predicted / MIB:,.1f}")
    return row.case, row.backend, *sizes, percent(row.error), f"{row.seconds:.1f}"


def main() -> int:
    """Compares the named cases, or all, and publishes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="default: all")
    parser.add_argument("--backends", nargs="*", default=list(LIMITS), choices=list(LIMITS))
    parser.add_argument("--rows", type=Path, help="file of rows that are known, to which others are added")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(*given.one)
        return 0
    os.environ["KERAS_BACKEND"] = given.backends[0]
    from benchmarks.keras_models import CASES

    names = given.cases or [case.name for case in CASES]
    known = _read(given.rows)
    rows = []
    for backend in given.backends:
        for name in names:
            row = known.get((backend, name)) or row_of(backend, name)
            rows.append(row)
            print(" | ".join(cells(row)), flush=True)
            if given.rows and (backend, name) not in known and not row.trouble:
                with given.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    claims = bars(rows)
    headers = ("model", "backend", "measured, MiB", "predicted, MiB", "error", "estimate, s")
    how = {row.backend: row.how for row in rows if row.how}
    sections = [
        "## How",
        bullets(f"{backend}: {words}." for backend, words in how.items()),
        "## Models",
        table(headers, map(cells, rows)),
    ]
    whole = not given.cases and set(given.backends) == set(LIMITS)
    publish("keras_accuracy", "Keras: predicted against measured memory", claims, sections, save=whole)
    return 0 if all(claim.met for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
