"""`memfit data convert` of a large float64 file to float32: its memory, its speed against `cat`, and kills on the way.

    python -m benchmarks.convert_speed [--size 2GiB] [--repeats 3] [--kills 24] [--kill-size 512MiB] [--folder FOLDER]

Copying by `cat` reads and writes as many bytes as any conversion has to, and looks at none of them. Runs of both take
turns, with a cold page cache, in control groups of 300 MB. A conversion that is killed by SIGKILL at random moments and
started again until it is through has to give the same bytes as one that never was.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.reporting import ROOT, Bar, bullets, publish, table
from benchmarks.stream_cases import (
    Finished,
    forget,
    how_cold,
    python_command,
    run_limited,
    scratch,
    table_of,
    write_npy,
)
from memfit.core.units import GIB, KIB, MIB, format_size, parse_size

GROUP_BYTES = 300 * 10**6
PEAK_BYTES = 200 * MIB
SHARE_OF_CAT = 0.6
EACH = 4


@dataclass(slots=True)
class Speeds:
    """Seconds of each run, and the greatest memory over the baseline."""

    convert: list[float] = field(default_factory=list)
    cat: list[float] = field(default_factory=list)
    forced: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    charged_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Kills:
    """How conversions that were killed ended."""

    num_kills: int
    num_runs: int
    num_resumed: int
    num_equal: int


def convert_here(source: str, destination: str) -> int:
    """The conversion, in this process; prints its seconds and its greatest memory over the baseline."""
    from memfit.data.convert import convert_data

    def memory(name: str) -> int:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        found = re.search(rf"{name}:\s+(\d+) kB", status)
        return int(found[1]) * KIB if found else 0

    baseline = memory("VmRSS")
    started = time.perf_counter()
    done = convert_data(source, destination, dtype="float32")
    seconds = time.perf_counter() - started
    answer = {"seconds": seconds, "peak_bytes": memory("VmHWM") - baseline, "resumed_at": done.resumed_at}
    print(json.dumps(answer), flush=True)
    return 0


def run(command: list[str], source: Path, target: Path, drop_caches: bool) -> Finished:
    """One run, cold, with nothing at its target."""
    target.unlink(missing_ok=True)
    forget([source], drop_caches=drop_caches)
    done = run_limited(command, limit_bytes=GROUP_BYTES, environment={"PYTHONPATH": str(ROOT)})
    if done.code:
        raise RuntimeError(f"{command[-1]}: {done.reason}\n{done.errors}")
    # What is left to write must not burden the next run.
    os.sync()
    return done


def compare(source: Path, folder: Path, repeats: int, drop_caches: bool) -> Speeds:
    """Conversion, `cat`, and `cat` that waits until its copy is on disk, in turns."""
    speeds = Speeds()
    target = folder / "target.npy"
    own = python_command("benchmarks.convert_speed", "--convert", source, target)
    # Started by Python as well, and timed inside, so that only the copying is compared.
    script = "import subprocess,time,json,sys;t=time.perf_counter();subprocess.run(sys.argv[1],shell=True,check=True);"
    script += "print(json.dumps({'seconds':time.perf_counter()-t}))"

    def copy(line: str) -> list[str]:
        return [sys.executable, "-c", script, line]

    plain = f"cat '{source}' > '{target}'"
    for _ in range(repeats):
        done = run(own, source, target, drop_caches)
        speeds.convert.append(done.answer["seconds"])
        speeds.peak_bytes = max(speeds.peak_bytes, done.answer["peak_bytes"])
        speeds.charged_bytes = max(speeds.charged_bytes, done.most_bytes or 0)
        speeds.cat.append(run(copy(plain), source, target, drop_caches).answer["seconds"])
        speeds.forced.append(run(copy(f"{plain} && sync '{target}'"), source, target, drop_caches).answer["seconds"])
        print(
            f"-- convert {speeds.convert[-1]:.1f} s, cat {speeds.cat[-1]:.1f} s, "
            f"cat and sync {speeds.forced[-1]:.1f} s",
            flush=True,
        )
    target.unlink(missing_ok=True)
    return speeds


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def kill(source: Path, folder: Path, wanted: int) -> Kills:
    """Conversions that are killed up to four times each, until there have been so many kills."""
    target = folder / "killed.npy"
    command = python_command("benchmarks.convert_speed", "--convert", source, target)
    started = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    seconds = time.monotonic() - started
    expected = digest(target)
    draw = random.Random(0)
    kills = runs = resumed = equal = 0
    while kills < wanted:
        for left in folder.glob("*killed.npy*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        own_kills, output = 0, ""
        # Killed after its last step, a conversion has nothing left to do.
        while not target.exists():
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            try:
                output, _ = process.communicate(timeout=draw.uniform(0.1, seconds) if own_kills < EACH else None)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.communicate()
                own_kills += 1
                continue
            if process.returncode:
                raise RuntimeError("the conversion failed; its traceback is above")
        kills, runs = kills + own_kills, runs + 1
        resumed += bool(output) and json.loads(output.splitlines()[-1])["resumed_at"] > 0
        equal += digest(target) == expected
        print(f"-- {kills} kills, {runs} conversions, {resumed} resumed, {equal} equal", flush=True)
    return Kills(kills, runs, resumed, equal)


def bars_of(speeds: Speeds, kills: Kills) -> list[Bar]:
    """The limits."""
    ratio = statistics.median(cat / own for cat, own in zip(speeds.cat, speeds.convert, strict=True))
    return [
        Bar(
            "greatest memory over what the process had before",
            format_size(speeds.peak_bytes),
            f"less than {format_size(PEAK_BYTES)}",
            speeds.peak_bytes < PEAK_BYTES,
        ),
        Bar(f"finishes in a control group of {GROUP_BYTES // 10**6} MB", "yes", "yes", met=True),
        Bar("speed, of that of `cat SRC > DST`", f"{ratio:.0%}", f"at least {SHARE_OF_CAT:.0%}", ratio >= SHARE_OF_CAT),
        Bar(
            f"conversions with {kills.num_kills} kills that gave the same bytes",
            f"{kills.num_equal} of {kills.num_runs}",
            "all",
            kills.num_equal == kills.num_runs,
        ),
    ]


def main() -> int:
    """Measures and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--convert", nargs=2, metavar=("SOURCE", "DESTINATION"), help="only convert, in this process")
    parser.add_argument("--size", default="2GiB", help="of the file; default 2GiB")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each; default 3")
    parser.add_argument("--kills", type=int, default=24, help="how many in all; default 24")
    parser.add_argument("--kill-size", default="512MiB", help="of the file whose conversion is killed; default 512MiB")
    parser.add_argument("--folder", help="where the data is made; by default where temporary files go")
    parser.add_argument("--drop-caches", action="store_true", help="empty the machine's whole page cache before runs")
    given = parser.parse_args()
    if given.convert:
        return convert_here(*given.convert)
    size, kill_size = parse_size(given.size), parse_size(given.kill_size)
    with scratch(given.folder) as place:
        source = write_npy(place / "source.npy", table_of(size, 8 * KIB, "float64"))
        speeds = compare(source, place, given.repeats, given.drop_caches)
        source.unlink()
        small = write_npy(place / "small.npy", table_of(kill_size, 8 * KIB, "float64"))
        kills = kill(small, place, given.kills)
    method = bullets(
        [
            f"{format_size(size)} of float64, to float32; {given.repeats} runs of each, in turns; each in a control "
            f"group of {GROUP_BYTES // 10**6} MB. The conversion waits until its file is on disk, and measures the "
            "loss of precision of every value.",
            how_cold(given.drop_caches),
            f"Kills: a file of {format_size(kill_size)}; each conversion is killed up to {EACH} times, after a time "
            f"drawn between 0 and that of a whole run. {kills.num_resumed} of {kills.num_runs} went on where a killed "
            "one had been; the others had not come far enough.",
        ]
    )
    found = [
        (name, *(f"{value:.1f}" for value in seconds), f"{size / 10**6 / statistics.median(seconds):,.0f}")
        for name, seconds in (
            ("memfit data convert", speeds.convert),
            ("cat SRC > DST", speeds.cat),
            ("cat SRC > DST && sync DST", speeds.forced),
        )
    ]
    head = ("", *(f"run {number}, s" for number in range(1, given.repeats + 1)), "MB/s of the source, median")
    charged = f"Greatest charge of the conversion's group, page cache included: {speeds.charged_bytes / 10**6:,.0f} MB."
    complete = size >= 2 * GIB and given.repeats >= 3 and given.kills >= 20
    sections = ["## How", method, "## Speeds", table(head, found), charged]
    publish("convert_speed", "Converting a large file", bars_of(speeds, kills), sections, save=complete)
    return 0


if __name__ == "__main__":
    sys.exit(main())
