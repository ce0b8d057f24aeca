"""The profile: a step run on shapes under closer observation, so that a planner knows what each move would save.

Two runs. The first is the trace itself, watched: which module calls which, what autograd saves in each call, when that
is used and let go (`CallWatch`). The second is the forward pass alone with nothing saved at all: where a block ends in
it, nobody but autograd holds it any more. A block that a call made and saved is gone, if that call is computed again,
from the later of two moments: that end, and the one at which the nodes outside of the call have let it go.

Both runs allocate in the same order, so that blocks have the same numbers.
"""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from memfit.adapters.torch.fitting import profile_refusals as refusals
from memfit.adapters.torch.fitting.profile_calls import CallWatch
from memfit.adapters.torch.fitting.profile_features import FeatureWatch, features_of
from memfit.adapters.torch.fitting.profile_units import units_of
from memfit.adapters.torch.job import common_first_dimension
from memfit.adapters.torch.trace import Step, _Tracer
from memfit.core.device import Device
from memfit.core.errors import StepFailed
from memfit.core.profile import Profile, Unit
from memfit.core.timeline import Phase, Timeline


def profile(step: Step, device: Device) -> Profile:
    """Runs `step` on a simulated `device` and says what the planner has to know about it."""
    try:
        watched = _WatchedTracer(step, device)
        timeline = watched.run().timeline
    except StepFailed:
        # Some code refuses to run under autograd's hooks, such as torch.func. What fails without them fails again here.
        watched = _WatchedTracer(step, device, hooks=False)
        timeline = watched.run().timeline
    watch = watched.watch
    units: tuple[Unit, ...] = ()
    if step.training and watched.hooks:
        ends = _ends_without_saving(step, device, timeline, watch)
        if watch.sees_objects:
            _refuse_changing_objects(step, device, watch)
        if ends is not None:
            units = units_of(timeline, watch, ends, watched.recorder)
    parameters = list(step.model.parameters())
    return Profile(
        timeline=timeline,
        units=units,
        work=tuple(watch.log.operations),
        batch_size=common_first_dimension(step.batch),
        optimizer=watched.optimizer_name,
        features=frozenset(watched.features),
        num_parameters=sum(p.numel() for p in parameters),
        num_trainable=sum(p.numel() for p in parameters if p.requires_grad),
    )


class _WatchedTracer(_Tracer):
    """A tracer that watches what it traces."""

    def __init__(self, step: Step, device: Device, *, hooks: bool = True) -> None:
        super().__init__(step, device)
        self.hooks = hooks
        self.optimizer_name = ""
        self.features: set[str] = set()
        found = FeatureWatch(self.recorder)
        self.watch = CallWatch(self.recorder, self.origin, self.simulation.operators, found)

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

    def _infer(self, batch: Any) -> list[tuple[int, int]]:
        with self.watch.watching(self.step.model, hooks=False):
            segments = super()._infer(batch)
        self.features = self.watch.features.found | features_of(self.step.model, None)
        return segments


def _versions(model: torch.nn.Module) -> list[tuple[int, int]]:
    """How often each buffer has changed, but for those in which a batch norm counts."""
    with torch._C.DisableTorchFunction():
        return [
            (id(buffer), buffer._version)
            for module in model.modules()
            if not isinstance(module, _NormBase)
            for buffer in module._buffers.values()
            if buffer is not None
        ]


class _Over(BaseException):
    """Ends a run whose forward pass is over; no handler for errors of the step may take it for one."""


class _ForwardTracer(_Tracer):
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
            return False
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

    def _around(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _over(self) -> None:
        """Called at the end of the forward pass."""


class _ForgettingTracer(_ForwardTracer):
    """Runs the forward pass with a graph that saves nothing."""

    @contextmanager
    def _around(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(_forget, _made_up):
            yield


class _HoldingTracer(_ForwardTracer):
    """Runs the forward pass and keeps every object that a module is given, to see whether it changes."""

    changed: dict[int, str]

    @contextmanager
    def _around(self) -> Iterator[None]:
        self.changed = {}
        self._watch = CallWatch(self.recorder, self.origin, self.simulation.operators, FeatureWatch(self.recorder))
        self._watch.objects = []
        self._watch.begin()
        with self._watch.watching(self.step.model, hooks=False):
            yield

    def _over(self) -> None:
        for number, before in self._watch.objects or ():
            kind = refusals.changed_object(before)
            if kind:
                self.changed[number] = kind


def _forget(tensor: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunction():
        return tensor.shape, tensor.stride(), tensor.dtype


def _made_up(kept: Any) -> torch.Tensor:
    """For a backward pass inside of the forward pass, as gradient penalties have one."""
    shape, stride, dtype = kept
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _refuse_changing_objects(step: Step, device: Device, watch: CallWatch) -> None:
    """A list that grows after a call would give the call another input when it is computed again."""
    tracer = _HoldingTracer(step, device)
    if tracer.run_forward():
        for number, kind in tracer.changed.items():
            if number < len(watch.calls) and not watch.calls[number].refused:
                watch.calls[number].refused = refusals.ARGUMENT_CHANGED_LATER.format(kind=kind)


def _ends_without_saving(step: Step, device: Device, timeline: Timeline, watch: CallWatch) -> dict[int, int] | None:
    """For each block that ends in a forward pass that saves nothing: the tick of `timeline` at which that would be.

    None where that pass went another way, as code that depends on its own past may.
    """
    tracer = _ForgettingTracer(step, device)
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
