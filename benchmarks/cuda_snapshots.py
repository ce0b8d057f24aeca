"""The allocator's model against real GPUs: every segment of every recorded device.

    python -m benchmarks.cuda_snapshots [folder]

Snapshots (`torch.cuda.memory._dump_snapshot`) were made by others on real GPUs and are not part of this repository: by
default they are read from ../shared/data/cuda_snapshots beside it. The model runs freely: it is given requests and
frees with their streams, and when the device was full or the cache emptied; segments are its own decision. What a
device held before recording began is reconstructed from the history and its end (`memfit.snapshots.beginning`).
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reporting import ROOT, Bar, bullets, publish, table
from memfit.core.errors import MemfitError
from memfit.core.units import MIB
from memfit.snapshots.reader import MemorySnapshot, read_snapshot
from memfit.snapshots.replay import SnapshotReplay, replay_snapshot

DEFAULT_FOLDER = ROOT.parent / "shared" / "data" / "cuda_snapshots"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One device of one snapshot: replayed with rising addresses, and with the driver's."""

    name: str
    num_streams: int
    free: SnapshotReplay
    placed: SnapshotReplay


def outcomes_of(name: str, snapshot: MemorySnapshot) -> list[Outcome]:
    """Each device of a snapshot that has a history."""
    recorded = snapshot.recorded
    if not recorded:
        # Says what is missing.
        snapshot.history()
    return [
        Outcome(
            name if len(recorded) == 1 else f"{name}, device {device}",
            len({event.stream for event in snapshot.histories[device]}),
            replay_snapshot(snapshot, device),
            replay_snapshot(snapshot, device, driver_addresses=True),
        )
        for device in recorded
    ]


def bars(outcomes: list[Outcome]) -> list[Bar]:
    """The claims about these snapshots."""
    real = sum(one.free.num_segments for one in outcomes)
    matching = sum(one.free.num_matching for one in outcomes)
    simulated = sum(one.free.num_simulated for one in outcomes)
    peaks = sum(one.free.reserved_peak_bytes == one.free.simulated_peak_bytes for one in outcomes)
    allocations = sum(one.placed.num_allocations - one.placed.num_failures for one in outcomes)
    placed = sum(one.placed.num_placed for one in outcomes)
    return [
        Bar(
            "segments, free-running",
            f"{matching:,} of {real:,}, and {simulated - matching:,} invented",
            "every one",
            matching == real == simulated,
        ),
        Bar("reserved peak, exact", f"{peaks} of {len(outcomes)}", "every one", peaks == len(outcomes)),
        Bar("blocks, driver's addresses", f"{placed:,} of {allocations:,}", "every one", placed == allocations),
    ]


def sections(outcomes: list[Outcome]) -> list[str]:
    """The page's body."""
    headers = (
        "snapshot",
        "events",
        "streams",
        "segments real",
        "simulated",
        "matching",
        "peak reserved real, MiB",
        "simulated, MiB",
        "out of memory, real",
        "simulated",
        "places of blocks",
    )
    cells = [
        (
            one.name,
            f"{one.free.num_events:,}",
            one.num_streams,
            one.free.num_segments,
            one.free.num_simulated,
            one.free.num_matching,
            f"{one.free.reserved_peak_bytes / MIB:,.0f}",
            f"{one.free.simulated_peak_bytes / MIB:,.0f}",
            one.free.num_failures,
            one.free.num_failures_matching,
            f"{one.placed.num_placed:,} of {one.placed.num_allocations - one.placed.num_failures:,}",
        )
        for one in outcomes
    ]
    late = sum(not one.free.num_segments for one in outcomes)
    text = (
        "Real: measured by PyTorch on the device. Simulated: the model, given the requests. Segments are those taken "
        "or returned while the history was recorded, compared by kind, size, stream and event; places of blocks are "
        "compared with the driver's addresses for new segments. "
        f"{late} of {len(outcomes)} histories began when all segments were there: that the model needs no further one "
        "is all that their peak shows; the places of their blocks show more."
    )
    misses = [
        f"{one.name}, event {one.free.difference.event}: real {list(one.free.difference.real)}, "
        f"simulated {list(one.free.difference.simulated)}"
        for one in outcomes
        if one.free.difference is not None
    ]
    return [
        "## Snapshots",
        table(headers, cells),
        text,
        *(["## First differences", bullets(misses)] if misses else []),
    ]


def main() -> None:
    """Replay every snapshot of the folder and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_FOLDER, help="snapshots, compressed or not")
    folder: Path = parser.parse_args().folder
    outcomes: list[Outcome] = []
    skipped = []
    for path in sorted(path for path in folder.glob("*") if ".pickle" in path.suffixes or ".pkl" in path.suffixes):
        name = path.name.split(".")[0]
        try:
            outcomes += outcomes_of(name, read_snapshot(path))
        except MemfitError as error:
            skipped.append(f"{name}: {str(error).replace(str(path), path.name).splitlines()[0]}")
    if not outcomes and not skipped:
        parser.error(f"{folder} has no snapshots (*.pickle, *.pickle.xz): name the folder that has them.")
    left_out = [f"## Skipped\n\n{bullets(skipped)}"] if skipped else []
    title = "The caching allocator against snapshots of real GPUs"
    save = folder == DEFAULT_FOLDER
    publish("cuda_snapshots", title, bars(outcomes), [*sections(outcomes), *left_out], save=save)


if __name__ == "__main__":
    main()
