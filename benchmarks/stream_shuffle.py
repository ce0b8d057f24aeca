"""How near the order of an epoch comes to a full shuffle's, on data that lies sorted by its labels.

    python -m benchmarks.stream_shuffle [--shuffles 20] [--epochs 3]

A stream reads blocks in a random order and shuffles within windows of many blocks. Whatever a model could notice of
that is in the sequence of labels: how long runs of equal labels are, what a batch holds, and whether what comes early
lies early in the file. All of it is compared with the mean over full shuffles of as many samples. Orders are computed,
as they are for a real epoch, without reading data; for real files the samples' own numbers are read back.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import memfit
from benchmarks.reporting import Bar, publish, table
from benchmarks.stream_cases import Table, scratch, write_csv, write_hdf5, write_npy, write_parquet
from memfit.core.units import GIB, KIB, MIB, format_size
from memfit.data.geometry import Geometry, divide, sizes_of
from memfit.data.order import Order
from memfit.data.source import Field, Layout

LIMIT = 0.05
NUM_CLASSES = (10, 100, 1000)
METHOD = """\
Labels are sorted: class `i` is the i-th part of the file. Correlations are those of the sample's number with its place
in the epoch, and with the number of the sample that follows, without their signs; both lie between 0 and 1 and are near
0 in a full shuffle, so that the difference itself is held to 0.05. All else is relative to the mean over full shuffles:
mean distance between a sample's number and its place, number of runs of equal labels, longest run, variance of the
labels within a batch and number of classes in a batch. The longest run differs from one full shuffle to the next, and
is held to the greatest of them plus one. Each figure is the mean over epochs and the worst over 10, 100 and 1000
classes. The number of classes in a batch is shown and not held to the bar: where a class has fewer samples than a few
blocks, a window has blocks of only some of the classes, and so has each batch; the next one has others.
"""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """Data and a budget, of which only the order is computed.

    Attributes:
        name: for the page.
        num_samples: in the file.
        sample_bytes: of each.
        memory_bytes: the budget.
        batch_size: samples of a batch.
        block_samples: of the file's own blocks; 0 where it has none.
    """

    name: str
    num_samples: int
    sample_bytes: int
    memory_bytes: int
    batch_size: int = 256
    block_samples: int = 0

    def order(self, epoch: int) -> tuple[Geometry, Array]:
        """The division of the budget, and the numbers of the samples as the epoch gives them."""
        edges = None
        if self.block_samples:
            edges = np.append(np.arange(0, self.num_samples, self.block_samples), self.num_samples)
        layout = Layout(edges, scratch_bytes=self.block_samples * self.sample_bytes)
        fields = (Field("x", np.dtype(np.uint8), (self.sample_bytes,)),)
        sizes = sizes_of(fields, [fields[0].dtype])
        geometry = divide(self.num_samples, layout, sizes, self.batch_size, self.memory_bytes, shuffle=True)
        return geometry, whole_order(Order(geometry, edges, 0, epoch))


CASES = (
    Case("2 GiB, rows of 4 KiB", 2 * GIB // (4 * KIB), 4 * KIB, 256 * MIB),
    Case("2 GiB, rows of 4 KiB", 2 * GIB // (4 * KIB), 4 * KIB, 64 * MIB),
    Case("2 GiB, rows of 4 KiB", 2 * GIB // (4 * KIB), 4 * KIB, 32 * MIB),
    Case("512 MiB, rows of 64 bytes", 512 * MIB // 64, 64, 64 * MIB, 1024),
    Case("180 GiB, images of 147 KiB", 1_281_167, 147 * KIB, 512 * MIB, 64),
    Case("HDF5, chunks of 64 rows of 4 KiB", 2 * GIB // (4 * KIB), 4 * KIB, 256 * MIB, 256, 64),
    Case("Parquet, row groups of 1 MiB", 2 * GIB // (4 * KIB), 4 * KIB, 512 * MIB, 256, 256),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a sequence of labels shows.

    Attributes:
        position: correlation of number and place, without its sign.
        neighbours: correlation of the numbers of samples that follow each other, without its sign.
        distance: mean distance between number and place.
        num_runs: runs of equal labels.
        longest_run: the longest of them.
        variance: mean variance of the labels in a batch.
        num_classes: mean number of classes in a batch.
    """

    position: float
    neighbours: float
    distance: float
    num_runs: float
    longest_run: float
    variance: float
    num_classes: float


NAMES = tuple(Figures.__slots__)
RELATIVE = ("distance", "num_runs", "variance", "num_classes")
HELD = ("position", "neighbours", "distance", "num_runs", "variance")


def whole_order(order: Order) -> Array:
    """Numbers of all samples of an epoch, in order."""
    count = order.geometry.num_samples
    found: Array = np.empty(count, np.int64)
    for lane, index in {(piece.lane, piece.window) for piece in order.pieces(0, count)}:
        found[order.lane_places(lane, *order.extent(lane, index))] = order.samples(lane, index)
    return found


def figures_of(numbers: Array, num_classes: int, batch_size: int) -> Figures:
    """The figures of one epoch over sorted data."""
    count = len(numbers)
    places = np.arange(count)
    labels = numbers * num_classes // count
    changes = np.flatnonzero(np.diff(labels)) + 1
    runs = np.diff(np.concatenate(([0], changes, [count])))
    batches = labels[: count // batch_size * batch_size].reshape(-1, batch_size)
    held = np.sort(batches, axis=1)
    return Figures(
        abs(float(np.corrcoef(places, numbers)[0, 1])),
        abs(float(np.corrcoef(numbers[:-1], numbers[1:])[0, 1])),
        float(np.abs(places - numbers).mean()),
        float(len(runs)),
        float(runs.max()),
        float(batches.var(axis=1).mean()),
        float((np.diff(held, axis=1) != 0).sum(axis=1).mean() + 1),
    )


def full_shuffles(count: int, num_classes: int, batch_size: int, num_shuffles: int) -> list[Figures]:
    """The figures of full shuffles."""
    generator = np.random.default_rng(1)
    return [figures_of(generator.permutation(count), num_classes, batch_size) for _ in range(num_shuffles)]


def mean_of(found: Sequence[Figures]) -> Figures:
    """Their means."""
    return Figures(*(float(np.mean([getattr(each, name) for each in found])) for name in NAMES))


@dataclass(frozen=True, slots=True)
class Verdict:
    """One case against full shuffles: differences, and whether each is within its limit."""

    name: str
    differences: dict[str, float]
    longest_runs: tuple[float, float]
    met: bool


def judge(name: str, epochs: Sequence[Array], batch_size: int, num_shuffles: int) -> Verdict:
    """The worst differences over the numbers of classes."""
    worst = dict.fromkeys(("position", "neighbours", *RELATIVE), 0.0)
    longest, allowed, met = 0.0, 0.0, True
    for num_classes in (count for count in NUM_CLASSES if count * 20 <= len(epochs[0])):
        each = [figures_of(numbers, num_classes, batch_size) for numbers in epochs]
        ours = mean_of(each)
        full = full_shuffles(len(epochs[0]), num_classes, batch_size, num_shuffles)
        expected = mean_of(full)
        for key in worst:
            difference = getattr(ours, key) - getattr(expected, key)
            if key in RELATIVE:
                difference /= getattr(expected, key)
            if abs(difference) > abs(worst[key]):
                worst[key] = difference
        run, most = max(one.longest_run for one in each), max(one.longest_run for one in full)
        if run - most >= longest - allowed:
            longest, allowed = run, most
        met = met and run <= most + 1
    met = met and all(abs(worst[key]) <= LIMIT for key in HELD)
    return Verdict(name, worst, (longest, allowed), met)


def real_epochs(folder: Path, num_epochs: int) -> Iterator[tuple[str, list[Array], int]]:
    """Epochs of real files, whose labels are the samples' own numbers."""
    rows = Table(60_000, 128)
    npy = write_npy(folder / "x.npy", rows)
    np.save(folder / "y.npy", np.arange(rows.num_rows))
    sources: list[tuple[str, Any, str | None]] = [
        (".npy", (npy, folder / "y.npy"), None),
        ("HDF5", write_hdf5(folder / "x.h5", rows, chunk_rows=32), "y"),
        ("Parquet", write_parquet(folder / "x.parquet", rows, group_rows=64), "y"),
        ("CSV", write_csv(folder / "x.csv", Table(60_000, 8)), "y"),
    ]
    for name, source, labels in sources:
        for memory in ("8MiB", "16MiB"):
            stream = memfit.stream(source, batch_size=64, memory=memory, labels=labels)
            epochs = [np.concatenate([batch[1] for batch in stream]).astype(np.int64) for _ in range(num_epochs)]
            shape = stream.geometry
            yield f"read: {name}, 60,000 rows, memory {memory} ({described(shape)})", epochs, 64


def described(geometry: Geometry) -> str:
    """The division in a few words."""
    return f"windows of {geometry.window_samples} samples, {geometry.num_lanes} at a time"


def main() -> int:
    """Compares all cases and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shuffles", type=int, default=20, help="full shuffles to compare with; default 20")
    parser.add_argument("--epochs", type=int, default=3, help="of each case; default 3")
    parser.add_argument("--folder", help="where the data is made; by default where temporary files go")
    given = parser.parse_args()
    verdicts = []
    for case in CASES:
        orders = [case.order(epoch) for epoch in range(given.epochs)]
        name = f"{case.name}, memory {format_size(case.memory_bytes)} ({described(orders[0][0])})"
        verdicts.append(judge(name, [numbers for _, numbers in orders], case.batch_size, given.shuffles))
        print(f"-- {verdicts[-1]}", flush=True)
    with scratch(given.folder) as folder:
        for name, epochs, batch_size in real_epochs(folder, given.epochs):
            verdicts.append(judge(name, epochs, batch_size, given.shuffles))
            print(f"-- {verdicts[-1]}", flush=True)
    bars = [
        Bar(verdict.name, f"{max(abs(verdict.differences[key]) for key in HELD):.2%}", "at most 5%", verdict.met)
        for verdict in verdicts
    ]
    found = [
        (
            verdict.name,
            *(f"{verdict.differences[key]:+.4f}" for key in ("position", "neighbours")),
            *(f"{verdict.differences[key]:+.2%}" for key in RELATIVE),
            f"{verdict.longest_runs[0]:.0f} ({verdict.longest_runs[1]:.0f})",
        )
        for verdict in verdicts
    ]
    head = ("data", "position", "neighbours", "distance", "runs", "variance", "classes", "longest run (full shuffles')")
    sections = [METHOD, "## Differences from full shuffles", table(head, found)]
    complete = given.shuffles >= 20 and given.epochs >= 3
    publish("stream_shuffle", "How well an epoch is shuffled", bars, sections, save=complete)
    return 0


if __name__ == "__main__":
    sys.exit(main())
