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
from keras.src.optimizers import base_optimizer

from memfit.adapters.keras.batch import Batch, mapped
from memfit.adapters.keras.model import OPTIMIZER, Held, build, fitted, held, layer_paths, number_of, state_bytes
from memfit.adapters.keras.untouched import global_seed_generator, untouched
from memfit.adapters.torch import failures
from memfit.adapters.torch.collector import UsualCollector
from memfit.adapters.torch.cuda_devices import CudaDevices
from memfit.adapters.torch.cuda_random import random_replacements
from memfit.adapters.torch.keras_optimizers import update_replacements
from memfit.adapters.torch.origin import OriginTracker
from memfit.adapters.torch.recorder import Recorder
from memfit.adapters.torch.replacement import Replacement, replaced
from memfit.adapters.torch.shapes import META
from memfit.adapters.torch.simulation import ONE_AT_A_TIME, Simulation
from memfit.adapters.torch.stand_in import ShapeCopies, swapped, tensors_in
from memfit.adapters.torch.trace import undisturbed
from memfit.core.device import Device, Kind
from memfit.core.estimate import Note
from memfit.core.settings import Settings
from memfit.core.timeline import Category, Phase
from memfit.core.trace import Trace

_KERAS = os.path.dirname(os.path.abspath(keras.__file__)) + os.sep
_NUM_STEPS = 2

_NOT_COMPILED = Note(
    "jit-compile", "the model was compiled with jit_compile=True: its step is counted as it runs without torch.compile"
)


def trace(model: Any, batch: Batch, device: Device, *, training: bool, settings: Settings | None = None) -> Trace:
    """Runs the model's own step on a simulated device.

    Args:
        model: compiled, where it is to be trained.
        batch: its shapes.
        device: the target.
        training: `train_step` rather than `predict_step`.
        settings: how the step is run; None: as it is.
    """
    with ONE_AT_A_TIME, untouched(model):
        build(model, batch, training=training)
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
        self.variables: list[Held] = []

    def run(self, batch: Batch, settings: Settings | None) -> Trace:
        model, recorder = self.model, self.recorder
        with ExitStack() as stack:
            stack.enter_context(undisturbed())
            stack.enter_context(_little_garbage())
            stack.enter_context(torch.inference_mode(False))
            self._swap(stack)
            data = mapped(_as_tensor, batch.data)
            stack.enter_context(keras.device("cuda" if self.on_cuda else "cpu"))
            stack.enter_context(self.simulation.running(self._answers()))
            stack.enter_context(replaced(update_replacements(base_optimizer, self._begin_update, self._end_update)))
            recorder.enter(Phase.SETUP, 0)
            self._prepare(stack, settings)
            for tensor in tensors_in(data):
                recorder.add(tensor, "batch", Category.BATCH)
            self._train(data) if self.training else self._infer(data)
            recorder.stop()
            sizes = state_bytes(model, self.variables, training=self.training)
        parameters = [one for one in self.variables if one.category is Category.PARAMETER]
        notes = tuple(self.simulation.notes.found.values())
        return Trace(
            recorder.timeline(),
            (*notes, _NOT_COMPILED) if self.training and model.jit_compile is True else notes,
            sum(number_of(one.variable) for one in parameters),
            sizes.get(Category.PARAMETER, 0),
            batch.size_bytes,
            state_bytes=sizes,
        )

    def _swap(self, stack: ExitStack) -> None:
        """Puts shape-only tensors into every variable of the model."""
        copies = ShapeCopies()
        for layer in self.model._flatten_layers():
            for module in layer.modules():
                if not isinstance(module, keras.Layer):
                    # Lists of parameters that Keras keeps for PyTorch, and modules of PyTorch inside of layers.
                    stack.enter_context(swapped(module, copies))
        for one in held(self.model, training=self.training):
            one.variable._value = copies.of(one.variable._value)
        seeds = global_seed_generator()
        if seeds is not None:
            seeds.state._value = copies.of(seeds.state._value)

    def _answers(self) -> list[Replacement]:
        """Keras makes a generator of random numbers on the device for each layer that draws some."""
        return random_replacements(CudaDevices(self.device, 1), 1) if self.on_cuda else []

    def _prepare(self, stack: ExitStack, settings: Settings | None) -> None:
        """Applies the settings, makes the optimizer's variables and says what everything is for."""
        model = self.model
        with failures.explained("preparation"):
            stack.enter_context(fitted(model, settings, training=self.training))
        if self.training and model.optimizer is not None and not model.optimizer.built:
            with failures.explained("optimizer"):
                model.optimizer.build(model.trainable_variables)
        self.variables = held(model, training=self.training)
        for one in self.variables:
            tensor = one.variable._value
            if self.recorder.known(tensor):
                # Made when the settings were applied, or just now.
                self.recorder.classify(tensor, one.category, one.module)
            self.recorder.add_named(tensor, str(one.category), one.category, (one.module, ""))
        for layer, path in self._named_layers():
            self.origin.name(layer, path)

    def _named_layers(self) -> Iterator[tuple[Any, str]]:
        paths = layer_paths(self.model)
        for layer in self.model._flatten_layers():
            yield layer, paths.get(id(layer), "")

    def _train(self, data: Any) -> None:
        logs = None
        self.model.train()
        collector = UsualCollector()
        for number in range(1, _NUM_STEPS + 1):
            self.number = number
            self._begin_part()
            with collector.running(self.simulation.operators), failures.explained("training step"):
                # What a step returns is shown until the next one has ended.
                logs = self.model.train_step(data)
        del logs

    def _infer(self, data: Any) -> None:
        data = (data[0],) if isinstance(data, tuple) else (data,)
        self.model.eval()
        for number in range(1, _NUM_STEPS + 1):
            self.number = number
            self._begin_part()
            with torch.no_grad(), failures.explained("prediction"):
                outputs = self.model.predict_step(data)
            del outputs

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
            gradient = one.variable._value.grad
            if gradient is not None:
                self.recorder.classify(gradient, Category.GRADIENT, one.module)

    def _begin_update(self, optimizer: Any) -> None:
        self.recorder.enter(Phase.OPTIMIZER, self.number)
        self._updating = self.origin.inside(OPTIMIZER)
        self._updating.__enter__()

    def _end_update(self, optimizer: Any) -> None:
        self._updating.__exit__(None, None, None)
        if len(self.variables) != len(found := held(self.model, training=True)):
            # A further optimizer, which a training step of the model's own has just used for the first time.
            known = {id(one.variable) for one in self.variables}
            for one in found:
                if id(one.variable) not in known:
                    self.recorder.classify(one.variable._value, one.category, one.module)
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


def _as_tensor(spec: Any) -> Any:
    if spec is None:
        return None
    return torch.empty(spec.shape, dtype=keras.src.backend.torch.core.to_torch_dtype(spec.dtype), device=META)
