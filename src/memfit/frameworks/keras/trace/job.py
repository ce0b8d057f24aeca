"""Opens a compiled Keras model as a job: checks what the user gave and traces it on the backend that Keras runs on."""

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

import keras
import numpy as np

from memfit.core.device import Device
from memfit.core.errors import BadInput, StepFailed
from memfit.core.estimate import Note
from memfit.core.job import AUTOCASTS, Job
from memfit.core.settings import Settings
from memfit.core.trace import Trace
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.batch import Batch, open_batch
from memfit.frameworks.keras.model import build, check_inputs, check_model, has_own_step

_OBJECTS = (
    keras.Layer,
    keras.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
    keras.random.SeedGenerator,
    internals.Variable,
    internals.Tracker,
)
_CONTAINERS: tuple[Any, ...] = (dict, list, set, deque)


@contextmanager
def restoring(model: Any) -> Iterator[None]:
    """Puts the model, its optimizer, metrics and seeds, and the random states back at the end."""
    before = ModelSnapshot([model, internals.global_seed_generator()])
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        before.restore()
        random.setstate(python_state)
        np.random.set_state(numpy_state)


class ModelSnapshot:
    """What an object of Keras, or several in a list, and all that they reach hold now.

    Tracing builds optimizers and metrics, advances seeds and may change how the model is run. All of that is kept in
    attributes of Keras's objects and in the lists, dictionaries and sets that they hold.
    """

    def __init__(self, value: Any) -> None:
        self._saved: dict[int, tuple[Any, Any]] = {}
        waiting = [value]
        while waiting:
            found = waiting.pop()
            # TensorFlow shows the dictionaries and tuples of a layer through proxies.
            found = getattr(found, "__wrapped__", found) if isinstance(found, dict | tuple) else found
            if isinstance(found, tuple):
                waiting.extend(tuple.__iter__(found))
            elif isinstance(found, (*_CONTAINERS, *_OBJECTS)):
                waiting.extend(self._note(found))

    def _note(self, found: Any) -> list[Any]:
        """Remembers an object or a container, and gives what it holds; nothing where it is known."""
        if isinstance(found, _OBJECTS):
            return [getattr(found, "__dict__", None)]
        if id(found) in self._saved:
            return []
        if isinstance(found, dict):
            contents: Any = dict.copy(found)
            parts = list(contents.values())
        else:
            kind = next(kind for kind in _CONTAINERS if isinstance(found, kind))
            parts = contents = list(kind.__iter__(found))
        self._saved[id(found)] = (found, contents)
        # Containers of Keras and TensorFlow keep books of their own.
        return [*parts, getattr(found, "__dict__", None)]

    def restore(self) -> None:
        """Puts everything back; containers of Keras report each change, which nobody must hear of now."""
        for container, contents in self._saved.values():
            kind: Any = next(kind for kind in _CONTAINERS if isinstance(container, kind))
            kind.clear(container)
            if kind in (list, deque):
                kind.extend(container, contents)
            else:
                kind.update(container, contents)


class OpenModel:
    """A Keras model whose step can be traced, on the device, at the batch's own size or the given one."""

    def __init__(self, job: Job, device: Device, batch_size: int | None = None) -> None:
        self.device = device
        self.model = job.model
        self.training = job.mode == "training"
        if job.optimizer is not None:
            raise BadInput(
                "a Keras model brings its optimizer from compile(), but another one was given. "
                "Compile the model with it: model.compile(optimizer=..., loss=...)."
            )
        check_model(self.model, training=self.training)
        if job.precision not in (None, "fp32", *AUTOCASTS):
            raise BadInput(
                f"precision={job.precision!r} was given, but a Keras model has its own dtype policy. Give "
                "'amp-bf16' or 'amp-fp16' for mixed precision, or make the model under keras.config.set_dtype_policy."
            )
        self._precision = job.precision if job.precision in AUTOCASTS else None
        self._own_step = self.training and has_own_step(self.model)
        self.batch = self._packed(open_batch(job.batch, batch_size, any_form=self._own_step))
        check_inputs(self.model, self.batch)
        self.name = job.name or str(self.model.name)
        self.batch_size = self.batch.batch_size
        self.notes: tuple[Note, ...] = ()

    def _packed(self, batch: Batch) -> Batch:
        """The batch as `fit` gives it to the training step."""
        if self.training and not self._own_step and not isinstance(batch.data, tuple):
            # Keras takes x alone as well: the model then adds its own losses.
            return replace(batch, data=(batch.data,))
        return batch

    def trace(self, batch_size: int | None, settings: Settings | None = None) -> Trace:
        """The trace of the step as settings run it, for the batch as it was given or one of another size."""
        if self._precision is not None and (settings is None or settings.precision is None):
            settings = replace(settings or Settings(), precision=self._precision)
        batch = self._packed(self.batch.resized(batch_size))
        given: dict[str, Any] = {
            "device": self.device,
            "training": self.training,
            "settings": settings,
        }
        try:
            return traced(self.model, batch, **given)
        except StepFailed:
            if not self._own_step or not isinstance(batch.data, tuple) or len(batch.data) != 1:
                raise
        # `fit(x)` gives the step x alone, a data set of (x,) the tuple: either may be meant.
        return traced(self.model, replace(batch, data=batch.data[0]), **given)


def traced(model: Any, batch: Batch, device: Device, *, training: bool, settings: Settings | None = None) -> Trace:
    """The trace of a model's own step for the shapes of a batch; the model is left as it was."""
    tracer = import_module(f"memfit.frameworks.keras.trace.{keras.backend.backend()}_backend")
    with restoring(model):
        build(model, batch, training=training)
        found: Trace = tracer.trace(model, batch, device, training=training, settings=settings)
    return found
