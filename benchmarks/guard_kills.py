"""A guarded run that is killed again and again, against one that never was.

    python -m benchmarks.guard_kills [--kills 120]

Each run trains a transformer with AdamW, a schedule, dropout and a shuffled loader under `memfit.Guard`, with a
checkpoint every other update, in a process of its own that is ended by SIGKILL after a random time, and started again
until it is through. Many of these moments fall into the writing of a checkpoint. Compared are the final weights, and
how many updates were made twice.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import memfit
from benchmarks.guard_cases import BATCH, Case, largest_difference, make
from benchmarks.reporting import Bar, publish, table

EPOCHS = 3
BATCHES = 10
EVERY = 2
METHOD = f"""\
{EPOCHS} epochs of {BATCHES} batches, shuffled; a checkpoint after every {EVERY} updates; the data is hashed and forced
to disk in a thread. The process is killed after a time that is drawn between 0 and the time of a whole run, and started
again until it ends by itself. "Made twice" counts updates that a killed process had made and the next one made again.
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run with all its kills."""

    kills: int
    while_writing: int
    made_twice: int
    difference: float


def train(folder: Path, case: Case) -> None:
    """The run; writes its weights when it is through, and a line for each update."""
    torch.set_num_threads(1)
    made = make(case, BATCHES)
    torch.manual_seed(case.seed + 1)
    samples = list(zip(*(torch.cat(tensors) for tensors in zip(*made.batches, strict=True)), strict=True))
    loader: Any = torch.utils.data.DataLoader(samples, BATCH, shuffle=True)  # type: ignore[arg-type]
    with memfit.Guard(
        made.model,
        made.optimizer,
        scheduler=made.scheduler,
        checkpoint=folder / "checkpoints",
        plan=None,
        options=memfit.GuardOptions(scaler=made.scaler, checkpoint_every=EVERY, remember=False),
    ) as guard:
        for _ in range(EPOCHS):
            for batch in guard.batches(loader):
                guard.step(made.loss, batch)
                with (folder / "updates").open("a", encoding="utf-8") as file:
                    file.write(f"{guard.num_updates}\n")
    torch.save(made.model.state_dict(), folder / "weights.tmp")
    os.replace(folder / "weights.tmp", folder / "weights")


def in_process(work: Callable[[], None]) -> Any:
    """Starts the work in a forked process."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def killed_run(folder: Path, case: Case, seed: int, seconds: float, most_kills: int) -> Outcome:
    """Runs to the end, killed at random moments on the way."""
    draw = random.Random(seed)
    kills = while_writing = 0
    while not (folder / "weights").exists():
        process = in_process(lambda: train(folder, case))
        if kills < most_kills:
            process.join(draw.uniform(0, seconds))
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join()
                kills += 1
                while_writing += any((folder / "checkpoints").glob(".step-*"))
                continue
        process.join()
        if process.exitcode:
            raise RuntimeError("the run failed; its traceback is above")
    updates = [int(line) for line in (folder / "updates").read_text(encoding="utf-8").split()]
    expected = make(case, BATCHES).model
    expected.load_state_dict(torch.load(folder.parent / f"expected-{case.optimizer}", weights_only=True))
    found = make(case, BATCHES).model
    found.load_state_dict(torch.load(folder / "weights", weights_only=True))
    return Outcome(kills, while_writing, len(updates) - len(set(updates)), largest_difference(found, expected))


def sweep(kills: int, folder: Path, each: int = 6) -> list[Outcome]:
    """Runs until there have been so many kills."""
    outcomes: list[Outcome] = []
    seconds = {}
    for optimizer in ("adamw", "sgd"):
        case = Case("transformer", optimizer, scaled=optimizer == "sgd")
        whole = folder / f"whole-{optimizer}"
        whole.mkdir()
        started = time.perf_counter()
        process = in_process(lambda whole=whole, case=case: train(whole, case))  # type: ignore[misc]
        process.join()
        seconds[optimizer] = time.perf_counter() - started
        os.replace(whole / "weights", folder / f"expected-{optimizer}")
    while sum(outcome.kills for outcome in outcomes) < kills:
        number = len(outcomes)
        optimizer = ("adamw", "sgd")[number % 2]
        run = folder / f"run-{number}"
        run.mkdir()
        case = Case("transformer", optimizer, scaled=optimizer == "sgd")
        outcomes.append(killed_run(run, case, number, seconds[optimizer], each))
    return outcomes


def main() -> int:
    """Runs the sweep and writes its page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=120, help="how many in all; default 120")
    wanted: int = parser.parse_args().kills
    with tempfile.TemporaryDirectory() as folder:
        outcomes = sweep(wanted, Path(folder))
    kills = sum(outcome.kills for outcome in outcomes)
    worst = max(outcome.difference for outcome in outcomes)
    twice = max(outcome.made_twice / max(1, outcome.kills) for outcome in outcomes)
    bars = [
        Bar(f"weights after {kills} kills in {len(outcomes)} runs", f"difference {worst:g}", "bit-equal", worst == 0),
        Bar(
            "updates made twice, on average of a run, for each kill",
            f"{twice:.1f}",
            f"at most {2 * EVERY}",
            twice <= 2 * EVERY,
        ),
    ]
    rows = [
        [str(n), str(o.kills), str(o.while_writing), str(o.made_twice), f"{o.difference:g}"]
        for n, o in enumerate(outcomes)
    ]
    head = ["run", "kills", "with a checkpoint half-written", "updates made twice", "difference of the weights"]
    publish("guard_kills", "Killed and resumed", bars, [METHOD, table(head, rows)], save=wanted >= 100)
    print(json.dumps({"kills": kills, "worst": worst}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
