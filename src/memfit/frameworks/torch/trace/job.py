"""Opens a job: checks what the user gave, builds the model without weights, and traces at any batch size."""

from typing import Any, cast

import torch

from memfit.core.device import Device
from memfit.core.errors import BadBatch, BadInput, BadModel, StepFailed
from memfit.core.estimate import NOT_COMPILED, Note
from memfit.core.job import Job
from memfit.core.settings import Settings
from memfit.core.trace import Trace
from memfit.frameworks.torch.apply.loss_function import as_loss
from memfit.frameworks.torch.shapes.batch import check_batch, common_first_dimension, resized
from memfit.frameworks.torch.shapes.failures import explained
from memfit.frameworks.torch.shapes.stand_in import build_without_weights, check_model, tensors_in
from memfit.frameworks.torch.trace.trace import Step, trace, undisturbed

_DEFAULT_BATCH_SIZE = 8


def own_gpu() -> tuple[str, int, tuple[int, int]] | None:
    """(name, total bytes, compute capability) of this machine's first CUDA device, or None."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return properties.name, properties.total_memory, (properties.major, properties.minor)


class OpenJob:
    """A job whose model is at hand, on a device; `batch_size` replaces the first dimension of the job's batch."""

    def __init__(self, job: Job, device: Device, batch_size: int | None = None) -> None:
        self.job = job
        self.loss = as_loss(job.loss)
        self.device = device
        model = job.model
        if not isinstance(model, torch.nn.Module):
            if not callable(model):
                raise BadModel(
                    "model must be a torch.nn.Module or a function that builds one, but "
                    f"{type(model).__name__} was given."
                )
            with undisturbed():
                model = build_without_weights(model)
        check_model(model)
        self.model: torch.nn.Module = model
        if batch_size is not None and batch_size < 1:
            raise BadBatch(f"a batch size must be at least 1, but {batch_size} was given.")
        self.name = job.name or type(self.model).__name__
        """What the job is called in reports."""
        if job.compile:
            # What it makes has the same parameters; the given model stays as it is.
            mode = job.compile if isinstance(job.compile, str) and job.compile != "default" else None
            self.name += ", compiled" if mode is None else f", compiled ({mode})"
            self.model = cast("torch.nn.Module", torch.compile(self.model, mode=mode))
        self.batch_size: int | None
        if callable(job.batch):
            # What a batch size means is then the function's own business: pairs may have twice as many rows.
            self.batch_size = batch_size or _DEFAULT_BATCH_SIZE
            self.batch = self._made(self.batch_size)
        else:
            check_batch(job.batch)
            self.batch_size = common_first_dimension(job.batch)
            self.batch = job.batch
        if batch_size is not None and batch_size != self.batch_size:
            if self.batch_size is None:
                raise BadBatch(
                    "the batch's tensors share no first dimension, so no batch size can be set. Give a batch whose "
                    "tensors do, or a function that makes a batch of a given size."
                )
            self.batch = resized(self.batch, self.batch_size, batch_size)
            self.batch_size = batch_size
        text = "the model is in evaluation mode (model.eval()): its dropout and batch norm are counted as such"
        evaluates = job.mode == "training" and not self.model.training
        self.notes = (Note("evaluation-mode", text),) if evaluates else ()
        """What is to be said of the job whatever its step needs."""
        self.gives_weight = False
        """Whether the loss function was seen to return (loss, weight)."""
        self.is_compiled = False
        """Whether the step was seen to run compiled code."""

    def _made(self, batch_size: int) -> Any:
        """The batch that the job's own function makes."""
        with undisturbed(), explained("batch function"):
            batch = self.job.batch(batch_size)
        check_batch(batch)
        return batch

    def step(self, batch_size: int | None, settings: Settings | None = None) -> Step:
        """The step at `batch_size`, ready to be traced; arguments as for `trace`."""
        job = self.job
        batch = self.batch
        if batch_size is not None and batch_size != self.batch_size:
            batch = self._made(batch_size) if callable(job.batch) else resized(batch, self.batch_size, batch_size)
        return Step(
            model=self.model,
            loss=self.loss,
            batch=batch,
            optimizer=job.optimizer,
            # Settings say themselves whether autocast is on.
            precision=None if settings is not None and settings.precision else job.precision,
            training=job.mode == "training",
            set_to_none=job.set_to_none is not False,
            settings=settings,
            keep_outputs=job.keep_outputs,
            data_parallel=job.data_parallel,
        )

    def trace(self, batch_size: int | None, settings: Settings | None = None) -> Trace:
        """The trace at `batch_size`, or with the batch as it was given when None, as `settings` run the step."""
        step = self.step(batch_size, settings)
        try:
            traced = trace(step, self.device)
            self.gives_weight = traced.gives_weight
            if settings is None:
                self.is_compiled = any(work.is_compiled for work in traced.work)
            elif settings.compile:
                failed = next((note.text for note in traced.notes if note.code == NOT_COMPILED), "")
                if failed:
                    raise BadInput(failed)
            return traced
        except StepFailed as failure:
            sizes = sorted({t.shape[0] for t in tensors_in(step.batch) if t.dim()})
            if len(sizes) > 1:
                numbers = ", ".join(map(str, sizes))
                raise BadBatch(
                    f"{failure}\nThe batch's tensors disagree in their first dimension: {numbers}. "
                    "Where that is the number of samples, give tensors with the same number."
                ) from failure
            raise
