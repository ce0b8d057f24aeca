"""The trace: a user's training step, run on shapes, as a `Timeline`.

One pass through forward, backward and two optimizer steps is enough: the second step of a training loop differs from
the first only in its optimizer, so its timeline is composed from the record of the first (`Recorder.timeline`).
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from memfit.core.device import Device
from memfit.core.errors import BadLoss, BadOptimizer, StepFailed
from memfit.core.estimate import NOT_COMPILED, Note
from memfit.core.settings import Settings
from memfit.core.timeline import Category, Phase
from memfit.core.trace import Trace
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.apply.single_updates import empty_copy
from memfit.frameworks.torch.compilation.compiled_steps import CompiledSteps, not_compiled
from memfit.frameworks.torch.shapes import failures
from memfit.frameworks.torch.shapes.failures import explained
from memfit.frameworks.torch.shapes.origin import OriginTracker, uncompiled_path
from memfit.frameworks.torch.shapes.recorder import Recorder
from memfit.frameworks.torch.shapes.restoration import random_states_kept
from memfit.frameworks.torch.shapes.stand_in import ShapeCopies, dense_parts, map_tensors, parts_of, swapped, tensors_in
from memfit.frameworks.torch.shapes.tensor_types import AUTOCAST, WEIGHTS
from memfit.frameworks.torch.simulation.simulation import ONE_AT_A_TIME, Simulation
from memfit.frameworks.torch.trace import loop
from memfit.frameworks.torch.trace.work import WorkLog

if TYPE_CHECKING:
    from memfit.frameworks.torch.apply.fitted import Fitted

OPTIMIZER = "(optimizer)"


@dataclass(frozen=True, slots=True)
class Step:
    """One training step to trace, or, where not `training`, a forward pass without gradients.

    `optimizer` is an instance, a callable on parameters, or None; `precision` None leaves the model as it is. Where
    `settings` say how the step is run, they also say what becomes of gradients.
    """

    model: torch.nn.Module
    loss: Callable[[Any, Any], Any]
    batch: Any
    optimizer: Any = None
    precision: str | None = None
    training: bool = True
    set_to_none: bool = True
    settings: Settings | None = None
    keep_outputs: bool = False
    data_parallel: int = 1


def trace(step: Step, device: Device, *, compiles: bool = True) -> Trace:
    """Runs `step` on a simulated `device`; what `torch.compile` was asked to compile is compiled, or run as it is."""
    tracer = StepTracer(step, device, compiles)
    try:
        return tracer.run()
    except (StepFailed, BadLoss) as failure:
        if tracer.compiled is None or not tracer.compiled.num_graphs:
            raise
        traced = StepTracer(step, device, compiles=False).run()
        return replace(traced, notes=(*traced.notes, Note(NOT_COMPILED, not_compiled(failure.__cause__ or failure))))


class StepTracer:
    """Runs a step once on a simulated device and records it."""

    def __init__(self, step: Step, device: Device, compiles: bool = False) -> None:
        self.compiles = compiles
        self.step = step
        self.device = device
        self.origin = OriginTracker(step.model)
        self.recorder = Recorder(self.origin.current)
        self.simulation = Simulation(device, self.recorder, self.origin)
        self.last_loss: Any = None
        self.gives_weight = False
        self.module_of: dict[int, str] = {}
        self.fitted: Fitted | None = None
        # Where the batch is in parts, those that repeat are left out.
        self._is_whole = step.settings is None or step.settings.micro_batches == 1
        self.hooked = loop.HookedUpdates()
        self._step_number = 0
        self._first_of_part = 0
        self.log = WorkLog()
        self.log.is_on = False
        self.simulation.operators.on_run = self._ran
        self.compiled: CompiledSteps | None = None

    def run(self) -> Trace:
        """The trace of the step."""
        step = self.step
        copies = ShapeCopies(WEIGHTS.get(step.precision or ""))
        parameters = list(step.model.parameters())
        with ExitStack() as stack:
            stack.enter_context(ONE_AT_A_TIME)
            # Whoever still holds the simulation must not hold the model with it.
            stack.callback(setattr, self.simulation.operators, "on_run", None)
            stack.enter_context(undisturbed(compiles=self.compiles))
            # Wherever it is called from: this also switches gradients on.
            stack.enter_context(torch.inference_mode(False))
            if step.training:
                stack.enter_context(self.hooked.carried_over(step.model, copies))
            stack.enter_context(swapped(step.model, copies))
            if step.settings is not None and step.settings.compile:
                # Not where it would meet stand-ins for libraries that it looks for.
                internals.compiler(loads=True)
            batch = map_tensors(step.batch, copies.of)
            stack.enter_context(self.simulation.running())
            if self.compiles and internals.compiler() is not None:
                simulation = self.simulation
                self.compiled = CompiledSteps(
                    self.device,
                    self.recorder,
                    self.origin,
                    simulation.is_on,
                    simulation.away,
                    simulation.notes.report,
                    ran=lambda kernel: self.log.add_kernel("", self.recorder.phase, kernel),
                )
                # One size of batch is as good as another: a trace is of one.
                stack.enter_context(self.compiled.running(shapes_vary=False))
            optimizer = optimizer_for(step.optimizer, step.model, copies, parameters) if step.training else None
            stack.enter_context(self.hooked.emptied(optimizer))
            self.recorder.enter(Phase.SETUP, 0)
            if step.training and step.settings is not None:
                optimizer = self._fit(stack, step.settings, optimizer)
            self._set_up(step.model, batch)
            self._enter_loop(stack)
            segments = self._train(optimizer, batch) if step.training else self._infer(batch)
            self.recorder.stop()
            parameter_bytes = sum(p.numel() * p.element_size() for p in step.model.parameters())
            batch_bytes = sum(t.numel() * t.element_size() for x in tensors_in(batch) for t in dense_parts(x))
        is_compiled = self.compiled is not None and bool(self.compiled.num_graphs)
        return Trace(
            self.recorder.timeline(segments),
            tuple(self.simulation.notes.found.values()),
            sum(p.numel() for p in parameters),
            parameter_bytes,
            batch_bytes,
            0 if self.fitted is None else self.fitted.host_bytes,
            self.simulation.quantized.managed_bytes,
            self.gives_weight,
            work=self.log.operations,
            grouped_bytes=self.simulation.grouped_bytes,
            # Compiling anew for each size would take too long.
            has_regimes=self.simulation.on_cuda and not is_compiled,
        )

    def _ran(self, *operation: Any) -> None:
        """Notes an operator of the step that is counted: the first, with the update of the second."""
        is_compiled = self.compiled is not None and self.compiled.is_running
        self.log.add("", self.recorder.phase, *operation, is_compiled=is_compiled)

    def _fit(self, stack: ExitStack, settings: Settings, optimizer: Any) -> Any:
        """Runs the steps as `settings` say; gives the optimizer that they make of this one."""
        # Fitting is for plans: estimates do without.
        from memfit.frameworks.torch.apply.fitted import Fitted
        from memfit.frameworks.torch.apply.sharding import simulated_group

        stack.enter_context(simulated_group(self.simulation, self.recorder, self.device, settings.num_devices))
        with failures.explained("preparation"):
            self.fitted = stack.enter_context(
                Fitted(
                    settings,
                    self.step.model,
                    optimizer,
                    self._observe,
                    around=self.origin.inside,
                    updating=self._updating,
                    # All others repeat the second.
                    most_parts=2,
                )
            )
        return self.fitted.optimizer

    def _enter_loop(self, stack: ExitStack) -> None:
        step = self.step
        if step.data_parallel > 1 and step.training:
            around = loop.data_parallel(step.model, step.data_parallel, self.simulation, self.recorder, self.device)
            with failures.explained("preparation"):
                stack.enter_context(around)
        if step.keep_outputs:
            stack.enter_context(loop.outputs_kept(step.model))

    def _set_up(self, model: torch.nn.Module, batch: Any) -> None:
        for name, parameter in model.named_parameters():
            self.module_of[id(parameter)] = uncompiled_path(name).rpartition(".")[0]
            self._add(parameter, uncompiled_path(name), Category.PARAMETER)
        for name, buffer in model.named_buffers():
            self._add(buffer, uncompiled_path(name), Category.BUFFER)
        for tensor in tensors_in(batch):
            for part in dense_parts(tensor):
                self.recorder.add(part, "batch", Category.BATCH)

    def _add(self, tensor: torch.Tensor, name: str, category: Category) -> None:
        module = name.rpartition(".")[0]
        for part in parts_of(tensor):
            if self.recorder.known(part) and self.recorder.category(part) is None:
                # Made when the step was fitted.
                self.recorder.classify(part, category, module)
            # Shards may wait on the host.
            if self.simulation.labels.of(part) == self.simulation.labels.device:
                self.recorder.add_named(part, str(category), category, (module, ""))

    def _forward(self, batch: Any) -> Any:
        step = self.step
        dtype = AUTOCAST.get(step.precision or "")
        device_type = "cuda" if self.simulation.on_cuda else "cpu"
        with torch.autocast(device_type, dtype=dtype) if dtype else nullcontext(), failures.explained("forward"):
            # Each step of a real loop gets a batch of its own, and losses do take batches apart.
            value = step.loss(step.model, map_tensors(batch, lambda tensor: tensor))
        # A loss may come with what it was divided by, for those who add up parts.
        self.gives_weight = isinstance(value, tuple) and len(value) == 2
        wanted = step.settings is not None and step.settings.weighting.kind == "given"
        return value[0] if self.gives_weight and not wanted else value

    def _train(self, optimizer: Any, batch: Any) -> list[tuple[int, int]] | None:
        recorder = self.recorder
        start, start_block = len(recorder.events), recorder.num_blocks
        self.log.is_on = self._is_whole
        self._forward_backward(batch, 1)
        self.log.is_on = False
        after_backward = len(recorder.events)
        self._update(optimizer, batch, 1)
        after_first = len(recorder.events)
        settings = self.step.settings
        set_to_none = self.step.set_to_none if settings is None else settings.set_to_none
        # Otherwise the second step does what the first did, but for the optimizer's state that is there by then.
        updates_early = self.hooked.present or (settings is not None and settings.step_in_backward)
        if not set_to_none or updates_early or self.step.data_parallel > 1:
            self._clear_gradients(optimizer, set_to_none=set_to_none)
            self._forward_backward(batch, 2)
            self._update(optimizer, batch, 2)
            return None
        self._update(optimizer, batch, 2)
        after_second = len(recorder.events)
        self._clear_gradients(optimizer, set_to_none=True)
        end = len(recorder.events)
        again = (start, after_backward)
        if recorder.has_live(start_block, persistent=(Category.OPTIMIZER_STATE,)):
            # Something of the first step outlives it, such as an output kept in a variable: the second step is traced
            # in full.
            self._forward_backward(batch, 2)
            again = (end, len(recorder.events))
        return [
            (0, start),
            (start, after_backward),
            (after_backward, after_first),
            (after_second, end),
            again,
            (after_first, after_second),
        ]

    def _forward_backward(self, batch: Any, number: int) -> None:
        recorder = self.recorder
        if self.fitted is not None:
            self._step_number = number
            with failures.explained("backward"):
                self.last_loss = self.fitted.accumulate(lambda _, part: self._forward(part), batch)
            self._classify_gradients()
            return
        recorder.enter(Phase.FORWARD, number)
        first = recorder.num_blocks
        value = self._forward(batch)
        failures.check_loss(value)
        recorder.classify_live(first, Category.ACTIVATION)
        recorder.enter(Phase.BACKWARD, number)
        with failures.explained("backward"):
            value.backward()
        # The loss, and whatever it holds, lives until the next step replaces it.
        self.last_loss = value
        self._classify_gradients()

    def _observe(self, phase: Phase) -> None:
        """Follows the phases of a fitted step."""
        recorder = self.recorder
        if phase is Phase.FORWARD:
            self._classify_gradients()
            self._first_of_part = recorder.num_blocks
        elif phase is Phase.BACKWARD:
            recorder.classify_live(self._first_of_part, Category.ACTIVATION)
        recorder.enter(phase, self._step_number)

    def _classify_gradients(self) -> None:
        for parameter in self.step.model.parameters():
            if parameter.grad is not None:
                self._classify(parameter.grad, Category.GRADIENT, parameter)
        for updated, state in self.hooked.states():
            self._classify(state, Category.OPTIMIZER_STATE, updated)

    def _classify(self, tensor: torch.Tensor, category: Category, parameter: torch.Tensor) -> None:
        module = self.module_of.get(id(parameter), "")
        for part in parts_of(tensor):
            self.recorder.classify(part, category, module)

    def _update(self, optimizer: Any, batch: Any, number: int) -> None:
        self._step_number = number
        # The first also makes the state.
        self.log.is_on = number == 2 and self._is_whole
        # It computes the loss anew in each step.
        searches = isinstance(optimizer, torch.optim.LBFGS)
        if self.fitted is None or optimizer is None or searches:
            self.recorder.enter(Phase.OPTIMIZER, number)
        if optimizer is None:
            return
        with failures.explained("optimizer step"), self._updating():
            if searches:
                optimizer.step(lambda: self._closure(optimizer, batch))
            elif self.fitted is not None:
                self.fitted.update()
            else:
                optimizer.step()
        for parameter, state in optimizer.state.items():
            for tensor in tensors_in(state):
                self._classify(tensor, Category.OPTIMIZER_STATE, parameter)
        self.log.is_on = False

    @contextmanager
    def _updating(self) -> Iterator[None]:
        with self.origin.inside(OPTIMIZER), self.simulation.device_view.keeping_scalars():
            yield

    def _closure(self, optimizer: Any, batch: Any) -> Any:
        """The loss and its gradients anew, as an optimizer that searches along a line asks for them."""
        if self.fitted is not None:
            phase = self.recorder.phase
            value = self.fitted.accumulate(lambda _, part: self._forward(part), batch)
            self.recorder.enter(phase, self._step_number)
            return value
        optimizer.zero_grad(set_to_none=self.step.set_to_none)
        value = self._forward(batch)
        value.backward()
        return value

    def _clear_gradients(self, optimizer: Any, *, set_to_none: bool) -> None:
        self.last_loss = None
        if self.fitted is not None:
            self.fitted.clear_gradients()
            return
        if optimizer is not None:
            # Loops clear gradients once; those of parameters that the optimizer doesn't know are cleared here too.
            self.log.is_on = not set_to_none
            optimizer.zero_grad(set_to_none=set_to_none)
            self.log.is_on = False
        self.step.model.zero_grad(set_to_none=set_to_none)

    def _infer(self, batch: Any) -> list[tuple[int, int]]:
        start = len(self.recorder.events)
        self.recorder.enter(Phase.FORWARD, 1)
        self.log.is_on = True
        with torch.no_grad():
            value = self._forward(batch)
        self.log.is_on = False
        end = len(self.recorder.events)
        del value
        after = len(self.recorder.events)
        return [(0, start), (start, end), (end, after), (start, end)]


@contextmanager
def undisturbed(*, compiles: bool = False) -> Iterator[None]:
    """Leaves random states and the garbage collector as they were; compiled models run uncompiled by default."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with random_states_kept(), nullcontext() if compiles else internals.without_compiler():
            yield
    finally:
        if collecting:
            gc.enable()


def optimizer_for(
    optimizer: Any, model: torch.nn.Module, copies: ShapeCopies, parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer | None:
    """The user's optimizer, with a fresh state, on the shape-only parameters of the model, of which `copies` knows.

    `parameters` are the real ones; the optimizer is an instance over them, a callable that takes parameters, or None.
    """
    if optimizer is None:
        return None
    if isinstance(optimizer, torch.optim.Optimizer):
        check_parameters(optimizer, parameters)
        try:
            copied: torch.optim.Optimizer = empty_copy(optimizer, {id(p): copies.of(p) for p in parameters})
        except Exception as error:
            raise BadOptimizer(
                f"the optimizer ({type(optimizer).__name__}) can't be copied: {type(error).__name__}: {error}. "
                "Give a function that takes parameters and makes it instead."
            ) from error
        return copied
    if not callable(optimizer):
        raise BadOptimizer(
            f"optimizer must be a torch.optim.Optimizer, a callable that takes parameters, or None, "
            f"but {type(optimizer).__name__} was given."
        )
    with explained("optimizer function"):
        made = optimizer([p for p in model.parameters() if p.requires_grad])
    if not isinstance(made, torch.optim.Optimizer):
        raise BadOptimizer(f"the optimizer callable returned {type(made).__name__}, not a torch.optim.Optimizer.")
    return made


def check_parameters(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> None:
    """Refuses an optimizer of another model."""
    own = {id(p) for p in parameters}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    strange = [p for p in held if id(p) not in own]
    if strange:
        shapes = ", ".join(str(tuple(p.shape)) for p in strange[:3])
        raise BadOptimizer(
            f"{len(strange)} of the optimizer's {len(held)} parameters are not the model's (shapes {shapes}). "
            "Make the optimizer from the parameters of this model."
        )
