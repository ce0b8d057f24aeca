"""How much memory a stream takes, for every kind of source, without workers and with four.

    python -m benchmarks.stream_memory [SOURCE ...] [--memory 32MiB] [--factor 20] [--folder FOLDER]

Each stream runs in a process of its own, in a control group. Its memory is that of all its processes together: their
anonymous pages, shared ones counted once (Pss_Anon of /proc/PID/smaps_rollup), and shared memory, sampled while the
data is opened and an epoch is read; less what the process had before it opened the data, with the libraries it needs
loaded. What unpacking takes, and workers to start, is thus part of the figure.
The second proof is a group whose limit is what was there before plus the budget plus 64 MiB: the kernel kills what
takes more.
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.reporting import ROOT, Bar, bullets, publish, table
from benchmarks.stream_cases import (
    forget,
    group,
    python_command,
    scratch,
    table_of,
    write_arrow,
    write_csv,
    write_hdf5,
    write_images,
    write_npy,
    write_npz,
    write_parquet,
)
from memfit.core.units import KIB, MIB, format_size, parse_size

SLACK_BYTES = 64 * MIB
BATCH_SIZE = 32
ROW_BYTES = 4 * KIB
IMAGE_SIDE = 256
# Making text and images takes long: they are a smaller multiple of the budget.
SMALLER = 2
# With a transform all workers work, whatever the number of lanes.
READINGS = (("plain", 0), ("loader", 4), ("parallel", 4), ("loader with a transform", 4))
SAMPLE_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Peak:
    """What one stream took.

    Attributes:
        source: kind of file.
        reading: how it was read.
        num_workers: that were asked for.
        num_processes: that there were at most, the program's own included.
        size_bytes: of the data.
        grown_bytes: greatest memory over the baseline.
        charged_bytes: greatest charge of its group, page cache included.
        is_unpacked: whether the data was unpacked to another file before it was read.
        squeezed: what went wrong when it was read again within the limit; "" where it finished.
        trouble: why it has no figures.
    """

    source: str
    reading: str
    num_workers: int
    size_bytes: int
    grown_bytes: int = 0
    charged_bytes: int = 0
    num_processes: int = 0
    is_unpacked: bool = False
    squeezed: str = ""
    trouble: str = ""


def makers(size: int) -> dict[str, Callable[[Path], tuple[Path, int]]]:
    """For each kind of source, what makes a file or folder of it in a folder, and says how large its samples are."""
    rows = table_of(size, ROW_BYTES)
    small = table_of(size // SMALLER, KIB)
    num_images = size // SMALLER // (3 * IMAGE_SIDE * IMAGE_SIDE)
    return {
        ".npy": lambda at: (write_npy(at / "x.npy", rows), rows.num_bytes),
        ".npz": lambda at: (write_npz(at / "stored.npz", rows, compressed=False), rows.num_bytes),
        ".npz, compressed": lambda at: (write_npz(at / "packed.npz", rows, compressed=True), rows.num_bytes),
        "HDF5": lambda at: (write_hdf5(at / "x.h5", rows, chunk_rows=32), rows.num_bytes),
        "Parquet": lambda at: (write_parquet(at / "x.parquet", rows, group_rows=64), rows.num_bytes),
        "Arrow": lambda at: (write_arrow(at / "x.arrow", rows, group_rows=64), rows.num_bytes),
        "CSV": lambda at: (write_csv(at / "x.csv", small), small.num_bytes),
        "images": lambda at: (write_images(at / "images", num_images, side=IMAGE_SIDE), size // SMALLER),
    }


def unchanged(features: Any) -> Any:
    """A transform that does nothing."""
    return features


def load_libraries(suffix: str, reading: str) -> None:
    """Imports what will be used, so that the size of other libraries isn't counted as ours."""
    names = {
        ".h5": ["h5py"],
        ".parquet": ["pyarrow.parquet", "pyarrow.compute"],
        ".arrow": ["pyarrow.ipc"],
        ".csv": ["pyarrow.csv", "pyarrow.compute", "pyarrow.ipc"],
        "": ["PIL.Image", "PIL.JpegImagePlugin"],
    }.get(suffix, [])
    if reading.startswith("loader"):
        names = [*names, "memfit.frameworks.torch.streaming"]
    for name in [*names, "memfit.data.workers", "memfit.data.sources.spool"]:
        importlib.import_module(name)


def child(path: str, reading: str, num_workers: int, memory: str) -> int:
    """Says that it is ready, waits for a line, opens a stream and reads an epoch."""
    import memfit

    load_libraries(Path(path).suffix, reading)
    print("ready", flush=True)
    sys.stdin.readline()
    labels = "y" if Path(path).suffix in (".h5", ".parquet", ".arrow", ".csv") else None
    transform = unchanged if "transform" in reading else None
    stream = memfit.stream(path, batch_size=BATCH_SIZE, memory=memory, labels=labels, transform=transform)
    batches: Any = stream
    if reading.startswith("loader"):
        batches = stream.loader(num_workers=num_workers)
    count = 0
    for batch in stream.parallel(num_workers) if reading == "parallel" else batches:
        count += len(batch[1] if isinstance(batch, (tuple, list)) else batch)
    is_unpacked = type(stream.source).__name__ in ("SpooledSource", "CsvSource")
    print(json.dumps({"samples": count, "expected": stream.num_samples, "is_unpacked": is_unpacked}), flush=True)
    return 0


def processes_in(place: Path) -> list[int]:
    """Processes of a group."""
    return [int(line) for line in (place / "cgroup.procs").read_text(encoding="ascii").split()]


def held_bytes(processes: Sequence[int]) -> int:
    """Anonymous and shared memory of processes, each page counted once."""
    anonymous = shared = 0
    for process in processes:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii")
            anonymous += _field(text, "Pss_Anon")
            shared += _field(text, "Pss_Shmem")
    # Memory that is on its way from a worker is mapped by nobody.
    return anonymous + max(shared, _shared_in_use())


def has_memory(process: int) -> bool:
    """Whether a process has not ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[0]) > 0
    except OSError:
        return False


def _field(text: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * KIB if found else 0


def _shared_in_use() -> int:
    status = os.statvfs("/dev/shm")
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def unreclaimable_bytes(place: Path) -> int:
    """What a group is charged with and can't give back."""
    figures = dict(line.split() for line in (place / "memory.stat").read_text(encoding="ascii").splitlines())
    used = int((place / "memory.usage_in_bytes").read_text(encoding="ascii"))
    return used - int(figures["total_inactive_file"]) - int(figures["total_active_file"])


@contextlib.contextmanager
def started(place: Path, arguments: Sequence[object]) -> Iterator[Any]:
    """A child in the group, ready to read; what it unpacks is removed afterwards."""
    spool = tempfile.mkdtemp(dir=Path(str(arguments[0])).parent)

    def enter() -> None:
        (place / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

    process = subprocess.Popen(
        python_command("benchmarks.stream_memory", "--child", *arguments),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=enter,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MEMFIT_SPOOL": spool},
    )
    try:
        assert process.stdout is not None and process.stdin is not None and process.stderr is not None
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError((process.stderr.read().strip().splitlines() or ["killed"])[-1])
        yield process
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(spool, ignore_errors=True)


def let_go(process: Any) -> None:
    """Has a ready child begin."""
    process.stdin.write("\n")
    process.stdin.flush()


def outcome(process: Any) -> tuple[str, bool]:
    """What went wrong with a child that has ended, "" where nothing did; and whether it had to unpack the data."""
    output, errors = process.communicate()
    if process.returncode == -9:
        return "killed", False
    if process.returncode:
        return (errors.strip().splitlines() or ["failed"])[-1], False
    counted = json.loads(output.splitlines()[-1])
    trouble = "" if counted["samples"] == counted["expected"] else f"gave {counted['samples']} samples"
    return trouble, counted["is_unpacked"]


def sample(arguments: Sequence[object]) -> tuple[int, int, int, bool]:
    """Greatest memory over the baseline, greatest charge of the group, most processes, and whether it unpacked."""
    num_processes = 1
    with group(8 << 30) as place:
        assert place is not None
        with started(place, arguments) as process:
            baseline = most = held_bytes(processes_in(place))
            (place / "memory.max_usage_in_bytes").write_text("0", encoding="ascii")
            let_go(process)
            while process.poll() is None:
                processes = processes_in(place)
                num_processes = max(num_processes, len(processes))
                held = held_bytes(processes)
                # One that ends meanwhile leaves its part of shared pages to those that are counted after it.
                if processes == processes_in(place) and all(map(has_memory, processes)):
                    most = max(most, held)
                time.sleep(SAMPLE_SECONDS)
            trouble, is_unpacked = outcome(process)
            if trouble:
                raise RuntimeError(trouble)
            charged = int((place / "memory.max_usage_in_bytes").read_text(encoding="ascii"))
    return most - baseline, charged, num_processes, is_unpacked


def check_fit(arguments: Sequence[object], budget_bytes: int) -> str:
    """What goes wrong in a group with just the room that it may take; "" where it finishes."""
    with group(8 << 30) as place:
        assert place is not None
        with started(place, arguments) as process:
            limit = unreclaimable_bytes(place) + budget_bytes + SLACK_BYTES
            (place / "memory.limit_in_bytes").write_text(str(limit), encoding="ascii")
            let_go(process)
            return outcome(process)[0]


def measure(name: str, path: Path, size_bytes: int, memory: str) -> Iterator[Peak]:
    """All readings of one source."""
    for reading, num_workers in READINGS:
        arguments = (path, reading, num_workers, memory)
        try:
            forget([path])
            grown, charged, processes, is_unpacked = sample(arguments)
            forget([path])
            squeezed = check_fit(arguments, parse_size(memory))
            yield Peak(name, reading, num_workers, size_bytes, grown, charged, processes, is_unpacked, squeezed)
        except RuntimeError as error:
            yield Peak(name, reading, num_workers, size_bytes, trouble=str(error)[:160])


def main() -> int:
    """Measures all sources and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", help="kinds of sources; all by default")
    parser.add_argument("--child", nargs=4, metavar=("PATH", "READING", "WORKERS", "MEMORY"), help="only read")
    parser.add_argument("--memory", default="32MiB", help="the budget; default 32MiB")
    parser.add_argument("--factor", type=int, default=20, help="size of the data, in budgets; default 20")
    parser.add_argument("--folder", help="where the data is made; by default where temporary files go")
    given = parser.parse_args()
    if given.child:
        path, reading, workers, memory = given.child
        return child(path, reading, int(workers), memory)
    budget = parse_size(given.memory)
    peaks: list[Peak] = []
    for name, make in makers(budget * given.factor).items():
        if given.sources and name not in given.sources:
            continue
        with scratch(given.folder) as place:
            path, size = make(place)
            for peak in measure(name, path, size, given.memory):
                peaks.append(peak)
                print(f"-- {peak}", flush=True)
    complete = not given.sources and given.factor >= 20
    publish(
        "stream_memory",
        "Memory of streams",
        bars_of(peaks, budget),
        sections(peaks, given.memory),
        save=complete,
    )
    return 0


def bars_of(peaks: Sequence[Peak], budget: int) -> list[Bar]:
    """Each peak against the budget and what is granted beside it."""
    limit = budget + SLACK_BYTES
    return [
        Bar(
            f"{peak.source}, {peak.reading}, {peak.num_workers} workers",
            peak.trouble or f"{format_size(peak.grown_bytes)}, {peak.squeezed or 'finishes'} in a cgroup of that size",
            f"at most {format_size(limit)}",
            not peak.trouble and peak.grown_bytes <= limit and not peak.squeezed,
        )
        for peak in peaks
    ]


def sections(peaks: Sequence[Peak], memory: str) -> list[str]:
    """How it was measured, and all peaks."""
    budget = parse_size(memory)
    rows = [
        (
            f"{peak.source}, {peak.reading}",
            peak.num_workers,
            peak.num_processes,
            "yes" if peak.is_unpacked else "no",
            format_size(peak.size_bytes),
            f"{peak.size_bytes / budget:.0f}",
            format_size(peak.grown_bytes),
            format_size(peak.charged_bytes),
        )
        for peak in peaks
    ]
    method = bullets(
        [
            f"memory={memory!r}, batches of {BATCH_SIZE}; rows of {format_size(ROW_BYTES)} (CSV: 1 KiB; "
            f"images: {IMAGE_SIDE} x {IMAGE_SIDE} pixels, sizes are those of the pixels).",
            "Text and images are half as large as the other data, since making them takes long.",
            "The charge of the group counts the page cache, which fills whatever room a group has and is given back "
            "when it is needed, and all that was there before.",
        ]
    )
    head = (
        "source",
        "workers",
        "processes",
        "unpacked first",
        "size of the data",
        "in budgets",
        "peak over the baseline",
        "most charged",
    )
    return ["## How", method, "## Peaks", table(head, rows)]


if __name__ == "__main__":
    sys.exit(main())
