"""Every sample once, and on at the exact next one: streams that stop at random points and are resumed otherwise.

    python -m benchmarks.stream_resume [--points 240] [--seed 0]

At each point a source, numbers of workers (0 to 4) and of ranks (1 to 4), and a batch are drawn. All ranks read up to
that batch; the states of those that have given as many must be equal. New streams, with other numbers of workers and
ranks, load the state and read to the end. What both gave, rank by rank and batch by batch, must be the order of the
epoch that one stream without workers gives, sample by sample, and that order must hold each sample once. At every fifth
point real loaders with worker processes read; at the others the same shares are read in this process.
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import memfit
from benchmarks.reporting import Bar, bullets, publish, table
from benchmarks.stream_cases import Table, scratch, write_csv, write_hdf5, write_npy, write_parquet
from memfit.data.geometry import Geometry

NUM_ROWS = 3001
BATCH_SIZES = (1, 7, 32, 100)
LOADER_EVERY = 5


@dataclass(frozen=True, slots=True)
class Reading:
    """How many read, and how.

    Attributes:
        num_workers: of each rank.
        num_ranks: that share the epoch.
        with_processes: whether workers are processes of a real loader.
    """

    num_workers: int
    num_ranks: int
    with_processes: bool


@dataclass(frozen=True, slots=True)
class Point:
    """One resumption."""

    source: str
    batch_size: int
    num_lanes: int
    epoch: int
    before: Reading
    after: Reading
    share: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it went; `trouble` is empty where everything was exact."""

    point: Point
    trouble: str


def make_sources(folder: Path) -> dict[str, tuple[Any, str | None]]:
    """Small files whose labels are the samples' own numbers."""
    rows = Table(NUM_ROWS, 16)
    np.save(folder / "y.npy", np.arange(NUM_ROWS))
    return {
        ".npy": ((write_npy(folder / "x.npy", rows), folder / "y.npy"), None),
        "HDF5": (write_hdf5(folder / "x.h5", rows, chunk_rows=16), "y"),
        "Parquet": (write_parquet(folder / "x.parquet", rows, group_rows=50), "y"),
        "CSV": (write_csv(folder / "x.csv", Table(NUM_ROWS, 4)), "y"),
    }


def open_stream(sources: dict[str, tuple[Any, str | None]], point: Point) -> Any:
    """A stream at the beginning of the point's epoch."""
    source, labels = sources[point.source]
    stream = memfit.stream(
        source,
        batch_size=point.batch_size,
        memory="128MiB",
        labels=labels,
        options=memfit.StreamOptions(seed=point.epoch),
    )
    # So little data would be one window: the division that much data has, at a small scale.
    block = 10 if stream.source.layout.edges is None else 0
    stream.geometry = Geometry(NUM_ROWS, point.batch_size, point.num_lanes, 200, block)
    stream.set_epoch(point.epoch)
    return stream


def read_share(stream: Any, reading: Reading, num_batches: int | None) -> tuple[list[list[int]], Any]:
    """Samples of each batch of one rank, up to so many batches, and the state after them."""
    if reading.with_processes:
        loader = stream.loader(num_workers=reading.num_workers)
        return _take(iter(loader), num_batches), loader.state_dict()
    if reading.num_workers == 0:
        return _take(iter(stream), num_batches), stream.state_dict()
    found = _take(_in_turns(stream, reading.num_workers), num_batches)
    return found, stream.state_after(len(found))


def _take(batches: Iterator[Any], num_batches: int | None) -> list[list[int]]:
    found: list[list[int]] = []
    while num_batches is None or len(found) < num_batches:
        batch = next(batches, None)
        if batch is None:
            break
        found.append([int(number) for number in batch[1]])
    return found


def _in_turns(stream: Any, num_workers: int) -> Iterator[Any]:
    working = stream.working(num_workers)
    parts = [stream.part(worker, num_workers) for worker in range(num_workers)]
    for idle in parts[working:]:
        if next(idle, None) is not None:
            raise AssertionError("a worker that has nothing to do gave a batch")
    turn = 0
    while True:
        batch = next(parts[turn % working], None)
        if batch is None:
            return
        yield batch
        turn += 1


def read_ranks(
    make: Callable[[], Any], reading: Reading, num_batches: int | None, state: Any
) -> tuple[list[int], list[Any]]:
    """Samples that all ranks gave, round by round, and their states."""
    shares, states = [], []
    for rank in range(reading.num_ranks):
        stream = make()
        if state is not None:
            stream.load_state_dict(state)
        if reading.num_ranks > 1:
            stream = stream.split(rank, reading.num_ranks)
        found, after = read_share(stream, reading, num_batches)
        shares.append(found)
        # At the end of an epoch that can't be dealt out evenly, the first ranks give one batch more.
        if num_batches is None or len(found) == num_batches:
            states.append(after)
    rounds = max(map(len, shares), default=0)
    given = [number for turn in range(rounds) for share in shares if turn < len(share) for number in share[turn]]
    return given, states


def check(sources: dict[str, tuple[Any, str | None]], point: Point) -> Outcome:
    """Stops and resumes at one point."""

    def make() -> Any:
        return open_stream(sources, point)

    whole = [number for batch in _take(iter(make()), None) for number in batch]
    if Counter(whole) != Counter(range(NUM_ROWS)):
        return Outcome(point, "the epoch doesn't give each sample once")
    first = make() if point.before.num_ranks == 1 else make().split(0, point.before.num_ranks)
    num_batches = int(point.share * len(first))
    given, states = read_ranks(make, point.before, num_batches, None)
    if any(state != states[0] for state in states):
        return Outcome(point, "ranks that gave equally many batches have different states")
    state = json.loads(json.dumps(states[0]))
    rest, _ = read_ranks(make, point.after, None, state)
    if num_batches == len(first):
        # The epoch was over: what comes is the next one, which is not this one's rest.
        rest = [] if state["epoch"] > point.epoch or state["samples"] == NUM_ROWS else rest
    if given + rest != whole:
        same = sum(1 for one, other in zip(given + rest, whole, strict=False) if one == other)
        return Outcome(point, f"{len(given)} and {len(rest)} samples, {same} of {NUM_ROWS} in their places")
    return Outcome(point, "")


def draw_points(num_points: int, seed: int, names: Sequence[str]) -> list[Point]:
    """Random points; every fifth with real loaders."""
    draw = random.Random(seed)
    points = []
    for number in range(num_points):
        with_processes = number % LOADER_EVERY == 0

        def reading(with_processes: bool = with_processes) -> Reading:
            return Reading(draw.randint(0, 4), draw.randint(1, 4), with_processes)

        # Processes take a while to start, and small batches a while to pass: the longest combinations are left out.
        batch_size = draw.choice(BATCH_SIZES[1:] if with_processes else BATCH_SIZES)
        points.append(
            Point(
                names[number % len(names)],
                batch_size,
                draw.choice((1, 1, 2, 4, 6, 12)),
                draw.randint(0, 3),
                reading(),
                reading(),
                draw.choice((0.0, 1.0, *(draw.random() for _ in range(8)))),
            )
        )
    return points


def main() -> int:
    """Checks all points and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=240, help="default 240")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument("--folder", help="where the data is made; by default where temporary files go")
    given = parser.parse_args()
    with scratch(given.folder) as folder:
        sources = make_sources(folder)
        outcomes = []
        for number, point in enumerate(draw_points(given.points, given.seed, list(sources)), 1):
            outcomes.append(check(sources, point))
            if outcomes[-1].trouble:
                print(f"-- {point}: {outcomes[-1].trouble}", flush=True)
            if number % 20 == 0:
                print(f"-- {number} points", flush=True)
    exact = [outcome for outcome in outcomes if not outcome.trouble]
    bars = [
        Bar(
            "points at which a stream was resumed exactly",
            f"{len(exact)} of {len(outcomes)}",
            "all, at least 200",
            len(exact) == len(outcomes) and len(outcomes) >= 200,
        )
    ]
    rows = []
    for name in sources:
        own = [outcome for outcome in outcomes if outcome.point.source == name]
        rows.append(
            (
                name,
                len(own),
                sum(outcome.point.before.with_processes for outcome in own),
                sum(outcome.point.before.num_ranks != outcome.point.after.num_ranks for outcome in own),
                sum(outcome.point.before.num_workers != outcome.point.after.num_workers for outcome in own),
                sum(not outcome.trouble for outcome in own),
            )
        )
    head = ("source", "points", "with worker processes", "other number of ranks", "other number of workers", "exact")
    method = bullets(
        [
            f"Files of {NUM_ROWS} samples; batches of {', '.join(map(str, BATCH_SIZES))}; 1 to 12 lanes with "
            "windows of at most 200 samples.",
            "Points include the beginning and the end of an epoch.",
        ]
    )
    sections = ["## How", method, "## Points", table(head, rows)]
    publish("stream_resume", "Resuming at random points", bars, sections, save=given.points >= 200)
    return 0


if __name__ == "__main__":
    sys.exit(main())
