"""A program on a simulated device: who allocates what, in which phase of which step, and where it runs out.

`Session` puts the simulation, a memory that can be full and the watchers of steps and models together. Nothing in the
program has been prepared for it: phases are told from what it does. A model that is called begins a forward pass, the
autograd engine's start a backward pass, an optimizer's hooks an update.
"""

import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch

from memfit.allocator import replay_variants
from memfit.allocator.live import LiveAllocator
from memfit.core.device import Device
from memfit.core.dryrun import Failure, ProgramFacts
from memfit.core.estimate import (
    CACHE_RELEASED,
    DRY_RUN,
    PAGED_STATE,
    WORKSPACE_DROPPED,
    Estimate,
    HostMemory,
    Note,
    at_most_notes,
)
from memfit.core.patching import Replacement, around, replaced
from memfit.core.redirected_files import RedirectedFiles
from memfit.core.settings import Settings
from memfit.core.spread import spreads_of
from memfit.core.timeline import Category, Phase
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.apply.script_settings import ScriptSettings, has_fused_kernel
from memfit.frameworks.torch.compilation.compiled_steps import CompiledSteps
from memfit.frameworks.torch.cuda.devices import CudaDevices
from memfit.frameworks.torch.cuda.libraries import cuda_replacements
from memfit.frameworks.torch.cuda.memory import out_of_memory_message
from memfit.frameworks.torch.cuda.random import SimulatedGenerator
from memfit.frameworks.torch.script.checkpoints import Checkpoints
from memfit.frameworks.torch.script.launchers import ACCELERATE, Launchers
from memfit.frameworks.torch.script.steps import StepCounter
from memfit.frameworks.torch.shapes import interception, unsimulated
from memfit.frameworks.torch.shapes.imports import on_import
from memfit.frameworks.torch.shapes.origin import OriginTracker, uncompiled_path
from memfit.frameworks.torch.shapes.restoration import Restoration, random_states_kept
from memfit.frameworks.torch.shapes.shapes import Known, tensors
from memfit.frameworks.torch.shapes.stand_in import LargeWeights, parts_of, tensors_in
from memfit.frameworks.torch.simulation.distributed import distributed_replacements
from memfit.frameworks.torch.simulation.live_recorder import LiveRecorder
from memfit.frameworks.torch.simulation.simulation import ONE_AT_A_TIME, Simulation
from memfit.frameworks.torch.trace.work import WorkLog

BY_HAND = "updates-by-hand"
ALLOCATOR_SETTINGS = "allocator-settings"
SHORTENED = "timeline-shortened"
UPDATE_AS_EAGER = "update-as-eager"
# More than anyone takes.
NO_END = 2**62


class Session:
    """A simulated device for as long as `running` lasts.

    `configure` is called before the first allocation, with what takes a sentence about each setting not simulated;
    `fitting` changes how the program's steps are run.
    """

    def __init__(
        self,
        device: Device,  # the target
        memory: LiveAllocator,  # what the device can give
        *,
        count: int = 1,  # devices of that kind that PyTorch sees; the memory is that of the first
        steps: int = NO_END,  # optimizer steps after which the program is ended
        settled: Callable[[], None] = lambda: None,  # called after each optimizer step
        configure: Callable[[Callable[[str], None]], None] = lambda report: None,
        fitting: ScriptSettings | None = None,
        watch: bool = False,  # note the work of operators
        compiles: bool = True,  # compile what the program has compiled; it runs as it is otherwise
    ) -> None:
        self.device = device
        self.devices = CudaDevices(device, count)
        self.memory = memory
        self.failures: list[Failure] = []
        self.seen = ProgramFacts()
        self.on_update: Callable[[Any], None] = lambda optimizer: None
        self.on_fork: Callable[[], bool] = lambda: False  # called in a forked process: whether it stays simulated
        self._fitting = fitting or ScriptSettings(Settings(set_to_none=False))
        self._settled = settled
        self._first_block = self._num_recovered = self._num_parameters = 0
        self._parameters: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._updating = False
        self._one_backward = threading.RLock()
        self._backward_threads: set[int] = set()
        self._late = ExitStack()  # what is replaced in libraries that the program imports later
        self._lazy: list[weakref.ref[torch.nn.Module]] = []
        self._work = WorkLog()
        self.origin = OriginTracker(met=self._met, entered=self._entered)

        def report(text: str) -> None:
            simulation.notes.report(ALLOCATOR_SETTINGS, text)

        self.recorder = LiveRecorder(self.origin.current, memory, self._refuse, lambda: configure(report))
        self.recorder.current_stream = lambda: self.devices.current_stream()
        self.simulation = simulation = Simulation(device, self.recorder, self.origin, scripted=True)
        simulation.device_view.on_parameter = lambda parameter: self._classify(parameter, Category.PARAMETER, "")
        simulation.device_view.is_large_weight = LargeWeights(simulation.notes.report)
        self.compiled = CompiledSteps(
            device,
            self.recorder,
            self.origin,
            simulation.is_on,
            simulation.away,
            simulation.notes.report,
            met=self._compiling,
            entered=self._entered_graph,
        )
        self._compiles = compiles
        # Who compiles anything compiles attention.
        simulation.device_view.higher_order.is_fused = lambda: (
            self.compiled.has_begun
            or any(code == unsimulated.COMPILED_AS_EAGER for code, _, _ in simulation.notes.found)
        )
        simulation.around_backward = self._in_backward
        simulation.operators.on_write = self._written
        if watch:
            simulation.operators.on_run = self._worked
        self.launchers = Launchers(self.has_devices, simulation.notes.report)
        self.counter = StepCounter(steps, self._begin_update, self._end_update, simulation.is_on)

    @contextmanager
    def running(self, replacements: Sequence[Replacement] = ()) -> Iterator[None]:
        """Shows PyTorch the device while it lasts."""
        report, counter = self.simulation.notes.report, self.counter
        steps = counter.begin_step, counter.end_step
        # What is done in libraries that the program imports.
        late: dict[str, Callable[[ModuleType], list[Replacement]]] = {
            unsimulated.MODULE: lambda module: unsimulated.update_replacements(module, *steps),
            unsimulated.EXTENSIONS: unsimulated.extension_replacements,
            ACCELERATE: self.launchers.of_accelerate,
        }
        imported = {name: lambda module, make=make: self.replace_late(make(module)) for name, make in late.items()}
        with ONE_AT_A_TIME, ExitStack() as stack, on_import({}, imported):
            if self._compiles:
                internals.load_compiler_tables()
            else:
                stack.enter_context(internals.without_compiler())
            _active.append(self)
            stack.callback(_active.remove, self)
            for handle in counter.watch():
                stack.callback(handle.remove)
            stack.callback(self.recorder.stop)
            stack.callback(self._late.close)
            every = [
                *cuda_replacements(
                    self.devices, self.memory, report, self.simulation.device_view, compiles=self._compiles
                ),
                *distributed_replacements(
                    self.devices.installed, report, lambda bucket: self._classify(bucket, Category.GRADIENT, "")
                ),
                *self.launchers.replacements(),
                *self._replacements(),
                *replacements,
            ]
            compiling = self.compiled.running(shapes_vary=True) if self._compiles else nullcontext()
            with self.simulation.running(every), compiling:
                yield

    def replace_late(self, replacements: Iterable[Replacement]) -> None:
        """Puts more in place, for the rest of the session."""
        self._late.enter_context(replaced(replacements))

    def has_devices(self, count: int) -> None:
        """There are at least so many devices, as the program's launcher says."""
        self.devices.installed = max(count, self.devices.installed)
        vars(torch.cuda)["default_generators"] = tuple(map(SimulatedGenerator, range(self.devices.installed)))

    @contextmanager
    def visiting(self) -> Iterator[None]:
        """`running`, after which the process goes on as if nothing had been: models that moved come back."""
        restoration = Restoration()
        simulation = self.simulation
        simulation.device_view.on_departure = restoration.remember
        self.on_update = restoration.remember_optimizer
        report = simulation.notes.report
        with (
            tempfile.TemporaryDirectory(prefix="memfit-dryrun-", ignore_cleanup_errors=True) as folder,
            random_states_kept(),
        ):
            # Other threads of the process go on with files of their own.
            own = threading.get_ident()
            concerns = lambda: threading.get_ident() == own or _is_simulated(threading.current_thread())  # noqa: E731
            files = RedirectedFiles(folder, keeps_new=True, report=report, concerns=concerns)
            checkpoints = Checkpoints(files, report, simulation.device_view.put, simulation.labels.of)
            try:
                with files.in_place(), self.running([*restoration.replacements(), *checkpoints.replacements()]):
                    yield
            finally:
                restoration.restore()

    def _replacements(self) -> list[Replacement]:
        def start(plain: Callable[[Any], None], thread: threading.Thread) -> None:
            # Threads of the program are simulated, and not those of others that were there before.
            vars(thread)["_memfit_simulated"] = self.simulation.is_on()
            plain(thread)

        def bootstrap(plain: Callable[[Any], None], thread: threading.Thread) -> None:
            with self.simulation.in_thread() if _is_simulated(thread) else nullcontext():
                plain(thread)

        def resize(plain: Callable[..., Any], storage: torch.UntypedStorage, size: int) -> Any:
            result = plain(storage, size)
            if storage.device.type == "meta" and not self.simulation.labels.has(storage):
                # How sharded parameters are let go and brought back.
                self.recorder.resized(storage, "resize_")
            return result

        return [
            around(torch.UntypedStorage, "resize_", resize),
            around(threading.Thread, "start", start),
            around(threading.Thread, "_bootstrap_inner", bootstrap),
            Replacement(torch.optim.Optimizer, "__init__", self.counter.counting_init(self._fitting.made)),
            *self._fitting.replacements(),
        ]

    @contextmanager
    def _in_backward(self, accumulates: bool) -> Iterator[None]:
        if internals.current_autograd_node() is not None:
            # Inside of a backward pass it is a part of that one, such as checkpointing's.
            yield
            return
        # Passes of several threads come one after another: gradients are looked at in between.
        with self._one_backward:
            self.counter.begin_backward()
            self._fitting.left()
            self.recorder.classify_live(self._first_block, Category.ACTIVATION)
            self._enter(Phase.BACKWARD)
            yield
            self.counter.end_backward()
            self._backward_threads.add(threading.get_ident())
            if len(self._backward_threads) > 1:
                # Gradients of another thread's model may go while they are looked at.
                return
            if self._updating:
                # An optimizer that asks for the loss itself, again and again.
                self._enter(Phase.OPTIMIZER)
            for key, (reference, module) in list(self._parameters.items()):
                parameter = reference()
                if parameter is None:
                    del self._parameters[key]
                elif parameter.grad is not None:
                    self._classify(parameter.grad, Category.GRADIENT, module)

    @property
    def unrecovered(self) -> bool:
        """Whether the device was full after the last step taken."""
        return len(self.failures) > self._num_recovered

    def marked_failures(self, *, survived: bool) -> list[Failure]:
        """The failures; those the program went on after are marked as handled, all of them where it `survived`."""
        known = len(self.failures) if survived else self._num_recovered
        return [replace(failure, handled=number < known) for number, failure in enumerate(self.failures)]

    def estimate(self, subject: str, seconds: float, *, died: bool) -> Estimate:
        """What has been seen of `subject` so far; `died` says that the last failure was the end of it."""
        timeline = self.recorder.timeline()
        seen = self.recorder.replay(self.failures[-1].out_of_memory if died and self.failures else None)
        context_bytes = self.device.context_bytes or 0
        host = {}
        with suppress(ImportError):
            import resource

            # What the process has held at most; its host tensors were real. In KiB, but on macOS in bytes.
            unit = 1 if sys.platform == "darwin" else 1024
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
            host["the script's own process, without loader workers (measured)"] = most
        if self.simulation.quantized.managed_bytes:
            host[PAGED_STATE] = self.simulation.quantized.managed_bytes
        notes = list(self.simulation.notes.found.values())
        if self.recorder.dropped_workspace:
            text = "cuDNN fell back to slower algorithms that need no workspace, for lack of memory"
            notes.append(Note(WORKSPACE_DROPPED, text))
        if not timeline.blocks:
            notes.append(Note("nothing-on-device", "nothing was put on the device"))
        notes += at_most_notes(timeline)
        if self.counter.num_passes:
            notes.append(Note(BY_HAND, "no optimizer and no update of a parameter was seen: backward passes are steps"))
        if seen.num_retries:
            text = "the device was so full that the allocator returned cached memory and asked again: it fits, but "
            notes.append(Note(CACHE_RELEASED, text + "pauses cost time"))
        reserved = seen.reserved_peak_bytes
        on_cuda = self.simulation.on_cuda
        tight_bytes = min(timeline.without_optional().peak()[1], reserved) if on_cuda else reserved
        return Estimate(
            subject=subject,
            device=self.device,
            mode=DRY_RUN,
            precision="as given",
            batch_size=None,
            timeline=timeline,
            replay=seen,
            context_bytes=context_bytes,
            certain_bytes=min(timeline.certain().peak()[1], reserved) + context_bytes,
            tight_bytes=tight_bytes + context_bytes,
            host=HostMemory(host),
            notes=tuple(notes),
            spreads=spreads_of(self.device, seen, grouped_bytes=self.simulation.grouped_bytes),
            vary=partial(replay_variants, timeline, self.memory.options) if on_cuda else None,
            num_parameters=self._num_parameters,
            seconds=seconds,
        )

    def _met(self, model: torch.nn.Module, name: str) -> None:
        """A model is called for the first time: its parameters get their names."""
        self._fitting.met(model, name)
        plain = getattr(model, "_orig_mod", model)
        self.seen = replace(self.seen, models=(*self.seen.models, type(plain).__name__))
        prefix = f"{name}." if name else ""
        if any(map(torch.nn.parameter.is_lazy, model.parameters())):
            # Its shapes are found out in this call; it is met again in the next.
            self._lazy.append(weakref.ref(model))
        for path, parameter in model.named_parameters():
            if not torch.nn.parameter.is_lazy(parameter):
                self._name(parameter, (prefix + uncompiled_path(path)).rpartition(".")[0])
        for path, buffer in model.named_buffers():
            self._classify(buffer, Category.BUFFER, (prefix + uncompiled_path(path)).rpartition(".")[0])

    def _name(self, parameter: torch.Tensor, module: str) -> None:
        if id(parameter) not in self._parameters:
            self._num_parameters += parameter.numel()
        self._parameters[id(parameter)] = (weakref.ref(parameter), module)
        self._classify(parameter, Category.PARAMETER, module)

    def _written(self, tensor: torch.Tensor) -> None:
        """A tensor is changed in place; where that is a parameter and there is no optimizer, it is a step."""
        if self.counter.has_optimizer:
            self.simulation.operators.on_write = None
            return
        # A parameter of a model, a view of one (`parameter.data`), or a tensor that is learned.
        is_parameter = (tensor.requires_grad and tensor.is_leaf) or (
            tensor.layout is torch.strided and self.recorder.category(tensor) is Category.PARAMETER
        )
        if self.recorder.phase is Phase.SETUP or not is_parameter:
            return
        before = self.counter.num_steps
        self.counter.updated_by_hand()
        if self.counter.num_steps > before:
            self.simulation.notes.report(BY_HAND, "no optimizer was made: updates of parameters count as steps")
            self._settled()

    def _entered(self, model: torch.nn.Module) -> None:
        tidied = self.recorder.tidy()
        if tidied is not None:
            self._first_block = tidied.block(self._first_block)
            self.failures = [replace(failure, tick=tidied.tick(failure.tick)) for failure in self.failures]
            self.simulation.notes.report(SHORTENED, "the timeline omits blocks that were freed long before the end")
        if any(reference() is model for reference in self._lazy):
            self._lazy = [reference for reference in self._lazy if reference() is not model]
            self._met(model, self.origin.path(model))
        if internals.current_autograd_node() is None:
            if self.recorder.phase is not Phase.FORWARD:
                self._enter(Phase.FORWARD)
            self._fitting.entered()

    def _compiling(self, frame: Any) -> bool:
        """A function is about to be compiled: models that only its code calls get their names; False leaves it eager.

        Compiled, an optimizer would not call the hooks that steps are counted by.
        """
        names = (name for name in frame.f_code.co_names if name in frame.f_globals)
        used = [*frame.f_locals.values(), *(frame.f_globals[name] for name in names)]
        if any(isinstance(value, torch.optim.Optimizer) for value in used):
            text = "an optimizer's update that torch.compile was asked to compile is counted as eager"
            self.simulation.notes.report(UPDATE_AS_EAGER, text)
            return False
        for value in used:
            if isinstance(value, torch.nn.Module):
                self.origin.meet(value)
        return True

    def _entered_graph(self) -> None:
        """A compiled graph runs: a forward pass, where it is neither a part of a backward pass nor of an update."""
        if internals.current_autograd_node() is None and self.recorder.phase is Phase.SETUP and torch.is_grad_enabled():
            self._enter(Phase.FORWARD)

    def _enter(self, phase: Phase) -> None:
        self._first_block = self.recorder.num_blocks
        self.recorder.enter(phase, self.counter.num_steps + 1)

    def _begin_update(self, optimizer: Any) -> None:
        self.on_update(optimizer)
        if self.counter.num_steps == 0:
            known = self.seen.optimizers
            fusable = has_fused_kernel(optimizer) and (self.seen.fusable or not known)
            self.seen = replace(self.seen, optimizers=(*known, type(optimizer).__name__), fusable=fusable)
        self._fitting.updating(optimizer)
        self._updating = True
        self._enter(Phase.OPTIMIZER)

    def _worked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, known: Known | None) -> None:
        if not any(tensor.is_meta for tensor in tensors((*args, *kwargs.values(), out))):
            # The host's own work.
            return
        phase = self.recorder.phase
        if phase is not Phase.FORWARD or torch.is_grad_enabled():
            # Without gradients it is an evaluation between two steps.
            self._work.add(self.origin.current()[0], phase, func, args, kwargs, out, known)

    def _end_update(self, optimizer: Any) -> None:
        self._updating = False
        if isinstance(optimizer, torch.optim.Optimizer):
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                known = self._parameters.get(id(parameter))
                if known is None or known[0]() is not parameter:
                    # A tensor that no model holds, such as an image that is optimized itself.
                    self._name(parameter, "")
                module = self._parameters[id(parameter)][1]
                for tensor in tensors_in(dict(optimizer.state.get(parameter, {}))):
                    self._classify(tensor, Category.OPTIMIZER_STATE, module)
        else:
            for tensor in unsimulated.state_of(optimizer):
                self._classify(tensor, Category.OPTIMIZER_STATE, "")
        self._fitting.updated(optimizer)
        if self.counter.num_steps <= 1:
            # Such as an exponential moving average of the weights, which no module holds.
            parameters = [reference() for reference, _ in self._parameters.values()]
            self.recorder.reclassify_copies([p.numel() * p.element_size() for p in parameters if p is not None])
        # From here until a model is called it is the loop's own work.
        self._enter(Phase.FORWARD)
        self._num_recovered = len(self.failures)
        self.simulation.operators.host_reads.step_taken()
        self.seen = replace(self.seen, work=self._work.operations)
        self._work = WorkLog()
        self._settled()

    def _classify(self, tensor: Any, category: Category, module: str) -> None:
        with internals.disable_torch_function():
            if internals.is_functorch_tensor(tensor):
                # One of `torch.func`, which has no memory of its own.
                return
            for part in parts_of(tensor):
                if part.is_meta:
                    self.recorder.classify(part, category, module)

    def _refuse(self, size_bytes: int, op: str) -> Exception:
        """PyTorch's own error, noted with where and when it is raised."""
        message = out_of_memory_message(self.device, self.memory, size_bytes)
        if self.recorder.phase is Phase.FORWARD and torch.is_grad_enabled():
            self.recorder.classify_live(self._first_block, Category.ACTIVATION)
        with internals.disable_torch_function():
            module, inner = self.origin.current()
            source, code = self.origin.user_line()
        self.failures.append(
            Failure(
                message=message,
                tick=self.recorder.num_ticks,
                requested_bytes=size_bytes,
                allocated_bytes=self.memory.allocated_bytes,
                reserved_bytes=self.memory.reserved_bytes,
                source=source or inner,
                code=code,
                module=module,
                op=op,
                phase=self.recorder.phase,
                step=self.recorder.step,
                by_category=self.recorder.live_bytes(),
                other_bytes=self.memory.others_bytes,
            )
        )
        return torch.OutOfMemoryError(message)


def _is_simulated(thread: threading.Thread) -> bool:
    return bool(vars(thread).get("_memfit_simulated"))


_active: list[Session] = []


def _forked() -> None:
    """Processes that are forked off, such as a loader's workers, leave the simulation at once."""
    if _active and not _active[-1].on_fork():
        leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def leave() -> None:
    """Nothing is simulated in this thread any more."""
    while internals.num_function_modes():
        internals.pop_function_mode()
    while internals.num_dispatch_modes():
        internals.pop_dispatch_mode()
    interception.switch_off()
