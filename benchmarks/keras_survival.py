"""Keras scripts in a container that kills them, by themselves and under `memfit run`.

    python -m benchmarks.keras_survival [resnet50] [transformer] [--backends tensorflow jax]

Each script calls `model.fit` and knows nothing of memfit. It runs in a control group (version 1) with a limit of
memory: first as `python train.py`, which the kernel has to kill for the case to count, then as `memfit run train.py`.
"""

import argparse
import json
import re
import sys
import tempfile
from dataclasses import dataclass

from benchmarks.reporting import ROOT, Bar, publish, table
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
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its batch and the container.

    Args:
        name: of the model.
        batch: samples.
        limit_bytes: of the container.
    """

    name: str
    batch: int
    limit_bytes: int


CASES = {
    "resnet50": Case("resnet50", 64, int(4.5 * GIB)),
    "transformer": Case("transformer", 32, int(2.5 * GIB)),
}


def run_case(case: Case, backend: str) -> tuple[Finished, Finished, SupervisedRun | None]:
    """Alone, and under `memfit run`."""
    words = [SCRIPT, case.name, str(case.batch), str(STEPS)]
    with tempfile.TemporaryDirectory(prefix="memfit-benchmark-") as cache:
        environment = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "MEMFIT_CACHE": cache}
        options = {"limit_bytes": case.limit_bytes, "environment": environment, "timeout_seconds": 5400}
        alone = run_limited([sys.executable, *words], **options)
        guarded = run_limited([sys.executable, "-m", "memfit", "run", "--json", *words], **options)
    run = None if guarded.answer is None else SupervisedRun.from_json(guarded.answer)
    return alone, guarded, run


def how(said: str) -> str:
    """What memfit said of the way it went on last."""
    found = re.findall(r"^(?:memory ran out; going on with|planned for [^w]*with) (.*)$", said, re.MULTILINE)
    return found[-1] if found else "as it is"


def loss(said: str) -> str:
    """The loss that the script printed last."""
    found = re.findall(r'^\{"loss".*\}$', said, re.MULTILINE)
    return f"{json.loads(found[-1])['loss']:.4f}" if found else "none"


def main() -> int:
    """Runs all cases and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help="default: all")
    parser.add_argument("--backends", nargs="+", default=["tensorflow", "jax"])
    given = parser.parse_args()
    bars, rows = [], []
    for name in given.cases or CASES:
        case = CASES[name]
        for backend in given.backends:
            alone, guarded, run = run_case(case, backend)
            title = f"{name}, batch {case.batch}, {backend}, {format_size(case.limit_bytes)}"
            survived = guarded.code == 0
            ended = "killed" if alone.code == -9 else f"exit code {alone.code}"
            measured = f"alone: {ended}; under memfit run: {'finished' if survived else f'exit code {guarded.code}'}"
            bars.append(Bar(title, measured, "killed alone, finishes", alone.code == -9 and survived))
            attempts = "" if run is None else len(run.attempts)
            peak = "" if run is None or run.peak is None else format_size(run.peak.held_bytes)
            rows.append(
                (title, ended, attempts, how(guarded.errors), peak, f"{guarded.seconds:.0f} s", loss(guarded.errors))
            )
            print(rows[-1], guarded.errors[-2000:] if not survived else "", file=sys.stderr, flush=True)
    headers = ["case", "alone", "attempts", "how", "peak", "time", "loss"]
    sections = ["## How", METHOD, "## Runs", table(headers, rows)]
    complete = not given.cases and {"tensorflow", "jax"} <= set(given.backends)
    publish("keras_survival", "Keras scripts in a container that kills them", bars, sections, save=complete)
    return 0


if __name__ == "__main__":
    sys.exit(main())
