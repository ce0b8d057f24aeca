"""How fast a shuffled epoch over a .npy file is that is larger than memory, against other ways to read it.

    python -m benchmarks.stream_speed [--size 2GiB] [--repeats 3] [--seconds 30] [--folder FOLDER] [--no-peers]

Every reader runs in a process of its own, in a control group of 600 MB, with a cold page cache; readers take turns, and
medians of rows per second are compared. Other libraries are installed into environments of their own and get the data
in their own format, whose making isn't counted. A reader that is slow is measured over the part of the epoch that it
gets through in `--seconds`.
"""

import argparse
import statistics
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.reporting import ROOT, Bar, bullets, publish, table
from benchmarks.stream_cases import (
    LIMIT_BYTES,
    Finished,
    Table,
    forget,
    how_cold,
    python_command,
    run_limited,
    scratch,
    table_of,
    write_npy,
)
from benchmarks.stream_readers import MEMORY
from memfit.core.units import GIB, format_size, parse_size

# Requirement, and the module under benchmarks.peers that reads with it.
PEERS = {
    "datasets": "with_datasets",
    "mosaicml-streaming": "with_mosaicml_streaming",
    "litdata": "with_litdata",
}
TORCH = "torch==2.13.0"
BATCH_SIZE = 256
# Peers import some hundred packages before they begin.
START_SECONDS = 120


@dataclass(slots=True)
class Reader:
    """One way to read the file.

    Attributes:
        name: for the page.
        command: that prints the count.
        paths: that it reads, to be cold.
        is_peer: whether ours has to be faster.
        rates: rows per second of each run.
        share: of the epoch that the last run got through.
        most_bytes: greatest charge of its group.
        trouble: why it has no rate.
    """

    name: str
    command: Sequence[str]
    paths: Sequence[Path]
    is_peer: bool = False
    rates: list[float] = field(default_factory=list)
    share: float = 0.0
    most_bytes: int = 0
    trouble: str = ""

    @property
    def rate(self) -> float | None:
        """Median rows per second; None where no run has finished."""
        return statistics.median(self.rates) if self.rates else None


def own_readers(path: Path, seconds: float) -> list[Reader]:
    """Raw reading, ours, and the plain memmap."""

    def reader(name: str, kind: str, workers: int, limit: float, *, is_peer: bool = False) -> Reader:
        options = ("--workers", workers, "--seconds", limit, "--batch-size", BATCH_SIZE)
        command = python_command("benchmarks.stream_readers", kind, path, *options)
        return Reader(name, command, [path], is_peer)

    return [
        reader("raw preadv, 1 MiB", "raw1", 0, 600),
        reader("raw preadv, 16 MiB", "raw16", 0, 600),
        reader("memfit.stream", "memfit", 0, 600),
        reader("memfit.stream.loader, 2 workers", "memfit", 2, 600),
        reader("memmap in a DataLoader", "memmap", 0, seconds, is_peer=True),
        reader("memmap in a DataLoader, 2 workers", "memmap", 2, seconds, is_peer=True),
    ]


def peer_readers(name: str, path: Path, place: Path, environments: Path, seconds: float) -> list[Reader]:
    """One library without workers and with two; a reader with trouble where it can't be installed or fed."""
    python = environments / name / "bin" / "python"
    module = f"benchmarks.peers.{PEERS[name]}"
    trouble = install(name, environments)
    data = place / name
    if not trouble:
        print(f"-- {name}: writing its format", flush=True)
        command = [str(python), "-m", module, "prepare", str(path), str(data)]
        made = run_limited(command, limit_bytes=None, environment={"PYTHONPATH": str(ROOT)})
        trouble = "" if made.code == 0 else f"its data couldn't be written, {made.reason}"
    readers = []
    for workers in (0, 2):
        options = ["--batch-size", str(BATCH_SIZE), "--workers", str(workers), "--seconds", str(seconds)]
        command = [str(python), "-m", module, "read", str(data), *options]
        shown = f"{name} {version(python, name)}" + (", 2 workers" if workers else "")
        readers.append(Reader(shown, command, [data], is_peer=True, trouble=trouble))
    return readers


def install(name: str, environments: Path) -> str:
    """Makes an environment with a library in it; says why where that fails."""
    place = environments / name
    if (place / "ready").exists():
        return ""
    print(f"-- {name}: installing", flush=True)
    venv.create(place, with_pip=True)
    constraints = place / "constraints.txt"
    constraints.write_text(f"{TORCH}\n", encoding="utf-8")
    requirements = ROOT / "benchmarks" / "peers" / f"{name}.txt"
    for what in ([TORCH, "numpy"], ["-r", str(requirements)]):
        command = [str(place / "bin" / "python"), "-m", "pip", "install", "-q", "-c", str(constraints), *what]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
        if done.returncode:
            return f"can't be installed: {(done.stderr.strip().splitlines() or ['?'])[-1][:160]}"
    (place / "ready").touch()
    return ""


def version(python: Path, name: str) -> str:
    """The version of a package in an environment."""
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def run(reader: Reader, rows: Table, drop_caches: bool) -> Finished:
    """One run of a reader, added to its results."""
    forget(reader.paths, drop_caches=drop_caches)
    done = run_limited(reader.command, environment={"PYTHONPATH": str(ROOT)}, timeout_seconds=600 + START_SECONDS)
    reader.most_bytes = max(reader.most_bytes, done.most_bytes or 0)
    answer = done.answer
    if done.code != 0 or not answer:
        reader.trouble = done.reason
    elif answer["is_whole"] and answer["rows"] != rows.num_rows:
        reader.trouble = f"gave {answer['rows']} rows of {rows.num_rows}"
    elif answer["is_whole"] and answer["total"] != rows.num_rows * (rows.num_rows - 1) / 2:
        reader.trouble = "gave some rows twice"
    else:
        reader.share = answer["rows"] / rows.num_rows
        reader.rates.append(answer["rows"] / max(answer["seconds"], 1e-9))
    shown = f"{reader.rates[-1]:,.0f} rows/s" if reader.rates and not reader.trouble else reader.trouble
    print(f"-- {reader.name}: {shown}", flush=True)
    return done


def median_ratio(ours: Reader, other: Reader) -> float:
    """Our rate over the other's, in the median of rounds: what slows the machine for a while slows both."""
    return statistics.median([rate / against for rate, against in zip(ours.rates, other.rates, strict=False)] or [0.0])


def bars_of(readers: Sequence[Reader]) -> list[Bar]:
    """Faster than each peer, and at least 0.8 of raw reading, for each of our two forms."""
    bars = []
    raw = [reader for reader in readers if reader.name.startswith("raw")]
    for ours in (reader for reader in readers if reader.name.startswith("memfit")):
        if ours.rate is None:
            bars.append(Bar(ours.name, ours.trouble, "reads an epoch", met=False))
            continue
        if "workers" not in ours.name:
            for loop in raw:
                ratio = median_ratio(ours, loop)
                bars.append(Bar(f"{ours.name} against {loop.name}", f"{ratio:.2f}x", "at least 0.8x", ratio >= 0.8))
        for peer in (reader for reader in readers if reader.is_peer and reader.rate):
            ratio = median_ratio(ours, peer)
            bars.append(Bar(f"{ours.name} against {peer.name}", f"{ratio:.2f}x", "more than 1x", ratio > 1))
    return bars


def main() -> int:
    """Makes the data, runs all readers in turns and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="2GiB", help="of the file; default 2GiB")
    parser.add_argument("--row", default="4KiB", help="of a row; default 4KiB")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each reader; default 3")
    parser.add_argument("--seconds", type=float, default=30.0, help="that a slow reader gets; default 30")
    parser.add_argument("--folder", help="where the data is made; by default where temporary files go")
    parser.add_argument("--environments", type=Path, help="folder of the peers' environments, to use them again")
    parser.add_argument("--no-peers", action="store_true", help="leave out the libraries that need installing")
    parser.add_argument("--drop-caches", action="store_true", help="empty the machine's whole page cache before runs")
    given = parser.parse_args()
    rows = table_of(parse_size(given.size), parse_size(given.row))
    with scratch(given.folder) as place:
        path = write_npy(place / "data.npy", rows)
        readers = own_readers(path, given.seconds)
        if not given.no_peers:
            for name in PEERS:
                readers += peer_readers(name, path, place, given.environments or place / "environments", given.seconds)
        for _ in range(given.repeats):
            for reader in readers:
                if not reader.trouble:
                    run(reader, rows, given.drop_caches)
    bars = bars_of(readers)
    complete = rows.num_bytes >= 2 * GIB and given.repeats >= 3 and not given.no_peers
    publish("stream_speed", "Shuffled epochs of a large .npy file", bars, sections(readers, rows, given), save=complete)
    return 0


def sections(readers: Sequence[Reader], rows: Table, given: argparse.Namespace) -> list[str]:
    """How it was measured, and all rates."""
    method = bullets(
        [
            f"{format_size(rows.num_bytes)} of float32 in {rows.num_rows:,} rows of {format_size(rows.row_bytes)}; "
            f"batches of {BATCH_SIZE}; {given.repeats} runs of each reader, in turns.",
            f"Each run in a control group of {LIMIT_BYTES // 10**6} MB; memfit.stream with memory={MEMORY!r}.",
            how_cold(given.drop_caches),
            f"Readers that ours is compared with stop after {given.seconds:.0f} s; the part of the epoch that they "
            "got through is shown, and their rate is that of this part.",
            "datasets reads Parquet files with a shuffle buffer of 1,000 rows, which is no shuffle of the whole.",
        ]
    )
    raw = max((reader for reader in readers if reader.name.startswith("raw")), key=lambda reader: reader.rate or 0.0)
    found = [
        (
            reader.name,
            f"{reader.rate:,.0f}" if reader.rate else reader.trouble,
            f"{median_ratio(reader, raw):.2f}x",
            " ".join(f"{rate:,.0f}" for rate in reader.rates),
            f"{reader.share:.0%}",
            f"{reader.most_bytes / 10**6:,.0f}",
        )
        for reader in readers
    ]
    head = (
        "reader",
        "rows/s, median",
        f"against {raw.name}",
        "each run",
        "of the epoch",
        "most charged to the group, MB",
    )
    return ["## How", method, "## Rates", table(head, found)]


if __name__ == "__main__":
    sys.exit(main())
