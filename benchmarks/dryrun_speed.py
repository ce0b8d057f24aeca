"""How long a dry run takes and how much memory, beside one real step of the same script on the CPU.

    python -m benchmarks.dryrun_speed [--repeats N] [--quick]

Everything is counted, from the start of the command to its end: imports, building the model, three steps, the report.
The real run is the same script, unmodified, on the CPU of this machine, for one step at batch 64.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.reporting import ROOT, Bar, publish, table
from memfit.core.units import GIB, format_size

SCRIPT = str(ROOT / "benchmarks" / "scripts" / "plain_loop.py")
DEVICE = "h100-80gb"
REAL_BATCH_SIZE = 64
LIMIT_SECONDS = 15.0
LIMIT_BYTES = 2 * GIB
# The script for real. PyPI's torchvision, which transformers wants for images, doesn't match every build of PyTorch.
REAL = (
    "import runpy, sys; from memfit.api.jobs import mend_torchvision; mend_torchvision(); "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
METHOD = """\
Wall time of whole commands, medians of {repeats}, and the greatest resident memory of any of their processes. A dry run
that doesn't fit is two runs of the script: the second, on a device without a limit, says what would be needed."""
# Model, batch size of the dry run.
CASES = (
    ("resnet50", 256),
    ("resnet50", 4096),
    ("vit_small", 256),
    ("gpt2", 64),
)


@dataclass(frozen=True, slots=True)
class Run:
    """What a command took."""

    seconds: float
    peak_rss_bytes: int
    output: str


def run(command: list[str]) -> Run:
    """Runs a command to its end, with the greatest resident memory of it and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    started = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    if done.returncode not in (0, 3):
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    # The greatest of all children so far: a smaller one can't be told apart, so it counts as that.
    return Run(seconds, max(before, peak) * 1024, done.stdout)


def dry_run(model: str, batch_size: int) -> Run:
    """Three dry steps, in a process of its own so that its memory is its own."""
    code = (
        "import json, sys; from benchmarks.dryrun_speed import run; "
        "done = run(sys.argv[1:]); print(json.dumps([done.seconds, done.peak_rss_bytes, done.output]))"
    )
    memfit = [sys.executable, "-m", "memfit", "dryrun", "--device", DEVICE, "--steps", "3", "--json"]
    command = [sys.executable, "-c", code, *memfit, SCRIPT, model, str(batch_size)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, peak_rss_bytes, output = json.loads(done.stdout.splitlines()[-1])
    return Run(seconds, peak_rss_bytes, output)


def main() -> None:
    """Times every case and publishes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="dry runs of each case; the median counts")
    parser.add_argument("--quick", action="store_true", help="the first case only")
    options = parser.parse_args()
    cases = CASES[:1] if options.quick else CASES
    lines, bars = [], []
    real: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(Path(folder))
        for model, batch_size in cases:
            if model not in real:
                real[model] = run([sys.executable, "-c", REAL, SCRIPT, model, str(REAL_BATCH_SIZE), "1"]).seconds
            runs = [dry_run(model, batch_size) for _ in range(options.repeats)]
            seconds = median(r.seconds for r in runs)
            rss = max(r.peak_rss_bytes for r in runs)
            result = json.loads(runs[0].output)
            verdict = {True: "fits", False: "does not fit"}[result["fits"]]
            lines.append(
                [
                    f"{model}, batch {batch_size}",
                    f"{seconds:.1f} s",
                    format_size(rss),
                    f"{real[model]:.1f} s",
                    f"{seconds / real[model]:.2f}",
                    f"{format_size(result['estimate']['peak_bytes'])}, {verdict}",
                ]
            )
            if (model, batch_size) == CASES[0]:
                claim = "3 steps of ResNet-50 at batch 256, in all"
                bars.append(Bar(claim, f"{seconds:.1f} s", "within 15 s", seconds <= LIMIT_SECONDS))
            case = f"{model}, batch {batch_size}"
            bars.append(Bar(f"{case}: resident memory", format_size(rss), "under 2 GiB", rss < LIMIT_BYTES))
            ratio = seconds / real[model]
            claim = f"{case}: dry run / one real step on the CPU at batch {REAL_BATCH_SIZE}"
            bars.append(Bar(claim, f"{ratio:.2f}", "at most 1.0", ratio <= 1))
    headers = ["script", "dry run, 3 steps", "resident memory", "real CPU step, batch 64", "ratio", f"on {DEVICE}"]
    publish(
        "dryrun_speed",
        "Time and memory of a dry run",
        bars,
        [METHOD.format(repeats=options.repeats), table(headers, lines)],
        save=not options.quick,
    )


if __name__ == "__main__":
    main()
