"""The profile: a step run on shapes under closer observation, so that a planner knows what each move would save.

Two runs. The first is the trace itself, watched: which module calls which, what autograd saves in each call, when that
is used and let go (`CallWatch`). The second is the forward pass alone with nothing saved at all: where a block ends in
it, nobody but autograd holds it any more. A block that a call made and saved is gone, if that call is computed again,
from the later of two moments: that end, and the one at which the nodes outside of the call have let it go.

Both runs allocate in the same order, so that blocks have the same numbers.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from memfit.core.device import Device
from memfit.core.errors import StepFailed
from memfit.core.profile import Call, Drop, Profile, Unit
from memfit.core.timeline import Category, Phase, Timeline
from memfit.core.trace import Trace
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.shapes.batch import common_first_dimension
from memfit.frameworks.torch.shapes.recorder import Recorder
from memfit.frameworks.torch.trace import profile_calls
from memfit.frameworks.torch.trace.profile_calls import OUTSIDE, CallWatch, ModuleCall, Save
from memfit.frameworks.torch.trace.trace import Step, StepTracer
from memfit.frameworks.torch.trace.work import FeatureWatch, features_of


def profile(step: Step, device: Device) -> Profile:
    """Runs a training step on a simulated `device` and says what the planner has to know about it."""
    try:
        watched = _WatchedTracer(step, device)
        timeline = watched.run().timeline
    except StepFailed:
        # Some code refuses to run under autograd's hooks, such as torch.func. What fails without them fails again here.
        watched = _WatchedTracer(step, device, hooks=False)
        timeline = watched.run().timeline
    watch = watched.watch
    units: tuple[Unit, ...] = ()
    if watched.hooks:
        ends = _ends_without_saving(step, device, timeline, watch)
        if watch.sees_objects:
            # A list that grows after a call would give the call another input when it is computed again.
            holding = _HoldingTracer(step, device)
            for number, kind in holding.changed.items() if holding.run_forward() else ():
                if number < len(watch.calls) and not watch.calls[number].refused:
                    watch.calls[number].refused = profile_calls.ARGUMENT_CHANGED_LATER.format(kind=kind)
        if ends is not None:
            units = _units(timeline, watch, ends, watched.recorder)
    parameters = list(step.model.parameters())
    return Profile(
        timeline=timeline,
        units=units,
        work=watch.log.operations,
        batch_size=common_first_dimension(step.batch),
        optimizer=watched.optimizer_name,
        features=frozenset(watched.features),
        num_parameters=sum(p.numel() for p in parameters),
        num_trainable=sum(p.numel() for p in parameters if p.requires_grad),
    )


def compiled_profile(eager: Profile, traced: Trace) -> Profile:
    """The profile of a step as it was traced compiled, from the one that it has uncompiled.

    The compiler decides what is kept for the backward pass, so no module of it can be computed again.
    """
    units = tuple(replace(unit, calls=(), refused=profile_calls.COMPILED) for unit in eager.units)
    return replace(eager, timeline=traced.timeline, units=units, work=traced.work)


class _WatchedTracer(StepTracer):
    """A tracer that watches what it traces."""

    def __init__(self, step: Step, device: Device, *, hooks: bool = True) -> None:
        super().__init__(step, device)
        self.hooks = hooks
        self.optimizer_name = ""
        self.features: set[str] = set()
        self.watch = CallWatch(self.recorder, self.origin, self.simulation.operators, FeatureWatch(self.recorder))

    def _train(self, optimizer: Any, batch: Any) -> list[tuple[int, int]] | None:
        if optimizer is not None:
            self.optimizer_name = type(optimizer).__name__
        before = _versions(self.step.model)
        with self.watch.watching(self.step.model, hooks=self.hooks):
            segments = super()._train(optimizer, batch)
        self.features = self.watch.features.found | features_of(self.step.model, optimizer)
        if before != _versions(self.step.model):
            self.features.add("changing-buffers")
        return segments


def _versions(model: torch.nn.Module) -> list[tuple[int, int]]:
    """How often each buffer has changed, but for those in which a batch norm counts."""
    with internals.disable_torch_function():
        return [
            (id(buffer), internals.version_of(buffer))
            for module in model.modules()
            if not isinstance(module, internals.NormBase)
            for buffer in internals.buffers_of(module).values()
            if buffer is not None
        ]


class _Over(BaseException):
    """Ends a run whose forward pass is over; no handler for errors of the step may take it for one."""


class _ForwardTracer(StepTracer):
    """Runs the forward pass alone."""

    length = 0
    """Number of events of the forward pass and what came before it."""

    def run_forward(self) -> bool:
        """Whether the forward pass was run to its end."""
        try:
            self.run()
        except _Over:
            return True
        except StepFailed:
            pass
        return False

    def _train(self, optimizer: Any, batch: Any) -> list[tuple[int, int]] | None:
        entered: list[Phase] = []

        def on_enter(phase: Phase, step: int) -> None:
            if entered:
                self.length = len(self.recorder.events)
                self._over()
                raise _Over
            entered.append(phase)

        with self._around():
            self.recorder.on_enter = on_enter
            return super()._train(optimizer, batch)

    def _around(self) -> AbstractContextManager[Any]:
        """With a graph that saves nothing."""

        def forget(tensor: torch.Tensor) -> Any:
            with internals.disable_torch_function():
                return tensor.shape, tensor.stride(), tensor.dtype

        def made_up(kept: Any) -> torch.Tensor:
            # For a backward pass inside of the forward pass, as gradient penalties have one.
            shape, stride, dtype = kept
            with internals.disable_torch_function(), internals.disable_torch_dispatch():
                return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

        return torch.autograd.graph.saved_tensors_hooks(forget, made_up)

    def _over(self) -> None:
        """Called at the end of the forward pass."""


class _HoldingTracer(_ForwardTracer):
    """Runs the forward pass and keeps every object that a module is given, to see whether it changes."""

    def __init__(self, step: Step, device: Device) -> None:
        super().__init__(step, device)
        self.changed: dict[int, str] = {}
        self._watch = CallWatch(self.recorder, self.origin, self.simulation.operators, FeatureWatch(self.recorder))
        self._watch.objects = []

    def _around(self) -> AbstractContextManager[None]:
        self._watch.begin()
        return self._watch.watching(self.step.model, hooks=False)

    def _over(self) -> None:
        changes = ((number, profile_calls.changed_object(before)) for number, before in self._watch.objects or ())
        self.changed.update((number, kind) for number, kind in changes if kind)


def _ends_without_saving(step: Step, device: Device, timeline: Timeline, watch: CallWatch) -> dict[int, int] | None:
    """For each block that ends in a forward pass that saves nothing: the tick of `timeline` at which that would be.

    None where that pass went another way, as code that depends on its own past may.
    """
    tracer = _ForwardTracer(step, device)
    if not tracer.run_forward():
        return None
    starts = [block.start for block in timeline.blocks]
    num_blocks = bisect_right(starts, watch.backward - 1)
    ends: dict[int, int] = {}
    made = 0
    for event in tracer.recorder.events[: tracer.length]:
        if event < 0:
            ends[~event] = starts[made - 1] + 1
        elif event < len(tracer.recorder.sizes):
            made += 1
            if made > num_blocks or tracer.recorder.sizes[event] != timeline.blocks[event].size_bytes:
                return None
    return ends if made == num_blocks else None


# They are there anyway.
_GIVEN = (Category.PARAMETER, Category.BUFFER, Category.BATCH)


def _units(timeline: Timeline, watch: CallWatch, ends: dict[int, int], recorder: Recorder) -> tuple[Unit, ...]:
    """Every module that was called; `ends` are the ticks at which blocks would end if autograd saved nothing."""
    accounts = _Accounts(timeline, watch, ends, recorder)
    calls: dict[int, list[tuple[ModuleCall, Call]]] = defaultdict(list)
    for seen in watch.calls:
        calls[id(seen.module)].append((seen, accounts.call(seen)))
    units = []
    for pairs in calls.values():
        first = pairs[0][0]
        refused = next((seen.refused for seen, _ in pairs if seen.refused), "")
        if not refused and all(call.backward[0] >= call.backward[1] for _, call in pairs):
            refused = profile_calls.NO_BACKWARD
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
        # Of each call, with those inside of it.
        self._inside: list[list[Save]] = [[] for _ in watch.calls]
        self._backward: list[list[tuple[int, int]]] = [[] for _ in watch.calls]
        for save in watch.saves:
            self._by_block[save.block].append(save)
            for number in self._outwards(save.call):
                self._inside[number].append(save)
        for seen in watch.calls:
            if seen.backward is not None:
                for number in self._outwards(seen.number):
                    self._backward[number].append(seen.backward)

    def _outwards(self, number: int) -> Iterator[int]:
        while number != OUTSIDE:
            yield number
            number = self._watch.calls[number].parent

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
        drops = []
        for block, end in sorted(first_use.items()):
            start = self._needed_outside(block, seen)
            if self._blocks[block].category not in _GIVEN and start < end and start <= self._watch.backward:
                drops.append(Drop(block, int(start), end))
        return tuple(drops)

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
