"""Micro-batched `fit` of Keras against plain `fit`.

    python -m benchmarks.keras_equality [tensorflow | jax | torch ...]

Models and data are float64. Adam has a cosine schedule with warm-up, moving averages of weights, weight decay, and one
way of clipping for each seed. 26 samples in batches of 10 leave a last batch of 6; parts of at most 4 samples leave
4 + 4 + 2 and 4 + 2. After three epochs, every variable of the model and of its optimizer is compared, and every number
that `fit` reported. Then the fitted model is undone and both train on: a model that was fitted and undone from the
start must equal one that was never touched, bit by bit.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.reporting import ROOT, Bar, publish, table

BACKENDS = ("tensorflow", "jax", "torch")
LIMIT = 1e-10
SEEDS = (0, 1, 2)
METHOD = """\
The error of a variable is its greatest difference over its greatest value; the worst variable of the model and the
optimizer counts: weights, their moving averages, Adam's momentum and velocity. The error of a log is relative to it.
Keras computes some operations of float64 tensors in float32 unless it runs on TensorFlow; that is switched off here."""


@dataclass(frozen=True, slots=True)
class Row:
    """A micro-batched fit beside the plain one.

    Args:
        backend: what Keras runs on.
        case: the model.
        seed: of weights and data; it also chooses the way of clipping.
        split: how the batches were split.
        error: of the worst variable.
        logs: error of the worst number that `fit` reported.
        undone: whether a model that was fitted and undone trains as one that never was, bit by bit; None: not tried.
        same_logs: whether `fit` reported numbers of the same names.
    """

    backend: str
    case: str
    seed: int
    split: str
    error: float
    logs: float
    undone: bool | None
    same_logs: bool


def prepare() -> None:
    """Makes Keras compute in float64, whatever it runs on; before any model is made."""
    import keras
    from keras.src.backend.common import dtypes

    keras.backend.set_floatx("float64")
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)


def compare(case: str, seed: int, split: dict[str, int], undo: bool = True, **compiled: Any) -> Row:
    """Fits a plain and a split model; call it in a process of the backend, after `prepare`."""
    import keras

    from memfit.core.settings import Settings

    settings = Settings(**split)
    plain, plain_logs = _fitted(case, seed, None, **compiled)
    found, logs = _fitted(case, seed, settings, **compiled)
    error = max(_error(one, other) for one, other in zip(found, plain, strict=True))
    pairs = [pair for key in plain_logs for pair in zip(logs[key], plain_logs[key], strict=True)]
    worst = max(abs(a - b) / max(abs(b), 1e-300) for a, b in pairs)
    undone = None
    if undo:
        again, _ = _fitted(case, seed, settings, undone=True, **compiled)
        undone = all((one == other).all() for one, other in zip(again, plain, strict=True))
    text = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in split.items())
    return Row(keras.backend.backend(), case, seed, text, error, worst, undone, logs.keys() == plain_logs.keys())


def _fitted(case: str, seed: int, settings: Any, undone: bool = False, **compiled: Any) -> tuple[list[Any], Any]:
    from benchmarks.keras_equality_cases import BATCH_SIZE, NUM_EPOCHS, made, states
    from memfit.frameworks.keras.apply.fitted import FittedModel

    made_case = made(case, seed, **compiled)
    if settings is not None:
        fitted = FittedModel(settings, made_case.model)
        if undone:
            fitted.undo()
    history = made_case.model.fit(
        made_case.x, made_case.y, batch_size=BATCH_SIZE, epochs=NUM_EPOCHS, shuffle=False, verbose=0, **made_case.fitted
    )
    return [value for _, value in states(made_case.model)], history.history


def _error(found: Any, expected: Any) -> float:
    if not expected.size:
        return 0.0
    difference, scale = float(abs(found - expected).max()), float(abs(expected).max())
    return difference / scale if scale else float(difference > 0)


def sweep(cases: Sequence[str], seeds: Sequence[int]) -> Iterator[Row]:
    """Rows of the backend of this process."""
    prepare()
    for case in cases:
        for seed in seeds:
            split = {"micro_batches": 3} if seed % 2 else {"micro_batch_size": 4}
            yield compare(case, seed, split, undo=seed == seeds[0])


def run(backend: str) -> list[Row]:
    """All rows of a backend, in a process of its own."""
    environment = os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.keras_equality", "--rows", backend]
    done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return [Row(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


def _cells(row: Row) -> tuple[str, ...]:
    undone = {True: "equal", False: "differs", None: ""}[row.undone]
    return (row.backend, row.case, str(row.seed), row.split, f"{row.error:.1e}", f"{row.logs:.1e}", undone)


def bars(rows: Sequence[Row]) -> list[Bar]:
    """The claims, with what was measured."""
    worst, logs = max(rows, key=lambda row: row.error), max(rows, key=lambda row: row.logs)
    undone = [row for row in rows if row.undone is not None]
    changed = [row for row in undone if not row.undone]
    others = [row for row in rows if not row.same_logs]
    number = f"{len(rows)} fits of {len({row.case for row in rows})} models"
    return [
        Bar(
            f"greatest relative error of a variable after {number}",
            f"{worst.error:.1e} ({worst.case}, {worst.backend})",
            f"at most {LIMIT:.0e}",
            worst.error <= LIMIT,
        ),
        Bar(
            "greatest relative error of a number that fit reports",
            f"{logs.logs:.1e} ({logs.case}, {logs.backend})",
            f"at most {LIMIT:.0e}",
            logs.logs <= LIMIT,
        ),
        Bar("fits that report other numbers than the plain one", str(len(others)), "none", not others),
        Bar(
            f"of {len(undone)} models that were fitted and undone, train differently",
            str(len(changed)),
            "none",
            not changed,
        ),
    ]


def main() -> None:
    """Compare on the named backends, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="*", metavar="backend", choices=[[], *BACKENDS], help="default: all")
    parser.add_argument("--rows", action="store_true", help="print the rows of the backend of this process")
    arguments = parser.parse_args()
    if arguments.rows:
        from benchmarks.keras_equality_cases import CASES

        for row in sweep(list(CASES), SEEDS):
            print(json.dumps(asdict(row)), flush=True)
            print(" | ".join(_cells(row)), file=sys.stderr, flush=True)
        return
    rows = [row for backend in arguments.backends or BACKENDS for row in run(backend)]
    headers = ("backend", "model", "seed", "split", "variables", "logs", "undone")
    sections = [METHOD, table(headers, map(_cells, rows))]
    publish("keras_equality", "Micro-batched fit of Keras", bars(rows), sections, save=not arguments.backends)


if __name__ == "__main__":
    main()
