"""Compiled steps: predicted peaks against those of real runs of Inductor on the CPU.

    python -m benchmarks.compiled_steps [--measure] [model ...]

With `--measure` the truth is measured again, into tests/accuracy/compiled_measured.json: each model is trained for two
steps, eager and compiled by `torch.compile`, in a process of its own that compiles its kernels anew. The measured peak
is the greatest sum of live bytes of PyTorch's CPU allocator, as its profiler reports it, plus what existed before:
parameters, buffers and the batch. Compiling, which the first call does, is not part of what is measured. The prediction
is the peak of the timeline of the same step on the simulated CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

import memfit
from benchmarks.compiled_models import MODELS, loss
from benchmarks.measure_cpu import NUM_THREADS, allocations, find_peak, storage_bytes
from benchmarks.reporting import Bar, percent, publish, table

LIMIT = 0.03
RESULTS = Path(__file__).parents[1] / "tests" / "accuracy" / "compiled_measured.json"
_HERE = "--measure-here"


@dataclass(frozen=True, slots=True)
class Row:
    """One model: bytes measured and predicted, eager and compiled, and how long the compiled estimate took."""

    name: str
    measured: tuple[int, int]
    predicted: tuple[int, int]
    seconds: float

    @property
    def errors(self) -> tuple[float, float]:
        """Of the predictions, eager and compiled."""
        eager, compiled = (self.predicted[i] / self.measured[i] - 1 for i in (0, 1))
        return eager, compiled

    @property
    def right_direction(self) -> bool:
        """Whether compilation was predicted to save where it saved, and to cost where it cost."""
        changes = [compiled / eager - 1 for eager, compiled in (self.measured, self.predicted)]
        # Less than a hundredth is neither.
        return changes[0] * changes[1] >= 0 or max(map(abs, changes)) < 0.01


def measure(name: str) -> None:
    """Prints the measured peaks of a model, eager and compiled; call it in a fresh process."""
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(NUM_THREADS)
    peaks = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model, batch = MODELS[name]()
        optimizer = torch.optim.AdamW(model.parameters())
        trained = torch.compile(model) if compiles else model
        loss(trained, batch).backward()
        optimizer.zero_grad()
        before = storage_bytes([*model.parameters(), *model.buffers(), batch])
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            value = None
            for _ in range(2):
                optimizer.zero_grad()
                value = loss(trained, batch)
                value.backward()
                optimizer.step()
        del value
        peaks.append(before + find_peak(allocations(profiled))[0])
    print(json.dumps(peaks))


def measure_apart(name: str) -> tuple[int, int]:
    """The measured peaks of a model, from a process with a cache of its own."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        command = [sys.executable, "-m", "benchmarks.compiled_steps", _HERE, name]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    eager, compiled = json.loads(ended.stdout.strip().splitlines()[-1])
    return eager, compiled


def predict(name: str) -> tuple[tuple[int, int], float]:
    """The predicted peaks of a model, eager and compiled, and the seconds of the second."""
    torch.set_num_threads(NUM_THREADS)
    model, batch = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    eager = memfit.estimate(model, loss, batch, optimizer=optimizer, device="cpu")
    started = time.monotonic()
    compiled = memfit.estimate(torch.compile(model), loss, batch, optimizer=optimizer, device="cpu")
    notes = {note.code for note in compiled.notes}
    if "not-compiled" in notes:
        raise RuntimeError(f"{name} was not compiled: {compiled.notes}")
    return (eager.timeline.peak()[1], compiled.timeline.peak()[1]), time.monotonic() - started


def bars(rows: list[Row]) -> list[Bar]:
    """The claims, with what was measured."""
    worst = max(rows, key=lambda row: abs(row.errors[1]))
    error, mean = abs(worst.errors[1]), fmean(abs(row.errors[1]) for row in rows)
    wrong = [row.name for row in rows if not row.right_direction]
    return [
        Bar(
            f"greatest error of {len(rows)} compiled peaks", f"{error:.2%} ({worst.name})", "at most 3%", error <= LIMIT
        ),
        Bar("mean error of compiled peaks", f"{mean:.2%}", "at most 3%", mean <= LIMIT),
        Bar("compiled against eager, direction", ", ".join(wrong) or "right on all", "right on all", not wrong),
        Bar("models", str(len(rows)), "at least 12", len(rows) >= 12),
    ]


def result_table(rows: list[Row]) -> str:
    """Every model with its figures."""
    cells = []
    for row in rows:
        measured, predicted = (compiled / eager - 1 for eager, compiled in (row.measured, row.predicted))
        sizes = [f"{size / 2**20:.1f}" for size in (*row.measured, *row.predicted)]
        cells.append((row.name, *sizes, *map(percent, (*row.errors, measured, predicted)), f"{row.seconds:.1f}"))
    heads = "eager, measured|compiled, measured|eager|compiled|error, eager|error, compiled|change, measured|change|s"
    return table(("model", *heads.split("|")), cells)


def read_measured() -> dict[str, tuple[int, int]]:
    """The truth: bytes of each model, eager and compiled."""
    return {name: (eager, compiled) for name, (eager, compiled) in json.loads(RESULTS.read_text()).items()}


def measure_all(names: list[str]) -> None:
    """Measures the named models and writes the truth."""
    known = read_measured() if RESULTS.exists() else {}
    for number, name in enumerate(names, 1):
        known[name] = measure_apart(name)
        ordered = {model: known[model] for model in MODELS if model in known}
        RESULTS.write_text(
            "{\n" + ",\n".join(f'"{model}": {json.dumps(row)}' for model, row in ordered.items()) + "\n}\n"
        )
        print(f"[{number}/{len(names)}] {name}: {known[name]}", flush=True)


def main() -> None:
    """Predict the named models, or all, and show the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model", choices=[[], *MODELS], help="default: all")
    parser.add_argument("--measure", action="store_true", help="measure again")
    parser.add_argument(_HERE, choices=MODELS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure_here:
        measure(given.measure_here)
        return
    if given.measure:
        measure_all(given.models or list(MODELS))
    rows = []
    measured = read_measured()
    for name in given.models or measured:
        row = Row(name, measured[name], *predict(name))
        rows.append(row)
        print(f"{name:16}{row.measured} {row.predicted} {percent(row.errors[1])} {row.seconds:.1f} s", flush=True)
    notes = [
        f"Peaks in MiB of two training steps with AdamW on the CPU, {NUM_THREADS} threads, torch {torch.__version__}; "
        "seconds of the compiled estimate, on a shared machine.",
        result_table(rows),
    ]
    publish("compiled_steps", "Compiled steps", bars(rows), notes, save=not given.models)


if __name__ == "__main__":
    main()
