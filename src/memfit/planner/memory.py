"""Memory of a step under any settings, computed from profiles instead of traced.

A training step in its steady state holds fixed bytes (parameters, buffers, optimizer state, the batch) and a curve of
blocks that come and go. Settings change both by rules that are linear in what they switch: a recomputed module takes
its dropped blocks off the curve while they are away, micro-batches scale the blocks that grow with the batch and keep
gradients throughout. So one or two profiles answer for thousands of settings, each in about a millisecond. What is
computed here ranks and prunes; the settings chosen are always traced for real afterwards.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.core.profile import Drop, Profile, Unit
from memfit.core.settings import OptimizerKernels, OptimizerState, Settings
from memfit.core.timeline import Block, Category, Phase
from memfit.planner.timeline_moves import unit_of

Bytes = NDArray[np.float64]

_PERSISTENT = (Category.PARAMETER, Category.BUFFER, Category.OPTIMIZER_STATE, Category.BATCH)
# Bytes of an 8-bit optimizer's state for each byte of a 32-bit one: codes, and one 32-bit scale for 256 of them.
EIGHT_BIT_SHARE = 0.25 * (1 + 4 / 256)
# Temporaries of an update of one parameter at a time, in parameters: what Adam takes, which takes most.
_SINGLE_TEMPORARIES = 3


class Intervals(NamedTuple):
    """Blocks that are away for a while: parallel arrays of block, first tick, tick after the last."""

    block: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]

    @classmethod
    def of(cls, drops: Iterable[Drop]) -> "Intervals":
        """The intervals of some drops; empty ones are left out."""
        rows = [(drop.block, drop.start, drop.end) for drop in drops if drop.start < drop.end]
        return cls(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """What recomputing or offloading one unit does to the curve.

    Args:
        away: blocks that are gone while the unit waits to be recomputed.
        held: blocks that live longer because the unit needs its inputs again.
        kept: blocks that stay for the same reason, though another unit that is recomputed would keep them away.
        hosted: blocks that wait in host memory if what the unit saves does.
        inputs_hosted: those of `hosted` that were made outside of it: what waits if the unit is recomputed as well.
        extra: (tick, bytes): needed for a moment when it is computed again.
    """

    path: str
    away: Intervals
    held: Intervals
    kept: Intervals
    hosted: Intervals
    inputs_hosted: Intervals
    extra: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, unit: Unit, blocks: Sequence[Block]) -> "UnitMemory":
        """That of a unit of a profile with these blocks."""
        calls = unit.calls
        inputs = (drop for call in calls for drop in call.offloads if blocks[drop.block].start < call.forward[0])
        return cls(
            unit.path,
            Intervals.of(drop for call in calls for drop in call.drops),
            Intervals.of(drop for call in calls for drop in call.holds),
            Intervals.of(drop for call in calls for drop in call.keeps),
            Intervals.of(drop for call in calls for drop in call.offloads),
            Intervals.of(inputs),
            tuple((call.backward[0], call.extra_bytes) for call in calls),
        )


class StepMemory:
    """The steady-state step of a profile; at any batch size, where it was profiled at another one (`larger`), too."""

    def __init__(self, profile: Profile, larger: Profile | None = None) -> None:
        self.profile = profile
        timeline = profile.timeline
        # The steady state is that of step 1, up to its update; updates are alike, but the last is in full.
        self._first = next(mark.tick for mark in timeline.marks if mark.phase is Phase.FORWARD)
        updates = [mark.tick for mark in timeline.marks if mark.phase is Phase.OPTIMIZER] or [timeline.num_ticks]
        self._last = updates[0]
        blocks = timeline.blocks
        sizes = np.array([block.size_bytes for block in blocks], dtype=np.float64)
        self._constant, self._slope = sizes, np.zeros_like(sizes)
        self.scales = larger is not None and _same(profile, larger)
        if self.scales and larger is not None and profile.batch_size and larger.batch_size:
            others = np.array([block.size_bytes for block in larger.timeline.blocks], dtype=np.float64)
            self._slope = (others - sizes) / (larger.batch_size - profile.batch_size)
            self._constant = sizes - self._slope * profile.batch_size
        category = np.array([str(block.category) for block in blocks], dtype=object)
        self._start = np.array([block.start for block in blocks], dtype=np.int64)
        self._end = np.array([timeline.num_ticks if b.end is None else b.end for b in blocks], dtype=np.int64)
        inside = (self._start >= self._first) & (self._start < self._last)
        before = self._start < self._first
        self._is_gradient = inside & (category == Category.GRADIENT)
        self._fixed = {kind: (category == kind) & (before | (kind is Category.OPTIMIZER_STATE)) for kind in _PERSISTENT}
        # Workspaces that a library keeps for good count from the start.
        self._permanent = np.array([b.end is None and b.category is Category.WORKSPACE for b in blocks], dtype=bool)
        passing = ~np.isin(category, _PERSISTENT)
        self._moving = inside & passing & ~self._permanent
        # Greatest sum of temporary blocks of an update.
        of_update = passing & (self._start >= updates[-1])
        change = np.zeros(max(1, timeline.num_ticks - updates[-1] + 1))
        np.add.at(change, self._start[of_update] - updates[-1], sizes[of_update])
        np.subtract.at(change, self._end[of_update] - updates[-1], sizes[of_update])
        self._update = float(np.cumsum(change).max(initial=0.0))
        self.units = tuple(UnitMemory.of(unit, blocks) for unit in profile.units if not unit.refused)
        self._index = {unit.path: unit for unit in self.units}

    def sizes(self, batch_size: int | None) -> Bytes:
        """Bytes of every block at a batch size."""
        if batch_size is None or not self.scales:
            return self._constant + self._slope * (self.profile.batch_size or 0)
        return np.maximum(0.0, self._constant + self._slope * batch_size)

    def fixed_bytes(self, settings: Settings, batch_size: int | None) -> float:
        """What is there throughout: parameters, buffers, the whole batch, optimizer state, library workspaces."""
        sizes = self.sizes(self.profile.batch_size)
        parts = {kind: float(sizes[mask].sum()) for kind, mask in self._fixed.items()}
        if batch_size and self.profile.batch_size:
            parts[Category.BATCH] *= batch_size / self.profile.batch_size
        if settings.state is OptimizerState.EIGHT_BIT:
            parts[Category.OPTIMIZER_STATE] *= EIGHT_BIT_SHARE
        elif settings.state is OptimizerState.HOST:
            parts[Category.OPTIMIZER_STATE] = 0.0
        shards = settings.num_devices
        for kind in (Category.PARAMETER, Category.OPTIMIZER_STATE):
            parts[kind] = 0.0 if settings.shard_offload else parts[kind] / shards
        gathered = 0.0
        if shards > 1:
            # Two units at a time, and what belongs to no repeated unit.
            per_unit: dict[str | None, float] = {None: 0.0}
            for index in np.flatnonzero(self._fixed[Category.PARAMETER]):
                block = self.profile.timeline.blocks[index]
                unit = unit_of(block.module, 1)
                per_unit[unit] = per_unit.get(unit, 0.0) + block.size_bytes
            gathered = per_unit.pop(None) + 2 * max(per_unit.values(), default=0.0)
        return sum(parts.values()) + float(sizes[self._permanent].sum()) + gathered

    def curve(self, settings: Settings, batch_size: int | None) -> Bytes:
        """Live bytes at each tick of forward and backward pass, of the last micro-batch of an update."""
        sizes = self.sizes(micro_size(settings, batch_size))
        change = self._plain_change(settings, sizes)
        chosen = [self._index[path] for path in settings.checkpoint if path in self._index]
        for unit in chosen:
            self._subtract(change, unit.away, sizes, 1.0)
        for _, held in held_segments(chosen):
            self._subtract(change, held, sizes, -1.0)
        for one in chosen:
            for other in chosen:
                if one is not other:
                    self._subtract(change, overlap(one, other), sizes, -1.0)
        for hosted in self._hosted(settings):
            self._subtract(change, hosted, sizes, 1.0)
        curve = np.cumsum(change)[:-1] + self.fixed_bytes(settings, batch_size)
        scale = self._extra_scale(micro_size(settings, batch_size))
        for tick, extra in (pair for unit in chosen for pair in unit.extra):
            if 0 <= tick - self._first < len(curve):
                curve[tick - self._first] += extra * scale
        return curve

    def _hosted(self, settings: Settings) -> list[Intervals]:
        """What waits in host memory of each module: of one that is computed again, its inputs alone."""
        units = [self._index[path] for path in settings.offload if path in self._index]
        return [unit.inputs_hosted if unit.path in settings.checkpoint else unit.hosted for unit in units]

    def _extra_scale(self, micro: int | None) -> float:
        """By how much less a micro-batch needs for the moment than the profiled batch."""
        own = self.profile.batch_size
        return micro / own if own and micro and self.scales else 1.0

    def _plain_change(self, settings: Settings, sizes: Bytes) -> Bytes:
        """Change of live bytes at each tick of forward and backward pass, before any module is recomputed."""
        span = self._last - self._first
        change = np.zeros(span + 1)
        moving = self._moving
        start = np.clip(self._start[moving] - self._first, 0, span)
        end = self._end[moving]
        own = sizes[moving].copy()
        gradient = self._is_gradient[moving]
        accumulates = settings.micro_batches > 1 or not settings.set_to_none
        total = float(own[gradient].sum())
        if settings.num_devices > 1:
            own[gradient] /= settings.num_devices
            total /= settings.num_devices
        if accumulates or settings.step_in_backward:
            # A fresh gradient is added to the one that waits, or used up, and freed at once.
            end = np.where(gradient, self._start[moving] + 1, end)
        if settings.step_in_backward and settings.kernels is not OptimizerKernels.FUSED:
            own[gradient] *= 1 + _SINGLE_TEMPORARIES
        end = np.clip(end - self._first, 0, span)
        np.add.at(change, start, own)
        np.subtract.at(change, end, own)
        if accumulates and not settings.step_in_backward:
            change[0] += total
        return change

    def _subtract(self, change: Bytes, away: Intervals, sizes: Bytes, sign: float) -> None:
        span = len(change) - 1
        own = sign * sizes[away.block]
        np.subtract.at(change, np.clip(away.start - self._first, 0, span), own)
        np.add.at(change, np.clip(away.end - self._first, 0, span), own)

    @cached_property
    def moments(self) -> NDArray[np.int64]:
        """Ticks of the curve at which a peak can be, whatever is recomputed.

        Between two of them the curve only rises or only falls, and nothing comes back from being away.
        """
        plain = self._plain_change(Settings(), self._constant + self._slope * (self.profile.batch_size or 1))
        span = len(plain) - 1
        # A tick is a peak of the plain curve where the next event frees something.
        falls = np.append(plain[1:span] < 0, True)
        ticks = set(np.flatnonzero(falls & (plain[:span] >= 0)).tolist())
        for unit in self.units:
            for intervals in (unit.away, unit.hosted, unit.inputs_hosted):
                ticks.update((intervals.end - self._first).tolist())
            ticks.update((unit.held.start - self._first).tolist())
            ticks.update((unit.kept.start - self._first).tolist())
            ticks.update(tick - self._first for tick, _ in unit.extra)
        # A gradient that is used up at once is a peak of its own.
        ticks.update((self._start[self._is_gradient] - self._first).tolist())
        return np.array(sorted(tick for tick in ticks if 0 <= tick < span), dtype=np.int64)

    def savings(self, away: Intervals, micro: int | None, again: UnitMemory | None = None) -> Bytes:
        """Bytes that are away at each of `moments`, less what it takes for the moment to compute a unit again."""
        change = np.zeros(self._last - self._first + 1)
        self._subtract(change, away, self.sizes(micro), -1.0)
        saved: Bytes = np.cumsum(change)[self.moments]
        for tick, extra in () if again is None else again.extra:
            saved[self.moments == tick - self._first] -= extra * self._extra_scale(micro)
        return saved

    def update_bytes(self, settings: Settings, batch_size: int | None) -> float:
        """Live bytes at the highest point of the optimizer's update."""
        if settings.step_in_backward:
            return 0.0
        gradients = self._constant[self._is_gradient]
        largest = float(gradients.max(initial=0.0))
        temporaries = self._update / settings.num_devices
        if settings.kernels is OptimizerKernels.SINGLE:
            temporaries = min(temporaries, _SINGLE_TEMPORARIES * largest)
        elif settings.kernels is OptimizerKernels.FUSED or settings.state is OptimizerState.HOST:
            temporaries = 0.0
        elif settings.state is OptimizerState.EIGHT_BIT:
            temporaries = 4 * largest
        shard_bytes = float(gradients.sum()) / settings.num_devices
        return self.fixed_bytes(settings, batch_size) + shard_bytes + temporaries

    def peak(self, settings: Settings, batch_size: int | None) -> float:
        """Greatest number of live bytes in a step."""
        curve = self.curve(settings, batch_size)
        return max(float(curve.max(initial=0.0)), self.update_bytes(settings, batch_size))

    def hosted_bytes(self, settings: Settings, batch_size: int | None) -> float:
        """Bytes of activations that wait in host memory."""
        sizes = self.sizes(micro_size(settings, batch_size))
        return sum(float(sizes[hosted.block].sum()) for hosted in self._hosted(settings))


def held_segments(units: Sequence[UnitMemory]) -> list[tuple[tuple[int, ...], Intervals]]:
    """(places of units in the list, what lives longer if any of them is recomputed), each stretch once.

    Stretches are cut so that each is held by all of its units alike: two don't hold it twice.
    """
    by_block: dict[int, list[tuple[int, int, int]]] = {}
    for index, unit in enumerate(units):
        for block, start, end in np.transpose(unit.held).tolist():
            by_block.setdefault(block, []).append((start, end, index))
    segments: dict[tuple[int, ...], list[Drop]] = {}
    for block, spans in by_block.items():
        edges = sorted({edge for start, end, _ in spans for edge in (start, end)})
        for first, last in pairwise(edges):
            holders = tuple(sorted({index for start, end, index in spans if start <= first and last <= end}))
            if holders:
                segments.setdefault(holders, []).append(Drop(block, first, last))
    return [(holders, Intervals.of(drops)) for holders, drops in segments.items()]


def overlap(one: UnitMemory, other: UnitMemory) -> Intervals:
    """When blocks stay for `other` that would be away for `one`, if both are recomputed."""
    away, kept = one.away, other.kept
    indices, places = np.nonzero(away.block[:, None] == kept.block)
    starts = np.maximum(away.start[indices], kept.start[places])
    ends = np.minimum(away.end[indices], kept.end[places])
    some = starts < ends
    return Intervals(away.block[indices][some], starts[some], ends[some])


def micro_size(settings: Settings, batch_size: int | None) -> int | None:
    """Samples of the largest micro-batch."""
    return None if batch_size is None else -(-batch_size // settings.micro_batches)


def _same(a: Profile, b: Profile) -> bool:
    return (
        a.batch_size is not None
        and b.batch_size is not None
        and a.batch_size != b.batch_size
        and len(a.timeline.blocks) == len(b.timeline.blocks)
        and len(a.work) == len(b.work)
        and all(x.start == y.start and x.op == y.op for x, y in zip(a.timeline.blocks, b.timeline.blocks, strict=True))
    )
