"""The simulation: for as long as it runs, PyTorch takes the simulated device for its own.

Four layers, from the user's code down: functions of PyTorch that are replaced, a function mode that shows shape-only
tensors as tensors of the device (`DeviceView`), interceptors that make the device's choices above autograd, and a
dispatch mode that runs operators for their shapes and records what they allocate (`SimulatedOperators`). Modes belong
to a thread; every further thread enters them by `in_thread`.
"""

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from memfit.core.device import Device, Kind
from memfit.core.estimate import Note
from memfit.core.patching import Replacement, around, replaced
from memfit.core.timeline import Category
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.cuda.devices import DeviceProperties
from memfit.frameworks.torch.kernels import attention, fallbacks
from memfit.frameworks.torch.kernels.autocast import Autocast
from memfit.frameworks.torch.kernels.cuda_kernels import CudaInternals
from memfit.frameworks.torch.kernels.host_kernels import host_internals
from memfit.frameworks.torch.kernels.quantized import Quantized
from memfit.frameworks.torch.kernels.recurrent import host_lstm_rule
from memfit.frameworks.torch.shapes.device_labels import DeviceLabels
from memfit.frameworks.torch.shapes.imports import on_import
from memfit.frameworks.torch.shapes.interception import intercepting, switched_on
from memfit.frameworks.torch.shapes.origin import OriginTracker
from memfit.frameworks.torch.shapes.recorder import Recorder
from memfit.frameworks.torch.shapes.shapes import META
from memfit.frameworks.torch.shapes.values import KnownValues
from memfit.frameworks.torch.simulation import flash_attention
from memfit.frameworks.torch.simulation.device_view import DeviceView
from memfit.frameworks.torch.simulation.dispatch import SimulatedOperators
from memfit.frameworks.torch.simulation.releases import release_replacements
from memfit.frameworks.torch.simulation.stand_ins import hidden, standing_in
from memfit.frameworks.torch.simulation.triton_kernels import TritonKernels
from memfit.frameworks.torch.stack import fuses_attention, stack_of

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
        self.on_cuda = on_cuda = device.kind is Kind.CUDA
        device_type = "cuda" if on_cuda else "cpu"
        self.origin = origin
        self._threads = threading.local()
        self.around_backward: Callable[[bool], AbstractContextManager[None]] = lambda accumulates: nullcontext()
        """Entered for each run of the autograd engine; told whether it accumulates gradients."""
        self.notes = Notes(origin)
        self.labels = DeviceLabels(torch.device("cuda", 0) if on_cuda else torch.device("cpu"))
        self.device_view = DeviceView(self.labels, self.notes.report, knows_device=scripted)
        self.autocast = Autocast(device_type)
        self.values = KnownValues() if scripted or follows_values else None
        self.device_view.higher_order.knows = self._knows
        self._cuda = cuda = CudaInternals(device, recorder, self.notes.report) if on_cuda else None
        self.operators = SimulatedOperators(
            recorder,
            origin,
            host_internals() if cuda is None else cuda.table(),
            {"aten::mkldnn_rnn_layer": host_lstm_rule} if cuda is None else cuda.rules(),
            host_is_device=not on_cuda,
            report=self.notes.report,
            labels=self.labels,
            values=self.values,
            copied_in=Category.BATCH if scripted else None,
        )
        self.stack = stack_of(device)
        self.quantized = Quantized(device, self.labels, self.notes.report, self.is_on)
        self.operators.compositions = {**fallbacks.COMPOSITIONS, **self.quantized.compositions(on_cuda=on_cuda)}
        self._triton = TritonKernels(device, recorder, self.is_on, self._forget)
        self._device = device
        self._scripted = scripted
        self._capability = capability = device.capability or (8, 0)
        self._interceptors = (
            attention.cuda_interceptors(
                capability, self.autocast, self.notes.report, fuses_attention=fuses_attention(self.stack)
            )
            if on_cuda
            else attention.host_interceptors(self.autocast)
        )

    @contextmanager
    def running(self, replacements: Sequence[Replacement] = ()) -> Iterator[None]:
        """Simulates in this thread while it lasts; `replacements` are further functions of PyTorch."""
        with (
            replaced([*self._about_autocast(), *self._around_callbacks(), *self._about_devices(), *replacements]),
            replaced(release_replacements(self.stack, self.is_on)),
            self._numbers_read_anywhere(),
            self.quantized.running(),
            self._triton.running() if self.on_cuda else nullcontext(),
            self._packed_attention(),
            self.origin.following(self.is_on),
            intercepting(self._interceptors),
            self.in_thread(),
        ):
            yield

    @contextmanager
    def with_stand_ins(self) -> Iterator[None]:
        """While it lasts, code finds packages that only a machine with a GPU has.

        What is made of them is of no use afterwards, so that this is for the process of a script alone.
        """
        with ExitStack() as stack:
            for package in (flash_attention.package(), self._triton.package()) if self.on_cuda else ():
                stack.enter_context(standing_in(package))
            yield

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Simulates in a further thread while it lasts."""
        with switched_on(), self.operators, self.device_view:
            self._threads.present = True
            try:
                yield
            finally:
                self._threads.present = False

    @property
    def grouped_bytes(self) -> int:
        """The most that a grouped convolution may have taken beside what was counted."""
        return 0 if self._cuda is None else self._cuda.grouped_bytes

    @contextmanager
    def away(self) -> Iterator[None]:
        """While it lasts, this thread is not simulated, but for the interceptors: PyTorch's compiler is at work."""
        before = self.is_on()
        modes = [internals.pop_function_mode() for _ in range(internals.num_function_modes())]
        self._threads.present = False
        try:
            with hidden(), internals.disable_current_modes(), self.origin.not_following():
                yield
        finally:
            self._threads.present = before
            for mode in reversed(modes):
                internals.push_function_mode(mode)

    def is_on(self) -> bool:
        """Whether this thread is simulated: one that was there before is not, and must not notice."""
        return getattr(self._threads, "present", False)

    def _knows(self, tensor: torch.Tensor) -> bool:
        with internals.disable_torch_function():
            return not tensor.is_meta or (self.values is not None and self.values.of(tensor) is not None)

    def _forget(self, tensor: torch.Tensor) -> None:
        """A kernel that isn't run may have written other values."""
        if self.values is not None:
            with internals.disable_torch_function():
                self.values.forget(tensor)

    @contextmanager
    def _numbers_read_anywhere(self) -> Iterator[None]:
        """Lets constructors such as `torch.FloatTensor([loss])` read numbers: they switch all modes off first."""
        library = torch.library.Library("aten", "IMPL")
        # The inner `impl`: the outer one refuses to stand in front of PyTorch's own rule, or can't in older releases.
        library.m.impl("_local_scalar_dense", "Meta", self.operators.read_number, False)  # type: ignore[union-attr]
        try:
            yield
        finally:
            internals.forget_rules(library)

    @contextmanager
    def _packed_attention(self) -> Iterator[None]:
        """Nested tensors take the kernel for packed sequences, which CUDA has and shape-only tensors seem to lack."""

        def is_cuda() -> bool:
            return self.on_cuda and self.is_on()

        with ExitStack() as stack:

            def equip(module: ModuleType) -> None:
                flash = torch.nn.attention.SDPBackend.FLASH_ATTENTION
                instead: dict[str, Callable[..., Any]] = {
                    # So PyTorch's own count of operations asks for it.
                    internals.IS_ATTENTION_ON_SHAPES: lambda plain, tensor: True,
                    internals.SELECT_ATTENTION: lambda plain, *args, **options: flash,
                }
                given = [around(module, name, other, is_cuda) for name, other in instead.items()]
                stack.enter_context(replaced(given))

            stack.enter_context(on_import({}, {internals.NESTED_ATTENTION: equip}))
            yield

    def _about_autocast(self) -> list[Replacement]:
        """Autocast for CUDA on a machine without CUDA.

        cuDNN is declared unfit for single tensors, so that recurrent layers leave their shape-only weights as they are.
        """
        plain_clear = torch.clear_autocast_cache

        def clear() -> None:
            self.autocast.clear_cache()
            plain_clear()

        cuda: dict[str, Callable[..., Any]] = {}
        if self.on_cuda:
            cuda = {
                "get_device_capability": lambda plain, device=None: self._capability,
                "synchronize": lambda plain, device=None: None,
            }
        if self.on_cuda and not self._scripted:
            # A script sees all devices, of which one is current. Of a step that memfit drives, code around kernels
            # makes the device of their tensors the current one.
            cuda |= {
                "get_device_properties": lambda plain, device=None: DeviceProperties(self._device, 0),
                "current_device": lambda plain: 0,
                "_exchange_device": lambda plain, index: 0,
                "_maybe_exchange_device": lambda plain, index: 0,
            }
        return [
            Replacement(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
            Replacement(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True),
            *(around(torch.cuda, name, other, self.is_on) for name, other in cuda.items()),
            Replacement(torch, "clear_autocast_cache", clear),
            Replacement(torch.backends.cudnn, "is_acceptable", lambda tensor: False),
            around(torch, "compile", _compile, self.is_on),
        ]

    def _around_callbacks(self) -> list[Replacement]:
        """The device as the user's code is to see it also where PyTorch calls that code."""
        plain_backward = internals.engine_run_backward
        plain_hooks = torch.autograd.graph.saved_tensors_hooks.__init__

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on():
                return plain_backward(*args, **kwargs)
            with self.around_backward(bool(kwargs.get("accumulate_grad"))), self.device_view.again():
                return plain_backward(*args, **kwargs)

        def with_look(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def call(value: Any) -> Any:
                with self.device_view.again() if self.is_on() else nullcontext():
                    return hook(value)

            return call

        def saved_tensors_hooks(hooks: Any, /, pack_hook: Any, unpack_hook: Any) -> None:
            plain_hooks(hooks, with_look(pack_hook), with_look(unpack_hook))

        return [
            Replacement(torch.autograd, "_engine_run_backward", run_backward),
            Replacement(torch.autograd.graph, "_engine_run_backward", run_backward),
            Replacement(torch.autograd.graph.saved_tensors_hooks, "__init__", saved_tensors_hooks),
        ]

    def _about_devices(self) -> list[Replacement]:
        """The device as the user's code is to see it also where PyTorch answers in C++."""
        plain_group = internals.group_tensors
        plain_wrapper = getattr(*internals.place("make_wrapper_subclass"))
        plain_compatible = internals.has_compatible_type

        def group(tensorlistlist: Any, with_indices: bool = False) -> Any:
            groups: dict[Any, Any] = {}
            for (device, dtype), (lists, indices) in plain_group(tensorlistlist, with_indices).items():
                if device is None or device.type != "meta":
                    groups[device, dtype] = (lists, indices)
                    continue
                members: dict[torch.device, list[int]] = {}
                with internals.disable_torch_function():
                    for position, tensor in enumerate(lists[0]):
                        members.setdefault(self.labels.of(tensor), []).append(position)
                for place, positions in members.items():
                    chosen = [[held[i] for i in positions] if held else held for held in lists]
                    groups[place, dtype] = (chosen, [indices[i] for i in positions] if indices else indices)
            return groups

        def make_wrapper_subclass(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on():
                # The compiler's own tensors among them.
                return plain_wrapper(*args, **kwargs)
            place = self.device_view.place
            if kwargs.get("device") is not None and place(kwargs["device"]) is not None:
                kwargs = {**kwargs, "device": META}
            # Nested tensors name it by its position.
            args = tuple(META if isinstance(each, torch.device) and place(each) is not None else each for each in args)
            return plain_wrapper(*args, **kwargs)

        def compatible(tensor: torch.Tensor, other: torch.Tensor) -> bool:
            # As between CPU and CUDA: a parameter stays the same object when its module moves (`DeviceView._set_data`).
            with internals.disable_torch_function():
                moves = tensor.is_meta != other.is_meta
            return moves or bool(plain_compatible(tensor, other))

        return [
            Replacement(*internals.place("has_compatible_type"), compatible),
            # Other ways in which a module may move: its parameters would not be the same objects afterwards.
            Replacement(torch.__future__, "get_swap_module_params_on_conversion", lambda: False),
            Replacement(torch.__future__, "get_overwrite_module_params_on_conversion", lambda: False),
            Replacement(*internals.place("make_wrapper_subclass"), staticmethod(make_wrapper_subclass)),
            Replacement(*internals.place("group_tensors"), group),
        ]


def _compile(plain: Callable[..., Any], model: Any = None, **options: Any) -> Any:
    if internals.checks_program(model):
        return model
    # Loads the compiler, which would take a stand-in for Triton for the real one.
    with hidden():
        return plain(model, **options)


class UsualCollector:
    """Collects by the objects of the traced program alone; what its operators make does not count."""

    def __init__(self) -> None:
        self._thresholds = gc.get_threshold()
        self._depth = 0
        self._before = 0
        self._own = 0

    @contextmanager
    def running(self, operators: SimulatedOperators) -> Iterator[None]:
        """Collects while it lasts, from a count of nothing on; the collector is off before and after."""
        gc.collect()
        gc.callbacks.append(self._collected)
        operators.around = self
        gc.enable()
        try:
            yield
        finally:
            gc.disable()
            operators.around = nullcontext()
            gc.callbacks.remove(self._collected)
            gc.set_threshold(*self._thresholds)

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            gc.disable()
            self._before = gc.get_count()[0]

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._own += gc.get_count()[0] - self._before
            # A threshold of nothing would turn the collector off.
            gc.set_threshold(max(1, self._thresholds[0] + self._own), *self._thresholds[1:])
            gc.enable()

    def _collected(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "stop":
            self._own = 0
            gc.set_threshold(*self._thresholds)
