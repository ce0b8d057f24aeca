"""A real device's history against the simulation of the same program, allocation by allocation.

Both are sequences of sizes. The part of the simulation that the history shows is found first: a history may begin
late, hold one step of many, or several. There the two are aligned (`memfit.snapshots.alignment`), by size and operator
where the history names operators, then by size alone. What is left over on one side is missing or invented; what is
left over on both, near each other, came in another order.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from memfit.core.errors import BadFile
from memfit.core.replay import Replay
from memfit.core.reporters import Reported, Reporters
from memfit.core.timeline import Timeline
from memfit.core.typed_data import Saved
from memfit.snapshots.alignment import align
from memfit.snapshots.allocations import Allocation, real_allocations, simulated_allocations
from memfit.snapshots.reader import MemorySnapshot
from memfit.snapshots.release import releases_of
from memfit.snapshots.replay import replay_snapshot

_GRAM = 8
"""Sizes in a row that are looked for to find where a history begins and ends."""
_PROBE = 600
_BIN = 32
"""Allocations by which two places of the same beginning may differ."""
_SLACK = 5 * _BIN
_NEAR = 200
"""Aligned allocations that may lie between two of the same size that came in another order."""
_NUM_SIZES = 3


class DifferenceKind(StrEnum):
    """Kinds of differences between a snapshot and a simulation."""

    MISSING = "missing"  # the device was asked for it, the simulation was not
    INVENTED = "invented"  # the simulation was asked for it, the device was not
    MOVED = "in another order"  # both were, at another place
    KEPT_LONGER = "kept longer"  # by the device than by the simulation
    FREED_EARLIER = "freed earlier"  # by the device than by the simulation


@dataclass(frozen=True, slots=True)
class Group:
    """Allocations that differ in the same way and come from the same operator and line."""

    kind: DifferenceKind
    op: str  # operator, such as "aten.bmm", or ""
    source: str  # line outside of PyTorch, or ""
    place: str  # autograd node of a real one, module of a simulated one, or ""
    function: str  # of PyTorch that asked inside the operator, or ""
    count: int  # how many
    size_bytes: int  # all together, as they were asked for
    sizes: tuple[tuple[int, int], ...]  # the most frequent sizes: (bytes, how many)
    peak_bytes: int  # by how much the device holds more of them than the simulation at the device's peak


@dataclass(frozen=True, slots=True)
class Levels:
    """Memory of one side over the compared part, in bytes as the allocator rounds them."""

    num_allocations: int
    before_bytes: int  # allocated when it begins
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    at_peak_bytes: int  # allocated at the moment of the device's peak


@dataclass(frozen=True, slots=True, repr=False)
class SnapshotDifference(Saved, Reported):
    """A real device's history against a simulation.

    Args:
        snapshot: name of the snapshot's file.
        subject: what was simulated.
        device: of the simulation.
        real: memory of the real device.
        simulated: memory of the simulated one.
        num_aligned: allocations that are the same on both sides, in the same order.
        num_moved: those that both have, in another order.
        groups: what differs, the largest effect on the peak first, then the largest.
        is_whole: whether the history begins with the process, so that nothing lived before.
        num_operators: allocations of the history whose operator is known; 0 without C++ frames.
        first_step: of the simulation, in the compared part; 0 is set-up.
        last_step: of the simulation, in the compared part.
        ends_early: whether the history goes on after the end of the simulation.
        versions: of what the simulation ran with, such as {"torch": "2.9.0"}.
        releases: of PyTorch that have the lines of the history's stacks, such as "2.6"; none where they tell nothing.
    """

    reporters: ClassVar = Reporters[Any]()
    saved_as = "diff", "a difference between snapshot and simulation"

    snapshot: str
    subject: str
    device: str
    real: Levels
    simulated: Levels
    num_aligned: int
    num_moved: int
    groups: tuple[Group, ...]
    is_whole: bool
    num_operators: int
    first_step: int
    last_step: int
    ends_early: bool
    versions: dict[str, str] = field(default_factory=dict)
    releases: tuple[str, ...] = ()

    def summary(self) -> str:
        """How much is the same."""
        real, simulated = self.real.num_allocations, self.simulated.num_allocations
        return f"{self.num_aligned:,} of {real:,} real and {simulated:,} simulated allocations aligned"

    @property
    def num_missing(self) -> int:
        """Allocations that only the device was asked for."""
        return self.real.num_allocations - self.num_aligned - self.num_moved

    @property
    def num_invented(self) -> int:
        """Allocations that only the simulation was asked for."""
        return self.simulated.num_allocations - self.num_aligned - self.num_moved

    @property
    def is_same(self) -> bool:
        """Whether every allocation is the same, in the same order."""
        return self.num_aligned == self.real.num_allocations == self.simulated.num_allocations

    def to_json(self) -> dict[str, Any]:
        """A plain structure that `json` can write, and `from_json` read back."""
        counts = {"num_missing": self.num_missing, "num_invented": self.num_invented}
        return {**Saved.to_json(self), **counts}


@dataclass(frozen=True, slots=True)
class Simulated:
    """What is compared with a snapshot: what a program asked for, and what the device made of it."""

    subject: str
    device: str
    timeline: Timeline
    replay: Replay


def compare_with(
    snapshot: MemorySnapshot, simulated: Simulated, device: int | None = None, versions: dict[str, str] | None = None
) -> SnapshotDifference:
    """How a history differs from a simulation.

    Args:
        snapshot: of the real device.
        simulated: the same program, simulated.
        device: number of the real device; None: the only one that has a history.
        versions: of what the simulation ran with.

    Raises:
        BadFile: there is no such history, or the two have nothing in common.
    """
    events = snapshot.history(device)
    blocks = simulated_allocations(simulated.timeline)
    real = real_allocations(events, {block.op for block in blocks})
    if not real:
        raise BadFile(f"{snapshot.path} has a history without any allocation: there is nothing to compare.")
    replay = replay_snapshot(snapshot, device, driver_addresses=True)
    is_whole = replay.before == (0, 0)
    first, last = _window([one.size_bytes for one in real], [one.size_bytes for one in blocks], from_start=is_whole)
    window = blocks[first:last]
    pairs = _aligned(real, window)
    if len(pairs) < min(_GRAM, (len(real) + 9) // 10):
        raise BadFile(
            f"{snapshot.path} and the simulation of {simulated.subject} have nothing in common: {len(pairs)} of "
            f"{len(real):,} allocations could be aligned. Name the program that made the snapshot, with its arguments."
        )
    if not is_whole:
        pairs = _tightened(real, window, pairs)
        cut = pairs[0][1]
        first, window = first + cut, window[cut:]
        pairs = [(one, other - cut) for one, other in pairs]
    window = window[: pairs[-1][1] + 1]
    return _Comparison(snapshot, simulated, (real, window), pairs, replay.levels, replay.before).result(
        is_whole, versions or {}, tuple(".".join(map(str, release)) for release in releases_of(events))
    )


def _window(real: Sequence[int], simulated: Sequence[int], *, from_start: bool) -> tuple[int, int]:
    """(first, last) of the simulated sizes that a history may show; where it occurs several times, the last."""
    length = len(real)
    starts = [0] if from_start else _offsets(real[:_PROBE], simulated)
    backwards = _offsets(real[: -_PROBE - 1 : -1], simulated[::-1])
    ends = [len(simulated) - offset for offset in backwards]
    spans = [(start, end) for start in starts for end in ends if 0.5 * length <= end - start <= 2 * length]
    if spans:
        # The nearest in length; of those that are as near, the last: it is the warmest.
        nearest = min(abs(end - start - length) for start, end in spans)
        near = nearest + max(2 * _BIN, length // 100)
        start, end = max(span for span in spans if abs(span[1] - span[0] - length) <= near)
    elif starts:
        start = starts[0] if from_start else max(starts)
        end = start + length + length // 4
    else:
        start, end = 0, len(simulated)
    return (0 if from_start else max(0, start - _SLACK)), min(len(simulated), end + _SLACK)


def _offsets(probe: Sequence[int], whole: Sequence[int]) -> list[int]:
    """Where `probe` begins in `whole`, by the runs of sizes that both have; the best places, about as good."""
    places: dict[tuple[int, ...], list[int]] = defaultdict(list)
    wanted = {tuple(probe[index : index + _GRAM]) for index in range(len(probe) - _GRAM + 1)}
    for index in range(len(whole) - _GRAM + 1):
        gram = tuple(whole[index : index + _GRAM])
        if gram in wanted:
            places[gram].append(index)
    votes: Counter[int] = Counter()
    for index in range(len(probe) - _GRAM + 1):
        found = places.get(tuple(probe[index : index + _GRAM]), ())
        for position in found:
            votes[(position - index) // _BIN] += 1
    if not votes:
        return []
    together = {place: votes[place - 1] + votes[place] + votes[place + 1] for place in votes}
    best = max(together.values())
    chosen = [place for place, count in together.items() if count >= 0.8 * best]
    return sorted(max(0, place * _BIN) for place in chosen)


def _aligned(real: Sequence[Allocation], simulated: Sequence[Allocation]) -> list[tuple[int, int]]:
    """Pairs of the same size in the same order: those of the same operator first, then others between them."""
    both = align([(one.size_bytes, one.op) for one in real], [(one.size_bytes, one.op) for one in simulated])
    pairs: list[tuple[int, int]] = []
    start = other_start = 0
    for end, other_end in [*both, (len(real), len(simulated))]:
        sizes = [one.size_bytes for one in real[start:end]]
        others = [one.size_bytes for one in simulated[other_start:other_end]]
        if sizes and others:
            pairs += [(start + one, other_start + other) for one, other in align(sizes, others)]
        if end < len(real) or other_end < len(simulated):
            pairs.append((end, other_end))
        start, other_start = end + 1, other_end + 1
    return pairs


def _tightened(
    real: Sequence[Allocation], simulated: Sequence[Allocation], pairs: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The same number of pairs nearer together, where there are such.

    Pairs are the first that there are. Where steps repeat each other, a history that began amid one may have its
    beginning in the step before: seen from its end, the pairs are the last that there are.
    """
    (_, first), (_, last) = pairs[0], pairs[-1]
    if last - first < len(real):
        return pairs
    backwards = _aligned(real[::-1], simulated[last::-1])
    others = [(len(real) - 1 - one, last - other) for one, other in reversed(backwards)]
    return others if len(others) >= len(pairs) and others[0][1] > first else pairs


def _moved(left: Iterable[tuple[int, int, int]], others: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Pairs of those left over, (index, size, aligned ones before it), that have the same size and are near."""
    by_size: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for index, size, before in others:
        places, indices = by_size[size]
        places.append(before)
        indices.append(index)
    pairs = []
    for index, size, before in left:
        if size not in by_size:
            continue
        places, indices = by_size[size]
        after = bisect_left(places, before)
        near = [place for place in (after - 1, after) if 0 <= place < len(places)]
        nearest = min(near, key=lambda place: abs(places[place] - before), default=None)
        if nearest is not None and abs(places[nearest] - before) <= _NEAR:
            pairs.append((index, indices.pop(nearest)))
            del places[nearest]
    return pairs


class _Comparison:
    """Aligned allocations, with the memory that each side had."""

    def __init__(
        self,
        snapshot: MemorySnapshot,
        simulated: Simulated,
        sides: tuple[Sequence[Allocation], Sequence[Allocation]],
        pairs: list[tuple[int, int]],
        levels: Sequence[tuple[int, int]],
        before: tuple[int, int],
    ) -> None:
        self._snapshot, self._simulated = snapshot, simulated
        self._real, self._window = sides
        self._pairs, self._levels, self._before = pairs, levels, before
        self._groups: dict[tuple[DifferenceKind, str, str, str, str], tuple[list[int], list[int]]] = {}
        aligned = {one for one, _ in pairs}
        others = {other for _, other in pairs}
        firsts, seconds = [one for one, _ in pairs], [other for _, other in pairs]
        self._moved = _moved(
            [(n, one.size_bytes, bisect_left(firsts, n)) for n, one in enumerate(self._real) if n not in aligned],
            [(n, one.size_bytes, bisect_left(seconds, n)) for n, one in enumerate(self._window) if n not in others],
        )
        starts = [block.start for block in self._window]
        # The part ends where the simulation goes on to allocate something else.
        after = [block.start for block in simulated.timeline.blocks if block.start > starts[-1]]
        self._first_tick, self._last_tick = starts[0], min(after, default=simulated.timeline.num_ticks)
        # What was freed before the first allocation is no part of the comparison: a simulation has no such beginning.
        first = self._real[0].start
        self._real_before = levels[first - 1][0] if first else before[0]
        peaks = [level for level, _ in levels]
        self._peak = peaks.index(max(peaks))
        # The simulation at that moment: just after the last aligned allocation.
        last = bisect_right([self._real[one].start for one in firsts], self._peak) - 1
        self._peak_tick = self._window[seconds[max(last, 0)]].start

    def result(self, is_whole: bool, versions: dict[str, str], releases: tuple[str, ...]) -> SnapshotDifference:
        """The difference."""
        self._group_all()
        replay, timeline = self._simulated.replay, self._simulated.timeline
        ticks = slice(self._first_tick, self._last_tick)
        before = replay.allocated[self._first_tick - 1] if self._first_tick else 0
        return SnapshotDifference(
            snapshot=Path(self._snapshot.path).name,
            subject=self._simulated.subject,
            device=self._simulated.device,
            real=Levels(
                num_allocations=len(self._real),
                before_bytes=self._real_before,
                allocated_peak_bytes=self._levels[self._peak][0],
                reserved_peak_bytes=max(self._before[1], *(reserved for _, reserved in self._levels)),
                at_peak_bytes=self._levels[self._peak][0],
            ),
            simulated=Levels(
                num_allocations=len(self._window),
                before_bytes=before,
                allocated_peak_bytes=max(before, *replay.allocated[ticks]),
                reserved_peak_bytes=max(replay.reserved[ticks]),
                at_peak_bytes=replay.allocated[self._peak_tick],
            ),
            num_aligned=len(self._pairs),
            num_moved=len(self._moved),
            groups=tuple(sorted(self._made_groups(), key=lambda group: (-abs(group.peak_bytes), -group.size_bytes))),
            is_whole=is_whole,
            num_operators=sum(bool(one.op) for one in self._real),
            first_step=timeline.mark_at(self._first_tick).step,
            last_step=timeline.mark_at(self._window[-1].start).step,
            ends_early=self._ends_early(),
            versions=versions,
            releases=releases,
        )

    def _ends_early(self) -> bool:
        """Whether much of the history's end, and nothing of the simulation's, is left over."""
        left = len(self._real) - 1 - self._pairs[-1][0]
        return left > len(self._real) // 50 and self._window[-1].start == self._simulated.timeline.blocks[-1].start

    def _add(self, kind: DifferenceKind, one: Allocation, peak_bytes: int) -> None:
        key = (kind, one.op, one.source, one.place, one.function)
        sizes, peaks = self._groups.setdefault(key, ([], []))
        sizes.append(one.size_bytes)
        peaks.append(peak_bytes)

    def _made_groups(self) -> Iterable[Group]:
        for key, (sizes, peaks) in self._groups.items():
            most = tuple(Counter(sizes).most_common(_NUM_SIZES))
            yield Group(*key, len(sizes), sum(sizes), most, sum(peaks))

    def _group_all(self) -> None:
        known = {one for one, _ in self._pairs} | {one for one, _ in self._moved}
        others = {other for _, other in self._pairs} | {other for _, other in self._moved}
        for index, one in enumerate(self._real):
            if index not in known:
                self._add(DifferenceKind.MISSING, one, one.size_bytes * _is_live(one, self._peak))
        for index, one in enumerate(self._window):
            if index not in others:
                self._add(DifferenceKind.INVENTED, one, -one.size_bytes * _is_live(one, self._peak_tick))
        for index, other in self._moved:
            one = self._real[index]
            held = _is_live(one, self._peak) - _is_live(self._window[other], self._peak_tick)
            self._add(DifferenceKind.MOVED, one, held * one.size_bytes)
        self._group_lifetimes()

    def _group_lifetimes(self) -> None:
        """Aligned ones that one side returns before, and the other after, some further allocation of both."""
        real_starts = [self._real[one].start for one, _ in self._pairs]
        starts = [self._window[other].start for _, other in self._pairs]
        num_pairs = len(self._pairs)
        for index, other in self._pairs:
            one, block = self._real[index], self._window[other]
            real_end = num_pairs if one.end is None else bisect_left(real_starts, one.end)
            within = block.end is not None and block.end < self._last_tick
            end = bisect_left(starts, block.end) if within and block.end is not None else num_pairs
            if real_end != end:
                held = _is_live(one, self._peak) - _is_live(block, self._peak_tick)
                kind = DifferenceKind.KEPT_LONGER if real_end > end else DifferenceKind.FREED_EARLIER
                self._add(kind, one, held * one.size_bytes)


def _is_live(one: Allocation, moment: int) -> bool:
    return one.start <= moment and (one.end is None or one.end > moment)
