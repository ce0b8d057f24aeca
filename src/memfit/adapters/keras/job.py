"""Opens a compiled Keras model as a job: checks what the user gave and traces it on the backend that Keras runs on."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import keras

from memfit.adapters.keras.batch import Batch, open_batch
from memfit.adapters.keras.model import check_inputs, check_model, has_own_step
from memfit.core.device import Device
from memfit.core.errors import BadInput, MissingDependency, StepFailed
from memfit.core.estimate import Note
from memfit.core.job import AUTOCASTS, Job
from memfit.core.settings import Settings
from memfit.core.trace import Trace

_BACKENDS = ("torch", "jax", "tensorflow")


def open_job(job: Job, device: Device, batch_size: int | None = None) -> "OpenModel":
    """The job, checked and ready to be traced, at its own batch size or the given one."""
    return OpenModel(job, device, batch_size)


class OpenModel:
    """A Keras model whose step can be traced.

    Args:
        job: what to trace; its model is one of Keras, or a function that makes one.
        device: where it will run.
        batch_size: replaces the first dimension of the job's batch.
    """

    def __init__(self, job: Job, device: Device, batch_size: int | None = None) -> None:
        self.job = job
        self.device = device
        self.backend = check_backend()
        self.model = job.model
        self.training = job.mode == "training"
        if job.optimizer is not None:
            raise BadInput(
                "a Keras model brings its optimizer from compile(), but another one was given. "
                "Compile the model with it: model.compile(optimizer=..., loss=...)."
            )
        check_model(self.model, training=self.training)
        self.settings = _precision(job)
        self._own_step = self.training and has_own_step(self.model)
        self.batch = self._packed(open_batch(job.batch, batch_size, any_form=self._own_step))
        check_inputs(self.model, self.batch)
        self.name = job.name or str(self.model.name)
        self.batch_size = self.batch.batch_size
        self.notes: tuple[Note, ...] = ()

    def at(self, batch_size: int | None) -> Batch:
        """The batch at another size; None: as it was given."""
        return self._packed(self.batch.resized(batch_size))

    def _packed(self, batch: Batch) -> Batch:
        """The batch as `fit` gives it to the training step."""
        if self.training and not self._own_step and not isinstance(batch.data, tuple):
            # Keras takes x alone as well: the model then adds its own losses.
            return replace(batch, data=(batch.data,))
        return batch

    def trace(self, batch_size: int | None, settings: Settings | None = None) -> Trace:
        """The trace of the step.

        Args:
            batch_size: samples of one update; None: the batch as it was given.
            settings: how the step is run; None: as it is.
        """
        if settings is None:
            settings = self.settings
        elif self.settings is not None and settings.precision is None:
            settings = replace(settings, precision=self.settings.precision)
        tracer = import_module(f"memfit.adapters.keras.{self.backend}_backend")
        trace = partial(tracer.trace, self.model, device=self.device, training=self.training, settings=settings)
        batch = self.at(batch_size)
        try:
            found: Trace = trace(batch=batch)
        except StepFailed:
            if not self._own_step or not isinstance(batch.data, tuple) or len(batch.data) != 1:
                raise
            # `fit(x)` gives the step x alone, a data set of (x,) the tuple: either may be meant.
            try:
                found = trace(batch=replace(batch, data=batch.data[0]))
            except StepFailed as error:
                raise error from None
        return found


def check_backend() -> str:
    """The backend that Keras runs on, which must be one of three."""
    name = str(keras.backend.backend())
    if name not in _BACKENDS:
        raise BadInput(
            f"Keras runs on {name}, which memfit doesn't know. Set KERAS_BACKEND to one of {', '.join(_BACKENDS)} "
            "before Keras is imported."
        )
    if find_spec(name) is None:
        raise MissingDependency(f"Keras runs on {name}, which isn't installed. Install it with `pip install {name}`.")
    return name


def _precision(job: Job) -> Settings | None:
    """The settings that a precision asks for."""
    if job.precision in (None, "fp32"):
        return None
    if job.precision in AUTOCASTS:
        return Settings(precision=job.precision)
    raise BadInput(
        f"precision={job.precision!r} was given, but a Keras model has its numbers from its dtype policy. Give "
        "'amp-bf16' or 'amp-fp16' for mixed precision, or make the model under keras.config.set_dtype_policy."
    )
