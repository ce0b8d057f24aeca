"""Opens a job: checks what the user gave, builds the model without weights, and traces at any batch size."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from memfit.adapters.torch.failures import explained
from memfit.adapters.torch.loss_function import as_loss
from memfit.adapters.torch.stand_in import build_without_weights, check_model, map_tensors, tensors_in
from memfit.adapters.torch.trace import Step, trace, undisturbed
from memfit.core.device import Device
from memfit.core.errors import BadBatch, BadModel, BadOptimizer, StepFailed
from memfit.core.estimate import Note
from memfit.core.job import Job
from memfit.core.settings import Settings
from memfit.core.trace import Trace

_DEFAULT_BATCH_SIZE = 8


def own_gpu() -> tuple[str, int, tuple[int, int]] | None:
    """(name, total bytes, compute capability) of this machine's first CUDA device, or None."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return properties.name, properties.total_memory, (properties.major, properties.minor)


def open_job(job: Job, device: Device, batch_size: int | None = None) -> "OpenJob":
    """The job, checked and ready to be traced, at its own batch size or the given one."""
    return OpenJob(job, device, batch_size)


def subject(opened: "OpenJob") -> Any:
    """The job as a planner asks for it."""
    # Plans need much that estimates do without.
    from memfit.adapters.torch.fitting.subject import Subject

    return Subject(opened)


def fit(settings: Settings, model: torch.nn.Module, optimizer: Any) -> Any:
    """Model and optimizer, run as settings say."""
    from memfit.adapters.torch.fitting.fitted import Fitted
    from memfit.adapters.torch.optimizers import check_parameters

    if not isinstance(model, torch.nn.Module):
        raise BadModel(f"a plan is applied to a torch.nn.Module, but {type(model).__name__} was given.")
    if isinstance(optimizer, torch.optim.Optimizer):
        check_parameters(optimizer, list(model.parameters()))
    wanted = (settings.kernels.value, settings.state.value, settings.step_in_backward) != ("keep", "keep", False)
    if optimizer is None and wanted:
        raise BadOptimizer("the plan changes the optimizer, but there is no optimizer. Call apply(model, optimizer).")
    return Fitted(settings, model, optimizer)


class OpenJob:
    """A job whose model is at hand.

    Args:
        job: what to trace.
        device: where it will run.
        batch_size: replaces the first dimension of the job's batch.
    """

    def __init__(self, job: Job, device: Device, batch_size: int | None = None) -> None:
        self.job = job
        self.loss = as_loss(job.loss)
        self.device = device
        self.model = _open_model(job.model)
        if batch_size is not None and batch_size < 1:
            raise BadBatch(f"a batch size must be at least 1, but {batch_size} was given.")
        self.name = job.name or type(self.model).__name__
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
        self.notes = self._remarks()
        self.gives_weight = False
        """Whether the loss function was seen to return (loss, weight)."""

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
            set_to_none=job.set_to_none,
            settings=settings,
        )

    def trace(self, batch_size: int | None, settings: Settings | None = None) -> Trace:
        """The trace at `batch_size`, or with the batch as it was given when None.

        Args:
            batch_size: samples of one update.
            settings: how the step is run; None: as it is.
        """
        step = self.step(batch_size, settings)
        try:
            found = trace(step, self.device)
            self.gives_weight = found.gives_weight
            return found
        except StepFailed as failure:
            sizes = sorted({t.shape[0] for t in tensors_in(step.batch) if t.dim()})
            if len(sizes) > 1:
                numbers = ", ".join(map(str, sizes))
                raise BadBatch(
                    f"{failure}\nThe batch's tensors disagree in their first dimension: {numbers}. "
                    "Where that is the number of samples, give tensors with the same number."
                ) from failure
            raise

    def _remarks(self) -> tuple[Note, ...]:
        if self.job.mode == "training" and not self.model.training:
            text = "the model is in evaluation mode (model.eval()): its dropout and batch norm are counted as such"
            return (Note("evaluation-mode", text),)
        return ()


def _open_model(model: Any) -> torch.nn.Module:
    if not isinstance(model, torch.nn.Module):
        if not callable(model):
            raise BadModel(
                f"model must be a torch.nn.Module or a function that builds one, but {type(model).__name__} was given."
            )
        with undisturbed():
            model = build_without_weights(model)
    module: torch.nn.Module = model
    check_model(module)
    return module


def check_batch(batch: Any) -> None:
    """Refuses a batch without tensors, with no sample, or spread over devices."""
    tensors = list(tensors_in(batch))
    if not tensors:
        raise BadBatch(
            f"the batch holds no tensor ({type(batch).__name__} was given); give the tensors one step works on, "
            "alone or in tuples, lists, dictionaries or dataclasses: of a loader, next(iter(loader)); of NumPy arrays, "
            "torch.from_numpy(array)."
        )
    # Empty tensors beside others are fine: an image without boxes.
    if common_first_dimension(batch) == 0 or all(tensor.numel() == 0 for tensor in tensors):
        raise BadBatch(
            f"the batch holds an empty tensor of shape {tuple(tensors[0].shape)}; a batch needs at least 1 sample."
        )
    devices = {str(t.device) for t in tensors if t.device.type != "meta"}
    if len(devices) > 1:
        raise BadBatch(
            f"the batch's tensors are on mixed devices: {', '.join(sorted(devices))}. Put them on one; any will do."
        )


def common_first_dimension(batch: Any) -> int | None:
    """The batch size, if every tensor with dimensions has the same first one.

    In a list of samples, as detectors take, the first dimension is something else (the channels), so there is none.
    Tensors in a list may be either, samples or the fields of a batch: a loader makes a list of (tokens, mask, labels).
    What can't be told by its looks has a size here; `may_be_samples` says so, and running the loss on a part decides.
    """
    tensors = list(tensors_in(batch))
    if any(t.layout is not torch.strided for t in tensors) or _has_list_of_samples(batch):
        return None
    sizes = {t.shape[0] for t in tensors if t.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def may_be_samples(batch: Any) -> bool:
    """Whether more than two tensors of one shape stand in a list inside of the batch: they may be samples."""
    return any(len(part) > 2 and _is_of_one_shape(part) for part in _lists_inside(batch))


def _has_list_of_samples(value: Any) -> bool:
    """Whether it is plain that a list holds samples: beside another, one entry for each; or many images."""
    parts = list(_parts(value))
    lists = [part for part in parts if isinstance(part, list | tuple)]
    for part in lists:
        is_of_entries = bool(part) and all(isinstance(entry, Mapping) for entry in part)
        if is_of_entries and any(other is not part and len(other) == len(part) for other in lists):
            return True
    return any(map(_is_of_images, [value, *lists] if isinstance(value, list) else lists)) or any(
        map(_has_list_of_samples, parts)
    )


def _is_of_images(value: Any) -> bool:
    if len(value) <= 3 or not _is_of_one_shape(value):
        return False
    return value[0].dim() == 3 and value[0].shape[0] in (1, 3, 4) and not _is_index(value[0].dtype)


def _is_index(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and dtype is not torch.uint8


def _is_of_one_shape(value: Any) -> bool:
    shapes = {tuple(part.shape) if isinstance(part, torch.Tensor) else () for part in value}
    return len(shapes) == 1 and len(shapes.pop()) > 1


def _lists_inside(value: Any) -> Iterator[Any]:
    for part in _parts(value):
        if isinstance(part, list | tuple):
            yield part
        yield from _lists_inside(part)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def resized(batch: Any, old: int | None, new: int) -> Any:
    """The batch with another first dimension, as shapes; what is one tensor stays one."""
    made_of: dict[int, torch.Tensor] = {}

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made_of:
            made_of[id(tensor)] = shaped(tensor)
        return made_of[id(tensor)]

    def shaped(tensor: torch.Tensor) -> torch.Tensor:
        size = (new, *tensor.shape[1:]) if tensor.dim() and tensor.shape[0] == old else tuple(tensor.shape)
        # The order of strides is kept, so that a channels-last batch stays one.
        order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d]), reverse=True)
        made = torch.empty([size[d] for d in order], dtype=tensor.dtype, device="meta")
        back = [order.index(d) for d in range(tensor.dim())]
        return made.permute(back).requires_grad_(tensor.requires_grad)

    return map_tensors(batch, change)
