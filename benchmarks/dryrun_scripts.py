"""Unmodified scripts of many styles, dry-run, beside an estimate of the same training step.

    python -m benchmarks.dryrun_scripts [NAME ...]

The scripts are those of tests/integration/scripts; `jobs.py` there has each one's step as a job. The peak of the dry
run, which saw nothing but the script, is compared with that of `memfit.estimate`, which saw nothing but the job. Every
script is then run twice more on a device with a quarter of that peak, to see whether it stops at the same operation.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import memfit
from benchmarks.reporting import ROOT, Bar, percent, publish, table
from memfit.core.units import MIB, format_size
from tests.integration.scripts.jobs import PAIRS, Pair

DEVICE = "a100-40gb"
TOLERANCE = 0.01
METHOD = """\
Allocated peaks of three steps on a simulated A100 40GB; seconds are those of the whole command, beside whatever else
the machine did. The last column is the operation at which the script stops on a device with a quarter of that peak, the
same in two runs."""


def dry_run(pair: Pair, device: str) -> tuple[dict[str, Any], float]:
    """(the answer of the command, its seconds)."""
    options = ["--device", device, "--steps", "3", "--count", str(pair.count), "--json"]
    script = ROOT / "tests" / "integration" / "scripts" / pair.script
    command = [sys.executable, "-m", "memfit", "dryrun", *options, str(script), *pair.arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"{pair.script} left no answer:\n{done.stderr}")
    return json.loads(done.stdout), time.perf_counter() - started


def estimated(names: list[str]) -> dict[str, int]:
    """Allocated peaks of the jobs, in a process that may load every framework."""
    script = ROOT / "tests" / "integration" / "scripts" / "jobs.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, str(script), *names], env=environment, capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return {line["name"]: line["allocated_peak_bytes"] for line in lines}


def stop(pair: Pair, device: str) -> tuple[str, int] | None:
    """(operator and line, tick) at which the script ran out, or None."""
    answer, _ = dry_run(pair, device)
    failures = answer["failures"]
    return (f"{failures[-1]['op']}, {failures[-1]['source']}", failures[-1]["tick"]) if failures else None


def main() -> None:
    """Runs every script and publishes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="some of the pairs in jobs.py; all by default")
    names = parser.parse_args().names or list(PAIRS)
    expected = estimated(names)
    lines, errors, num_complete, num_same = [], [], 0, 0
    for name in names:
        pair = PAIRS[name]
        answer, seconds = dry_run(pair, DEVICE)
        peak = answer["estimate"]["allocated_peak_bytes"]
        error = peak / expected[name] - 1
        errors.append(abs(error))
        num_complete += answer["outcome"] == "completed"
        # A device given by its size has a context of its own.
        context = memfit.find_device("1GiB").context_bytes or 0
        small = f"{(context + peak // 4) // MIB}MiB"
        first, second = stop(pair, small), stop(pair, small)
        num_same += first == second and first is not None
        stops = "differs" if first != second else "fits" if first is None else first[0]
        print(f"{name}: {answer['outcome']}, {percent(error)}, {stops}", flush=True)
        lines.append(
            [
                f"{pair.script} ({name})",
                answer["num_steps"],
                format_size(peak),
                format_size(expected[name]),
                percent(error),
                f"{seconds:.1f} s",
                stops,
            ]
        )
    bars = [
        Bar(
            "scripts that run to the end of --steps",
            f"{num_complete} of {len(names)}",
            "all, 12 or more",
            num_complete == len(names) >= 12,
        ),
        Bar("worst difference from the estimate", f"{max(errors):.2%}", "within 1%", max(errors) <= TOLERANCE),
        Bar("same operation on a device too small", f"{num_same} of {len(names)}", "all", num_same == len(names)),
    ]
    headers = ["script", "steps", "dry run", "estimate", "difference", "time", "stops at"]
    sections = [METHOD, table(headers, lines)]
    publish("dryrun_scripts", "Dry runs of unmodified scripts", bars, sections, save=names == list(PAIRS))


if __name__ == "__main__":
    main()
