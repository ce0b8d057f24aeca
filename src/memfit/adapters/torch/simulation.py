"""The simulation: for as long as it runs, PyTorch takes the simulated device for its own.

Four layers, from the user's code down: functions of PyTorch that are replaced (`answers`), a function mode that shows
shape-only tensors as tensors of the device (`Look`), interceptors that make the device's choices above autograd
(`choices`), and a dispatch mode that runs operators for their shapes and records what they allocate
(`SimulatedOperators`). Modes belong to a thread; every further thread enters them by `in_thread`.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.adapters.torch import choices, fallbacks
from memfit.adapters.torch.answers import autocast_answers, look_answers
from memfit.adapters.torch.autocast import Autocast
from memfit.adapters.torch.cuda_kernels import CudaInternals
from memfit.adapters.torch.dispatch import SimulatedOperators
from memfit.adapters.torch.host_kernels import HostInternals
from memfit.adapters.torch.interception import intercepting, switched_on
from memfit.adapters.torch.look import Look
from memfit.adapters.torch.origin import OriginTracker
from memfit.adapters.torch.places import Places
from memfit.adapters.torch.recorder import Recorder
from memfit.adapters.torch.replacement import Replacement, replaced
from memfit.adapters.torch.values import KnownValues
from memfit.core.device import Device, Kind
from memfit.core.estimate import Note
from memfit.core.timeline import Category

_MAX_NOTES = 50
# A simulation replaces a few functions of PyTorch for the whole process, so only one may run.
ONE_AT_A_TIME = threading.RLock()


@dataclass(slots=True)
class Notes:
    """The assumptions made on the way, each once per line of code."""

    origin: OriginTracker
    found: dict[tuple[str, str, str], Note] = field(default_factory=dict)

    def report(self, code: str, text: str) -> None:
        """Notes an assumption at the line that runs now."""
        source = self.origin.current()[1]
        # A value read by no line of the user's is read by the framework, such as an optimizer's step counter.
        if not source and code == fallbacks.STAND_IN:
            return
        # Each kind has its own limit: many files saved must not hide a size that was assumed.
        if sum(known[0] == code for known in self.found) < _MAX_NOTES:
            self.found.setdefault((code, text, source), Note(code, text, source))


class Simulation:
    """A device of the catalogue in the place of a real one.

    Args:
        device: the target.
        recorder: receives every allocation.
        origin: knows where the user's code is.
        scripted: a whole program runs in it, which sees the device from the start and whose values are followed;
            otherwise it is one step that memfit drives.
        follows_values: the values of small tensors are followed in a step, too.
    """

    def __init__(
        self,
        device: Device,
        recorder: Recorder,
        origin: OriginTracker,
        *,
        scripted: bool = False,
        follows_values: bool = False,
    ) -> None:
        on_cuda = device.kind is Kind.CUDA
        device_type = "cuda" if on_cuda else "cpu"
        self.origin = origin
        self._threads = threading.local()
        self.around_backward: Callable[[bool], AbstractContextManager[None]] = lambda accumulates: nullcontext()
        """Entered for each run of the autograd engine; told whether it accumulates gradients."""
        self.notes = Notes(origin)
        self.places = Places(torch.device("cuda", 0) if on_cuda else torch.device("cpu"))
        self.look = Look(self.places, self.notes.report, knows_device=scripted)
        self.autocast = Autocast(device_type)
        self.values = KnownValues() if scripted or follows_values else None
        internals = CudaInternals(device, recorder, self.notes.report) if on_cuda else HostInternals()
        self.operators = SimulatedOperators(
            recorder,
            origin,
            internals.table(),
            internals.rules(),
            host_is_device=not on_cuda,
            report=self.notes.report,
            places=self.places,
            values=self.values,
            copied_in=Category.BATCH if scripted else None,
        )
        self._capability = capability = device.capability or (8, 0)
        self._on_cuda = on_cuda
        self._interceptors = (
            choices.cuda_interceptors(capability, self.autocast, self.notes.report)
            if on_cuda
            else choices.host_interceptors(self.autocast)
        )

    @contextmanager
    def running(self, answers: Sequence[Replacement] = ()) -> Iterator[None]:
        """Simulates in this thread while it lasts; `answers` replace further functions of PyTorch."""
        with (
            replaced([*autocast_answers(self.autocast), *self._look_answers(), *self._device_answers(), *answers]),
            self._numbers_read_anywhere(),
            self.origin.following(self.is_on),
            intercepting(self._interceptors),
            self._present(),
            self.operators,
            self.look,
        ):
            yield

    def _look_answers(self) -> list[Replacement]:
        return look_answers(self.look, self.places, self.is_on, self.around_backward)

    def _device_answers(self) -> list[Replacement]:
        """What a model may ask about the device that its tensors are on; a whole program has more to ask."""
        if not self._on_cuda:
            return []
        plain = torch.cuda.get_device_capability

        def capability(device: Any = None) -> tuple[int, int]:
            return self._capability if self.is_on() else plain(device)

        return [Replacement(torch.cuda, "get_device_capability", capability)]

    @contextmanager
    def _numbers_read_anywhere(self) -> Iterator[None]:
        """Lets constructors such as `torch.FloatTensor([loss])` read numbers: they switch all modes off first."""
        library = torch.library.Library("aten", "IMPL")
        # The inner `impl`: the outer one refuses to stand in front of PyTorch's own rule, or can't in older releases.
        library.m.impl("_local_scalar_dense", "Meta", self.operators.read_number, False)  # type: ignore[union-attr]
        try:
            yield
        finally:
            library._destroy()

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Simulates in a further thread while it lasts."""
        with switched_on(), self._present(), self.operators, self.look:
            yield

    @contextmanager
    def _present(self) -> Iterator[None]:
        self._threads.present = True
        try:
            yield
        finally:
            self._threads.present = False

    def is_on(self) -> bool:
        """Whether this thread is simulated: one that was there before is not, and must not notice."""
        return getattr(self._threads, "present", False)


@contextmanager
def eager() -> Iterator[None]:
    """Compiled models run uncompiled: shape-only tensors have nothing to compile for."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        yield
        return
    before = dynamo.config.disable
    dynamo.config.disable = True
    try:
        yield
    finally:
        dynamo.config.disable = before
