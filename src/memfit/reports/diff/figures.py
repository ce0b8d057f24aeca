"""What every report says about a real device's history and its simulation."""

from collections.abc import Sequence
from typing import Any

from memfit.core.printing import printable
from memfit.core.stack import read_version
from memfit.core.units import format_size
from memfit.reports.estimate.figures import package_version
from memfit.reports.parts import Grid, Line, Part, Report
from memfit.snapshots.difference import DifferenceKind, Group, SnapshotDifference

_MEASURED, _SIMULATED = "measured", "simulated"
_MOST_GROUPS = 12
_TITLES = {
    DifferenceKind.MISSING: "Missing: the GPU was asked for it, the simulation was not",
    DifferenceKind.INVENTED: "Invented: the simulation was asked for it, the GPU was not",
    DifferenceKind.MOVED: "In another order",
    DifferenceKind.KEPT_LONGER: "Kept longer by the GPU than by the simulation",
    DifferenceKind.FREED_EARLIER: "Freed earlier by the GPU than by the simulation",
}


def verdict(result: SnapshotDifference) -> str:
    """The one line that says how much is the same."""
    real = result.real.num_allocations
    share = result.num_aligned / real
    counted = f"{result.num_aligned:,} of {real:,} allocations ({share:.2%})"
    return f"{printable(result.snapshot)}: {counted} are simulated, in the same order"


def answer(result: SnapshotDifference) -> str:
    """The verdict in a word or two."""
    return "event for event" if result.is_same else "differs"


def details(result: SnapshotDifference) -> list[str]:
    """Lines below the verdict."""
    counts = f"{result.num_missing:,} missing, {result.num_invented:,} invented, {result.num_moved:,} in another order"
    steps = f"step {result.first_step}"
    if result.first_step != result.last_step:
        steps = f"{'set-up' if not result.first_step else steps} to step {result.last_step}"
    elif not result.first_step:
        steps = "set-up"
    begins = "from the start of the process" if result.is_whole else "begun later, with memory in use"
    lines = [counts, f"history {begins}; compared with {steps} of {printable(result.subject)} on {result.device}"]
    if not result.num_operators:
        lines.append("the history has no C++ frames, so that its operators are unknown: record with stacks='all'")
    simulated = result.versions.get("stack", "")
    release = ".".join(map(str, read_version(simulated.removeprefix("torch"))[:2]))
    if result.releases and release and release not in result.releases:
        made = " or ".join(map(printable, result.releases))
        lines.append(
            f"made with PyTorch {made} by the lines of its stacks, simulated with {printable(simulated)}: name its "
            f"versions, such as --stack torch{printable(result.releases[0])}"
        )
    if result.ends_early:
        lines.append("the history goes on after what was simulated: simulate more with --steps")
    return lines


_LEVELS = (
    ("allocated before", "before_bytes"),
    ("peak allocated", "allocated_peak_bytes"),
    ("allocated at the GPU's peak", "at_peak_bytes"),
    ("peak reserved", "reserved_peak_bytes"),
)
_LEVEL_COLUMNS = ("", f">GPU ({_MEASURED})", f">{_SIMULATED}", ">difference")


def levels(result: SnapshotDifference) -> list[tuple[str, ...]]:
    """Memory of both sides, and how much the simulation is off."""
    sides = [(label, getattr(result.real, name), getattr(result.simulated, name)) for label, name in _LEVELS]
    return [(label, format_size(real), format_size(sim), _change(real, sim)) for label, real, sim in sides]


def _change(real: int, simulated: int) -> str:
    if real == simulated:
        return "exact"
    return "unknown" if not real else f"{simulated / real - 1:+.3%}"


def cells(group: Group) -> tuple[str, ...]:
    """A group as a line of a table."""
    sizes = ", ".join(f"{count} x {size:,}" for size, count in group.sizes)
    more = len(group.sizes) and group.count - sum(count for _, count in group.sizes)
    return (
        printable(group.op) or "unknown",
        printable(group.source) or printable(group.place) or "unknown",
        printable(group.place if group.source else group.function),
        f"{group.count:,}",
        format_size(group.size_bytes),
        sizes + (f", {more} others" if more else ""),
        _signed(group.peak_bytes),
    )


COLUMNS = ("|operator", "|at", "in", ">count", ">in all", "bytes", ">at the peak")


def _signed(size_bytes: int) -> str:
    return "0" if not size_bytes else ("+" if size_bytes > 0 else "-") + format_size(abs(size_bytes))


def groups_of(result: SnapshotDifference, kind: DifferenceKind) -> Sequence[Group]:
    """The groups that differ in one way."""
    return [group for group in result.groups if group.kind is kind]


def report(result: SnapshotDifference) -> Report:
    """The verdict, the memory of both, and what differs by operator and line."""
    parts = [Part("Memory", grid=Grid(_LEVEL_COLUMNS, tuple(map(Line, levels(result)))))]
    for kind, title in _TITLES.items():
        groups = groups_of(result, kind)
        lines = [Line(cells(group)) for group in groups[:_MOST_GROUPS]]
        if len(groups) > _MOST_GROUPS:
            lines[-1] = Line(lines[-1].cells, (f"and {len(groups) - _MOST_GROUPS} more: --json and --html have all",))
        parts.append(Part(title, grid=Grid(COLUMNS, tuple(lines))))
    if not result.is_same:
        parts.append(Part("To report this", lines=(_HOW,)))
    shown = [part for part in parts if part.holds_something]
    return Report(verdict(result), details(result), shown, True if result.is_same else None)


_HOW = "send the output of `memfit diff --json` with the GPU's name, the versions of PyTorch and CUDA, and the program"


def build_diff_payload(result: SnapshotDifference) -> dict[str, Any]:
    """Everything the page shows, as a plain structure that `json` can write."""
    return {
        "memfit": package_version(),
        "headline": f"memfit diff: {printable(result.snapshot)}",
        "demand": verdict(result),
        "answer": answer(result),
        "fits": True if result.is_same else None,
        "details": details(result),
        "figures": [],
        "levels": [_LEVEL_COLUMNS, levels(result)],
        "columns": COLUMNS,
        "kinds": [
            [title, [list(cells(group)) for group in groups_of(result, kind)]]
            for kind, title in _TITLES.items()
            if groups_of(result, kind)
        ],
        "notes": [],
    }
