"""Keras scripts in a container that kills them, by themselves and under `memfit run`.

    python -m benchmarks.keras_survival [resnet50] [transformer] [--backends tensorflow jax] [--keep FILE]

Each script calls `model.fit` and knows nothing of memfit. It runs in a control group (version 1) with a limit of
memory: first as `python train.py`, which the kernel has to kill for the case to count, then as `memfit run train.py`.
With `--keep`, what a case showed is written to a file as soon as it is through, and a later call with the same file
runs only what is missing there: a case takes minutes. Each row says from which commit it comes.
"""

import argparse
import json
import os
import re
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.reporting import ROOT, Bar, commit, publish, table
from benchmarks.stream_cases import Finished, run_limited
from memfit.core.supervised import SupervisedRun
from memfit.core.units import GIB, format_size

SCRIPT = str(ROOT / "benchmarks" / "scripts" / "keras_fit.py")
STEPS = 2
METHOD = f"""\
`benchmarks/scripts/keras_fit.py` trains for {STEPS} steps on random data, on the host, in a control group of version 1
whose limit is given. "Alone" is `python`, "under memfit run" the same command without any change to the script and
without further options. The time is that of everything, importing, planning and compiling included. "How" is what
memfit said: recomputation and micro-batches leave the update as it is up to rounding, unless it says "Approximate".
The limits were chosen by trying: ResNet-50 on JAX has 5.5 GiB because it did not get through the 4.5 GiB that
TensorFlow has, where a step with all that can be recomputed still failed to get 2.94 GiB.
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its batch and the container.

    Args:
        name: of the model.
        batch: samples.
        limits: bytes that the container may hold, by backend.
    """

    name: str
    batch: int
    limits: dict[str, int]


CASES = {
    "resnet50": Case("resnet50", 64, {"tensorflow": int(4.5 * GIB), "jax": int(5.5 * GIB)}),
    "transformer": Case("transformer", 32, {"tensorflow": int(2.5 * GIB), "jax": int(2.5 * GIB)}),
}


@dataclass(frozen=True, slots=True)
class Row:
    """What one case showed.

    Args:
        title: model, batch, backend and limit.
        command: what ran under memfit, as in a shell.
        alone: how the plain script ended, in words.
        alone_killed: whether the kernel killed it.
        code: exit code of `memfit run`.
        attempts: how often it started the script; None where it didn't tell.
        how: what memfit said.
        peak: what the script held at most.
        seconds: that `memfit run` took.
        loss: that the script printed.
        commit: of the sources.
    """

    title: str
    command: str
    alone: str
    alone_killed: bool
    code: int
    attempts: int | None
    how: str
    peak: str
    seconds: float
    loss: str
    commit: str


def run_case(case: Case, backend: str) -> Row:
    """Alone, and under `memfit run`."""
    words = [SCRIPT, case.name, str(case.batch), str(STEPS)]
    with tempfile.TemporaryDirectory(prefix="memfit-benchmark-") as cache:
        environment = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "MEMFIT_CACHE": cache}
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        options = {"limit_bytes": case.limits[backend], "environment": environment, "timeout_seconds": 5400}
        alone = run_limited([sys.executable, *words], **options)
        guarded = run_limited([sys.executable, "-m", "memfit", "run", "--json", *words], **options)
    run = None if guarded.answer is None else SupervisedRun.from_json(guarded.answer)
    if guarded.code != 0:
        print(guarded.errors[-4000:], file=sys.stderr)
    return Row(
        title=f"{case.name}, batch {case.batch}, {backend}, {format_size(case.limits[backend])}",
        command=f"KERAS_BACKEND={backend} memfit run keras_fit.py {case.name} {case.batch} {STEPS}",
        alone=_ended(alone),
        alone_killed=alone.code == -signal.SIGKILL,
        code=guarded.code,
        attempts=None if run is None else len(run.attempts),
        how=how(guarded.errors),
        peak="unknown" if run is None or run.peak is None else format_size(run.peak.held_bytes),
        seconds=guarded.seconds,
        loss=loss(guarded.errors),
        commit=commit(),
    )


def _ended(done: Finished) -> str:
    if done.code == -signal.SIGKILL:
        return f"killed by the kernel after {done.seconds:.0f} s"
    return f"ended with code {done.code}"


def how(said: str) -> str:
    """What memfit said of the way it went on last."""
    found = re.findall(r"^(?:memory ran out; going on with|planned for [^w]*with) (.*)$", said, re.MULTILINE)
    return found[-1] if found else "as it is"


def loss(said: str) -> str:
    """The loss that the script printed last."""
    found = re.findall(r'^\{"loss".*\}$', said, re.MULTILINE)
    return f"{json.loads(found[-1])['loss']:.4f}" if found else "none"


def kept(path: Path | None) -> dict[str, Row]:
    """What earlier calls have shown, by title."""
    if path is None or not path.exists():
        return {}
    return {row["title"]: Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))}


def main() -> int:
    """Runs all cases and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help="default: all")
    parser.add_argument("--backends", nargs="+", default=["tensorflow", "jax"])
    parser.add_argument("--keep", type=Path, metavar="FILE", help="where what a case showed is kept for later calls")
    given = parser.parse_args()
    known, rows = kept(given.keep), []
    for name in given.cases or CASES:
        for backend in given.backends:
            case = CASES[name]
            title = f"{name}, batch {case.batch}, {backend}, {format_size(case.limits[backend])}"
            known[title] = known.get(title) or run_case(case, backend)
            rows.append(known[title])
            print(rows[-1], file=sys.stderr, flush=True)
            if given.keep:
                given.keep.write_text(json.dumps([asdict(row) for row in known.values()], indent=1), encoding="utf-8")
    complete = not given.cases and {"tensorflow", "jax"} <= set(given.backends)
    publish("keras_survival", "Keras scripts in a container that kills them", *page(rows), save=complete)
    return 0


def page(rows: list[Row]) -> tuple[list[Bar], list[str]]:
    """The bars and the sections."""
    bars, cells = [], []
    for row in rows:
        under = "finished" if row.code == 0 else f"exit code {row.code}"
        measured = f"alone: {row.alone}; under memfit run: {under}"
        bars.append(Bar(row.title, measured, "killed alone, finishes", row.alone_killed and row.code == 0))
        attempts = "unknown" if row.attempts is None else row.attempts
        cells.append((row.title, row.alone, attempts, row.how, row.peak, f"{row.seconds:.0f} s", row.loss, row.commit))
    headers = ["case", "alone", "attempts", "how", "peak", "time", "loss", "commit"]
    commands = "\n".join(row.command for row in rows)
    return bars, ["## How", METHOD, f"```console\n{commands}\n```", "## Runs", table(headers, cells)]


if __name__ == "__main__":
    sys.exit(main())
