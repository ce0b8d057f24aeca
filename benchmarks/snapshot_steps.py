"""Steps against real GPUs, allocation by allocation: the programs behind published snapshots, simulated.

    python -m benchmarks.snapshot_steps [folder] [--only PART]

The programs (benchmarks/snapshot_models) were written anew from their descriptions. Each is simulated with
`memfit.simulate` on the device and the stack it ran on and compared by `memfit.diff`: the simulation knows nothing of
the snapshot. By default snapshots are read from ../shared/data/cuda_snapshots beside this repository; those of another
folder are compared where `snapshot_models.programs` knows their program.
"""

import argparse
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import memfit
from benchmarks.cuda_snapshots import DEFAULT_FOLDER
from benchmarks.reporting import Bar, bullets, percent, publish, table
from benchmarks.snapshot_models.programs import Program, program_of
from memfit.core.errors import MemfitError
from memfit.core.units import MIB
from memfit.snapshots.difference import DifferenceKind, SnapshotDifference

_MOST_GROUPS = 12
_RESERVED_ERROR = 0.005
_LEAST_ALIGNED = 0.995


def compared(path: Path, program: Program) -> SnapshotDifference:
    """A snapshot against its program."""
    device = memfit.find_device(program.device, stack=program.stack)
    with _environment(program), memfit.simulate(device) as simulated:
        program.run()
    return memfit.diff(path, simulated.estimate())


@contextmanager
def _environment(program: Program) -> Iterator[None]:
    with mock.patch.dict(os.environ, dict(program.environment)):
        yield


def _error(real: int, simulated: int) -> float:
    return simulated / real - 1


def bars(results: list[tuple[str, Program, SnapshotDifference]]) -> list[Bar]:
    """The claims about these snapshots."""
    forward = [(name, one) for name, program, one in results if program.has_events and _is_forward(name)]
    steps = [(name, one) for name, program, one in results if program.has_events and not _is_forward(name)]
    same = sum(one.is_same for _, one in forward)
    bars = [Bar("forward passes, event for event", f"{same} of {len(forward)}", "every one", same == len(forward))]
    if steps:
        aligned = min(one.num_aligned / one.real.num_allocations for _, one in steps)
        bars.append(
            Bar("whole steps: allocations aligned", f"{aligned:.2%} at least", ">= 99.5%", aligned >= _LEAST_ALIGNED)
        )
    errors = [
        (_error(one.real.allocated_peak_bytes, one.simulated.allocated_peak_bytes), program.peak_error)
        for _, program, one in results
    ]
    if errors:
        worst = max(errors, key=lambda pair: abs(pair[0]) / pair[1])[0]
        exact = sum(error == 0 for error, _ in errors)
        met = all(abs(error) <= most for error, most in errors)
        bars.append(
            Bar(
                "peak allocated",
                f"worst {percent(worst)}, {exact} of {len(errors)} exact",
                "within 0.1%, of adapters within 3%",
                met,
            )
        )
        reserved = [_error(one.real.reserved_peak_bytes, one.simulated.reserved_peak_bytes) for _, _, one in results]
        most = max(reserved, key=abs)
        within = sum(abs(error) <= _RESERVED_ERROR for error in reserved)
        measured = f"worst {percent(most)}, {within} of {len(reserved)} within"
        bars.append(Bar("peak reserved", measured, "within 0.5%", within == len(reserved)))
    return bars


def _is_forward(name: str) -> bool:
    return "forward" in name and "backward" not in name


def sections(results: list[tuple[str, Program, SnapshotDifference]]) -> list[str]:
    """The page's body."""
    headers = (
        *("snapshot", "allocations real", "simulated", "aligned", "missing", "invented", "in another order"),
        *("peak allocated real, MiB", "simulated", "peak reserved real, MiB", "simulated"),
    )
    rows = [
        (
            name,
            f"{one.real.num_allocations:,}",
            f"{one.simulated.num_allocations:,}",
            f"{one.num_aligned:,} ({one.num_aligned / one.real.num_allocations:.2%})",
            one.num_missing,
            one.num_invented,
            one.num_moved,
            f"{one.real.allocated_peak_bytes / MIB:,.1f}",
            percent(_error(one.real.allocated_peak_bytes, one.simulated.allocated_peak_bytes)),
            f"{one.real.reserved_peak_bytes / MIB:,.0f}",
            percent(_error(one.real.reserved_peak_bytes, one.simulated.reserved_peak_bytes)),
        )
        for name, _, one in results
    ]
    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    for _, program, one in results:
        for group in one.groups:
            if group.kind in (DifferenceKind.MISSING, DifferenceKind.INVENTED) and program.has_events:
                key = (group.kind.value, group.op or "(gradient)", group.function.rpartition("::")[2] or "output")
                counts[key] += group.count
                sizes[key] += group.size_bytes
    most = [(*key, f"{counts[key]:,}", f"{size / MIB:,.1f}") for key, size in sizes.most_common(_MOST_GROUPS)]
    text = (
        "Real: from the snapshot. Simulated: the program, on a device and with versions as far as they are known. "
        "Allocations are aligned by size, operator and order; reserved memory includes what steps before the history "
        "have left in the cache, of which the simulation has run two. Rules of operators were written with these "
        "snapshots in view; nothing was fitted to a size."
    )
    parts = ["## Snapshots", table(headers, rows), text]
    if most:
        parts += ["## What differs", table(("kind", "operator", "what", "count", "MiB"), most)]
    return parts


def main() -> None:
    """Compare every snapshot of the folder whose program is known, and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_FOLDER, help="snapshots, compressed or not")
    parser.add_argument("--only", default="", metavar="PART", help="snapshots with this in their names")
    arguments = parser.parse_args()
    results: list[tuple[str, Program, SnapshotDifference]] = []
    skipped = []
    files = (path for path in arguments.folder.glob("*") if {".pickle", ".pkl"} & set(path.suffixes))
    for path in sorted(files):
        name = path.name.split(".")[0]
        program = program_of(name)
        if arguments.only not in name:
            continue
        if program is None:
            skipped.append(f"{name}: its program is not known")
            continue
        try:
            results.append((name, program, compared(path, program)))
        except MemfitError as error:
            skipped.append(f"{name}: {str(error).splitlines()[0].replace(str(path), path.name)}")
    if not results and not skipped:
        parser.error(
            f"{arguments.folder} has no such snapshots (*.pickle, *.pickle.xz): name the folder that has them."
        )
    left_out = [f"## Skipped\n\n{bullets(skipped)}"] if skipped else []
    save = arguments.folder == DEFAULT_FOLDER and not arguments.only
    title = "Steps against snapshots of real GPUs, allocation by allocation"
    publish("snapshot_steps", title, bars(results), [*sections(results), *left_out], save=save)


if __name__ == "__main__":
    main()
