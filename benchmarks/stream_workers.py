"""Memory that belongs to each worker of a loader alone, over epochs of two million samples.

    python -m benchmarks.stream_workers [--samples 2000000] [--epochs 3] [--workers 4]

In a DataLoader over Python objects, workers come to own more and more of what they shared with their parent, since
counting references writes to it. Here the same is measured for a stream: unique memory (USS, the private pages) of each
worker after a tenth of the first epoch and in the second half of each. Beside it stands the classic: a list of paths in
a map-style Dataset.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.reporting import Bar, bullets, publish, table
from benchmarks.stream_cases import Table, python_command, run_limited, scratch, write_npy
from memfit.core.units import MIB, format_size
from memfit.data.files import FolderEntry
from memfit.data.source import Field, Layout, SampleSource
from memfit.data.sources.image_index import ImageIndex

LIMIT_BYTES = 5 * MIB
BATCH_SIZE = 1000
NUM_COLUMNS = 16
MEMORY = "64MiB"


def unique_bytes() -> list[int]:
    """Private bytes of each process that this one has started and that makes batches, oldest first."""
    found = []
    for process in psutil.Process().children():
        if "resource_tracker" not in " ".join(process.cmdline()):
            found.append(int(process.memory_full_info().uss))
    return found


def watch(num_epochs: int, begin: Callable[[], Iterator[Any]], num_batches: int) -> list[list[int]]:
    """Goes through epochs; unique memory after a tenth of the first, and in the second half of each.

    Workers hold windows, more or fewer at a moment, and none at the end: so the median of several moments is taken.
    """
    moments = {num_batches * tenth // 10 for tenth in (5, 6, 7, 8, 9)}
    found = []
    for epoch in range(num_epochs):
        seen = []
        for number, _ in enumerate(begin()):
            if epoch == 0 and number == num_batches // 10:
                found.append(unique_bytes())
            if number in moments:
                seen.append(unique_bytes())
        found.append([int(statistics.median(each)) for each in zip(*seen, strict=True)])
    return found


def watch_stream(path: Path, num_epochs: int, num_workers: int) -> list[list[int]]:
    """Of `stream.loader`, in this process."""
    import memfit

    stream = memfit.stream(path, batch_size=BATCH_SIZE, memory=MEMORY)
    loader = stream.loader(num_workers=num_workers)
    return watch(num_epochs, lambda: iter(loader), len(stream))


def watch_objects(num_samples: int, num_epochs: int, num_workers: int) -> list[list[int]]:
    """Of a list of paths in a map-style Dataset."""
    from torch.utils.data import DataLoader, Dataset

    class Paths(Dataset[Any]):
        def __init__(self) -> None:
            self.paths = [f"folder/class{number % 1000}/{number}.jpg" for number in range(num_samples)]

        def __len__(self) -> int:
            return num_samples

        def __getitem__(self, index: int) -> int:
            return len(self.paths[index])

    loader = DataLoader(Paths(), BATCH_SIZE, shuffle=True, num_workers=num_workers, persistent_workers=True)
    return watch(num_epochs, lambda: iter(loader), num_samples // BATCH_SIZE)


class Names(SampleSource):
    """Images that are not there: of each, its name is looked up in a real index, and nothing is opened.

    Args:
        num_samples: names in the index.
    """

    name = "names"
    fields = (Field("x", np.dtype(np.int64), ()),)
    layout = Layout(is_by_sample=True)
    classes = ()

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self._index = ImageIndex("memory://folder")
        for number in range(num_samples):
            name = f"{number}.jpg"
            self._index.add(f"class{number % 1000}/{name}", FolderEntry(name, False, 10_000), number % 1000)

    def fingerprint(self) -> str:
        """Always the same."""
        return "names"

    def read_sample(self, sample: int) -> tuple[Any, ...]:
        """The length of a name."""
        return (np.asarray(len(self._index.path(sample)), np.int64),)

    def stored_bytes(self, sample: int) -> int:
        """Bytes that the file would have."""
        return int(self._index.sizes[sample])

    def sample_name(self, sample: int) -> str:
        """Its path."""
        return self._index.path(sample)


def watch_index(num_samples: int, num_epochs: int, num_workers: int) -> list[list[int]]:
    """Of `stream.loader` over an index of image files."""
    import memfit

    stream = memfit.stream(Names(num_samples), batch_size=BATCH_SIZE, memory=MEMORY)
    loader = stream.loader(num_workers=num_workers)
    return watch(num_epochs, lambda: iter(loader), len(stream))


def child(kind: str, path: str, num_samples: int, num_epochs: int, num_workers: int) -> int:
    """Watches one kind in this process and prints what was found."""
    if kind == "stream":
        found = watch_stream(Path(path), num_epochs, num_workers)
    elif kind == "index":
        found = watch_index(num_samples, num_epochs, num_workers)
    else:
        found = watch_objects(num_samples, num_epochs, num_workers)
    print(json.dumps(found), flush=True)
    return 0


def growth(found: list[list[int]], first: int) -> int:
    """The most that a worker has gained between one moment and the last."""
    return max(last - before for before, last in zip(found[first], found[-1], strict=True))


def main() -> int:
    """Watches all kinds and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", nargs=2, metavar=("KIND", "PATH"), help="only watch one kind, in this process")
    parser.add_argument("--samples", type=int, default=2_000_000, help="default 2,000,000")
    parser.add_argument("--epochs", type=int, default=3, help="default 3")
    parser.add_argument("--workers", type=int, default=4, help="default 4")
    parser.add_argument("--folder", help="where the data is made; by default where temporary files go")
    given = parser.parse_args()
    if given.child:
        return child(*given.child, given.samples, given.epochs, given.workers)
    options = ("--samples", given.samples, "--epochs", given.epochs, "--workers", given.workers)
    shown = {
        "stream": "memfit.stream.loader",
        "index": "memfit.stream.loader, index of image files",
        "objects": "list of paths",
    }
    bars, rows = [], []
    with scratch(given.folder) as place:
        path = write_npy(place / "small.npy", Table(given.samples, NUM_COLUMNS))
        for kind, name in shown.items():
            command = python_command("benchmarks.stream_workers", "--child", kind, path, *options)
            done = run_limited(command, limit_bytes=None, timeout_seconds=3600)
            if done.code:
                raise RuntimeError(f"{kind}: {done.errors}")
            found: list[list[int]] = done.answer
            rows.append((name, *(f"{statistics.mean(moment) / MIB:.1f}" for moment in found), len(found[0])))
            print(f"-- {rows[-1]}", flush=True)
            if kind == "objects":
                continue
            for since, moment in (("a tenth of the first epoch", 0), ("the first epoch", 1)):
                most = growth(found, moment)
                claim = f"{name}: most that a worker gains from {since} to the last"
                bars.append(Bar(claim, format_size(max(0, most)), "at most 5 MiB", most <= LIMIT_BYTES))
    head = ("", "a tenth of epoch 1, MiB", *(f"epoch {n}, MiB" for n in range(1, given.epochs + 1)), "workers")
    method = bullets(
        [
            f"{given.samples:,} samples of {NUM_COLUMNS} float32 numbers, batches of {BATCH_SIZE}, memory={MEMORY!r}; "
            f"{given.workers} workers that are kept over {given.epochs} epochs; means over workers are shown.",
        ]
    )
    complete = given.samples >= 2_000_000 and given.epochs >= 3 and given.workers >= 4
    sections = ["## How", method, "## Unique memory of a worker", table(head, rows)]
    publish("stream_workers", "Workers' own memory", bars, sections, save=complete)
    return 0


if __name__ == "__main__":
    sys.exit(main())
