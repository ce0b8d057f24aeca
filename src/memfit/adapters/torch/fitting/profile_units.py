"""Turns what was seen of a step into the units of its profile: what each call of a module would save, and keep.

What happens to a block that a call made, if the call is computed again (`torch.utils.checkpoint`, not reentrant):
nothing that a node inside of the call saves is kept; everything that is held otherwise stays. The inputs of the call
are kept until its backward pass is over. At the first use of anything saved inside, the forward pass of the call runs
again, up to the last tensor that it saves.
"""

import math
from collections import defaultdict

from memfit.adapters.torch.fitting import profile_refusals as refusals
from memfit.adapters.torch.fitting.profile_calls import OUTSIDE, CallWatch, ModuleCall, Save
from memfit.adapters.torch.recorder import Recorder
from memfit.core.profile import Call, Drop, Unit
from memfit.core.timeline import Category, Timeline

# They are there anyway.
_GIVEN = (Category.PARAMETER, Category.BUFFER, Category.BATCH)


def units_of(timeline: Timeline, watch: CallWatch, ends: dict[int, int], recorder: Recorder) -> tuple[Unit, ...]:
    """Every module that was called.

    Args:
        timeline: of the step.
        watch: what was seen of it.
        ends: tick at which each block would end if autograd saved nothing.
        recorder: knows which blocks are permanent.
    """
    accounts = _Accounts(timeline, watch, ends, recorder)
    calls: dict[int, list[tuple[ModuleCall, Call]]] = defaultdict(list)
    for seen in watch.calls:
        calls[id(seen.module)].append((seen, accounts.call(seen)))
    units = []
    for pairs in calls.values():
        first = pairs[0][0]
        refused = next((seen.refused for seen, _ in pairs if seen.refused), "")
        if not refused and all(call.backward[0] >= call.backward[1] for _, call in pairs):
            refused = refusals.NO_BACKWARD
        is_leaf = next(first.module.children(), None) is None
        if is_leaf and not any(call.drops or call.offloads for _, call in pairs):
            continue
        units.append(Unit(first.path, type(first.module).__name__, tuple(call for _, call in pairs), refused))
    return tuple(units)


class _Accounts:
    """Who holds which block, and until when."""

    def __init__(self, timeline: Timeline, watch: CallWatch, ends: dict[int, int], recorder: Recorder) -> None:
        self._blocks = timeline.blocks
        self._events = list(timeline.events())[: watch.end_of_backward]
        self._watch = watch
        self._ends = ends
        self._permanent = recorder.permanent
        self._by_block: dict[int, list[Save]] = defaultdict(list)
        self._inside: list[list[Save]] = [[] for _ in watch.calls]
        self._backward: list[list[tuple[int, int]]] = [[] for _ in watch.calls]
        for save in watch.saves:
            self._by_block[save.block].append(save)
            for number in self._around(save.call):
                self._inside[number].append(save)
        for seen in watch.calls:
            if seen.backward is not None:
                for number in self._around(seen.number):
                    self._backward[number].append(seen.backward)

    def _around(self, number: int) -> list[int]:
        found = []
        while number != OUTSIDE:
            found.append(number)
            number = self._watch.calls[number].parent
        return found

    def call(self, seen: ModuleCall) -> Call:
        """All that the profile says about one call."""
        saves = self._inside[seen.number]
        first, last = self._backward_of(seen.number, saves)
        drops: list[Drop] = []
        returning = 0
        for block in sorted({save.block for save in saves}):
            if not seen.blocks[0] <= block < seen.blocks[1]:
                continue
            start = self._needed_outside(block, seen)
            end = min(first, self._end(block))
            if start <= first < self._end(block):
                returning += self._blocks[block].size_bytes
            if start < end:
                drops.append(Drop(block, int(start), int(end)))
        holds, keeps = self._inputs(seen, last) if saves else ((), ())
        return Call(
            forward=seen.ticks,
            backward=(first, last),
            drops=tuple(drops),
            offloads=self._offloads(seen, saves),
            extra_bytes=max(0, self._peak_again(seen, saves) - returning) if saves else 0,
            operations=seen.operations,
            holds=holds,
            keeps=keeps,
        )

    def _backward_of(self, number: int, saves: list[Save]) -> tuple[int, int]:
        uses = [save.unpacked - 1 for save in saves if save.unpacked is not None]
        spans = self._backward[number]
        begins = uses or [first - 1 for first, _ in spans]
        if not begins:
            return self._watch.backward, self._watch.backward
        over = self._watch.end_of_backward
        ends = [over if save.released is None else min(over, save.released) for save in saves]
        return min(begins), max(*begins, *ends, *(last for _, last in spans), 0)

    def _end(self, block: int) -> float:
        end = self._blocks[block].end
        return math.inf if end is None else end

    def _needed_outside(self, block: int, seen: ModuleCall) -> float:
        """Tick until which somebody else than nodes inside of the call holds a block."""
        until = self._ends.get(block, self._end(block))
        for save in self._by_block[block]:
            if not seen.number <= save.call <= seen.last:
                until = max(until, math.inf if save.released is None else self._settled(save.released))
        return until

    def _settled(self, tick: int) -> int:
        """`tick`, or where only blocks have ended since an earlier one, that: they all end at the same moment."""
        while tick > self._watch.backward and not self._events[tick - 1][1]:
            tick -= 1
        return tick

    def _offloads(self, seen: ModuleCall, saves: list[Save]) -> tuple[Drop, ...]:
        first_use: dict[int, int] = {}
        for save in saves:
            if save.unpacked is not None:
                first_use[save.block] = min(save.unpacked - 1, first_use.get(save.block, save.unpacked))
        found = []
        for block, end in sorted(first_use.items()):
            start = self._needed_outside(block, seen)
            if self._blocks[block].category not in _GIVEN and start < end and start <= self._watch.backward:
                found.append(Drop(block, int(start), end))
        return tuple(found)

    def _inputs(self, seen: ModuleCall, last: int) -> tuple[tuple[Drop, ...], tuple[Drop, ...]]:
        """(inputs where they would have ended in the plain step, inputs where only autograd holds them there)."""
        last = self._settled(last)
        holds, keeps = [], []
        for block in sorted(seen.inputs):
            if self._blocks[block].category in _GIVEN:
                continue
            end = self._end(block)
            free = self._ends.get(block, end)
            if end < last:
                holds.append(Drop(block, int(end), last))
            if free < min(end, last):
                keeps.append(Drop(block, int(free), int(min(end, last))))
        return tuple(holds), tuple(keeps)

    def _peak_again(self, seen: ModuleCall, saves: list[Save]) -> int:
        """Most bytes of its own that the call's forward pass holds up to the last tensor that it saves."""
        live = most = 0
        for block, starts in self._events[seen.ticks[0] : max(save.packed for save in saves)]:
            if seen.blocks[0] <= block < seen.blocks[1] and block not in self._permanent:
                live += self._blocks[block].size_bytes if starts else -self._blocks[block].size_bytes
                most = max(most, live)
        return most
