"""Keras on PyTorch: the model's own training step, run on shapes by PyTorch's tracer.

Two steps are run as `fit` runs them: `train_step` computes the predictions before it clears the gradients of the step
before, so that only the second step shows what all others need.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import torch

from memfit.core.device import Device, Kind
from memfit.core.estimate import Note
from memfit.core.patching import replaced
from memfit.core.settings import Settings
from memfit.core.timeline import Category, Phase
from memfit.core.trace import Trace
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.apply.fitted import applied
from memfit.frameworks.keras.batch import Batch, mapped
from memfit.frameworks.keras.model import OPTIMIZER, HeldVariable, layer_paths, trace_of, variables_of
from memfit.frameworks.torch.cuda.devices import CudaDevices
from memfit.frameworks.torch.cuda.random import random_replacements
from memfit.frameworks.torch.shapes import failures
from memfit.frameworks.torch.shapes.origin import OriginTracker
from memfit.frameworks.torch.shapes.recorder import Recorder
from memfit.frameworks.torch.shapes.shapes import META
from memfit.frameworks.torch.shapes.stand_in import ShapeCopies, swapped, tensors_in
from memfit.frameworks.torch.shapes.unsimulated import update_replacements
from memfit.frameworks.torch.simulation.simulation import ONE_AT_A_TIME, Simulation, UsualCollector
from memfit.frameworks.torch.trace.trace import undisturbed

_KERAS = os.path.dirname(os.path.abspath(keras.__file__)) + os.sep
_NUM_STEPS = 2

_NOT_COMPILED = Note(
    "jit-compile", "the model was compiled with jit_compile=True: its step is counted as it runs without torch.compile"
)


def trace(model: Any, batch: Batch, device: Device, *, training: bool, settings: Settings | None) -> Trace:
    """Runs the model's own step on a simulated device; see `job.traced`."""
    with ONE_AT_A_TIME:
        return _Tracer(model, device, training=training).run(batch, settings)


class _Tracer:
    def __init__(self, model: Any, device: Device, *, training: bool) -> None:
        self.model = model
        self.training = training
        self.device = device
        self.on_cuda = device.kind is Kind.CUDA
        self.origin = OriginTracker(entered=self._entered, hidden=(_KERAS,))
        self.recorder = Recorder(self.origin.current)
        # Layers of Keras count their steps in tensors.
        self.simulation = Simulation(device, self.recorder, self.origin, follows_values=True)
        self.simulation.around_backward = self._backward
        self.first_of_part = 0
        self.number = 0
        self.variables: list[HeldVariable] = []

    def run(self, batch: Batch, settings: Settings | None) -> Trace:
        model, recorder = self.model, self.recorder
        with ExitStack() as stack:
            stack.enter_context(undisturbed())
            stack.enter_context(_little_garbage())
            stack.enter_context(torch.inference_mode(False))
            self._swap(stack)
            data = mapped(
                lambda spec: torch.empty(spec.shape, dtype=internals.torch_dtype(spec.dtype), device=META), batch.data
            )
            stack.enter_context(keras.device("cuda" if self.on_cuda else "cpu"))
            # Keras makes a generator of random numbers on the device for each layer that draws some.
            generators = random_replacements(CudaDevices(self.device, 1), 1) if self.on_cuda else []
            stack.enter_context(self.simulation.running(generators))
            updates = update_replacements(internals.base_optimizer, self._begin_update, self._end_update)
            stack.enter_context(replaced(updates))
            recorder.enter(Phase.SETUP, 0)
            self._prepare(stack, settings)
            for tensor in tensors_in(data):
                recorder.add(tensor, "batch", Category.BATCH)
            self._run_steps(data)
            recorder.stop()
            trained = list(model.trainable_variables) if self.training else []
        notes = tuple(self.simulation.notes.found.values())
        notes = (*notes, _NOT_COMPILED) if self.training and model.jit_compile is True else notes
        trace = Trace(
            recorder.timeline(),
            notes,
            0,
            0,
            batch.size_bytes,
            grouped_bytes=self.simulation.grouped_bytes,
            has_regimes=self.on_cuda,
        )
        return trace_of(trace, self.variables, trained)

    def _swap(self, stack: ExitStack) -> None:
        """Puts shape-only tensors into every variable of the model."""
        copies = ShapeCopies()
        for layer in internals.layers_of(self.model):
            for module in layer.modules():
                if not isinstance(module, keras.Layer):
                    # Lists of parameters that Keras keeps for PyTorch, and modules of PyTorch inside of layers.
                    stack.enter_context(swapped(module, copies))
        for one in variables_of(self.model, training=self.training):
            internals.set_tensor(one.variable, copies.of(internals.tensor_of(one.variable)))
        seeds = internals.global_seed_generator()
        if seeds is not None:
            internals.set_tensor(seeds.state, copies.of(internals.tensor_of(seeds.state)))

    def _prepare(self, stack: ExitStack, settings: Settings | None) -> None:
        """Applies the settings, makes the optimizer's variables and says what everything is for."""
        model = self.model
        with failures.explained("preparation"):
            stack.enter_context(applied(model, settings, training=self.training))
        if self.training and model.optimizer is not None and not model.optimizer.built:
            with failures.explained("optimizer"):
                model.optimizer.build(model.trainable_variables)
        self.variables = variables_of(model, training=self.training)
        for one in self.variables:
            tensor = internals.tensor_of(one.variable)
            if self.recorder.known(tensor):
                # Made when the settings were applied, or just now.
                self.recorder.classify(tensor, one.category, one.module)
            self.recorder.add_named(tensor, str(one.category), one.category, (one.module, ""))
        paths = layer_paths(model)
        for layer in internals.layers_of(model):
            self.origin.name(layer, paths.get(id(layer), ""))

    def _run_steps(self, data: Any) -> None:
        shown = None
        self.model.train(self.training)
        if not self.training:
            data = (data[0],) if isinstance(data, tuple) else (data,)
        collector = UsualCollector()
        for number in range(1, _NUM_STEPS + 1):
            self.number = number
            self._begin_part()
            if self.training:
                with collector.running(self.simulation.operators), failures.explained("training step"):
                    # What a step returns is shown until the next one has ended.
                    shown = self.model.train_step(data)
            else:
                with torch.no_grad(), failures.explained("prediction"):
                    self.model.predict_step(data)
        del shown

    def _begin_part(self) -> None:
        self.first_of_part = self.recorder.num_blocks
        self.recorder.enter(Phase.FORWARD, self.number)

    def _entered(self, module: Any) -> None:
        """The model is called: after a backward pass, for a further part of the batch."""
        if self.recorder.phase is Phase.BACKWARD and torch.is_grad_enabled():
            self._begin_part()

    @contextmanager
    def _backward(self, accumulates: bool) -> Iterator[None]:
        self.recorder.classify_live(self.first_of_part, Category.ACTIVATION)
        self.recorder.enter(Phase.BACKWARD, self.number)
        yield
        for one in self.variables:
            gradient = internals.tensor_of(one.variable).grad
            if gradient is not None:
                self.recorder.classify(gradient, Category.GRADIENT, one.module)

    def _begin_update(self, optimizer: Any) -> None:
        self.recorder.enter(Phase.OPTIMIZER, self.number)
        self._updating = self.origin.inside(OPTIMIZER)
        self._updating.__enter__()

    def _end_update(self, optimizer: Any) -> None:
        self._updating.__exit__(None, None, None)
        if len(self.variables) != len(found := variables_of(self.model, training=True)):
            # A further optimizer, which a training step of the model's own has just used for the first time.
            known = {id(one.variable) for one in self.variables}
            for one in found:
                if id(one.variable) not in known:
                    self.recorder.classify(internals.tensor_of(one.variable), one.category, one.module)
            self.variables = found


@contextmanager
def _little_garbage() -> Iterator[None]:
    """Collections look at what was made since, rather than at all that a large process holds."""
    if gc.get_freeze_count():
        # The program has set objects aside itself, and would get them back with ours.
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
