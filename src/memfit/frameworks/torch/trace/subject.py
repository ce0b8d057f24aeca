"""What a plan is about: a job as the planner asks for it, by profiles, probes and measurements."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from memfit.core.errors import BadInput, MemfitError
from memfit.core.profile import Measurement, Profile
from memfit.core.settings import OptimizerKernels, Settings
from memfit.frameworks.torch.apply.fitted import check_unfitted
from memfit.frameworks.torch.apply.recomputation import without_cache
from memfit.frameworks.torch.shapes.stand_in import tensors_in
from memfit.frameworks.torch.shapes.tensor_types import WEIGHTS
from memfit.frameworks.torch.trace import calibration
from memfit.frameworks.torch.trace import loss_probe as probe
from memfit.frameworks.torch.trace.job import OpenJob
from memfit.frameworks.torch.trace.profile import profile

_LIMIT_SECONDS = 4.0


class Subject:
    """A job that a plan is made for.

    Args:
        opened: the job, checked.
    """

    def __init__(self, opened: OpenJob) -> None:
        check_unfitted(opened.model)
        self._opened = opened
        self.batch_size = opened.batch_size

    def profile(self, batch_size: int | None, settings: Settings) -> Profile:
        """The step at a batch size, closely observed, as settings run it."""
        plain = settings == Settings(set_to_none=settings.set_to_none)
        step = self._opened.step(batch_size, None if plain else settings)
        if not plain and settings.precision:
            step = replace(step, precision=settings.precision, settings=replace(settings, precision=None))
        # Modules that fill a cache can't be computed again; plans that do so switch it off.
        undo = without_cache(self._opened.model)
        try:
            found = profile(step, self._opened.device)
        finally:
            undo()
        return replace(found, batch_size=batch_size)

    def why_not_split(self) -> str:
        """Why the batch can't be split into micro-batches, with the tensor that stands in the way."""
        from memfit.frameworks.torch.apply.micro_batches import split

        try:
            split(self._opened.batch, 2)
        except BadInput as error:
            return str(error)
        return "the batch's tensors share no first dimension"

    def find_weighting(self) -> probe.Found:
        """How the losses of micro-batches add up."""
        opened = self._opened
        return probe.find_weighting(opened.model, opened.loss, opened.job.batch)

    @property
    def gives_weight(self) -> bool:
        """Whether the loss function returns (loss, weight)."""
        return self._opened.gives_weight

    def check_width(self, precision: str) -> None:
        """Refuses to plan for parameters of another width than those of a model that is there."""
        model = self._opened.job.model
        if not isinstance(model, torch.nn.Module):
            return
        wanted = WEIGHTS[precision]
        other = next((p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype is not wanted), None)
        if other is not None:
            name, has = (str(dtype).removeprefix("torch.") for dtype in (wanted, other))
            raise BadInput(
                f"precision {precision!r} means a model in {name}, but the model given is in {has}, and a plan doesn't "
                f"change that. Give model.to(torch.{name}), or precision='amp-{precision}' for autocast."
            )

    def place(self) -> str:
        """Where model and batch have values: "cpu", the name of this machine's GPU, or "" where they have none."""
        opened = self._opened
        tensors = [*opened.model.parameters(), *opened.model.buffers(), *_tensors(opened.job.batch)]
        if not tensors or any(tensor.is_meta for tensor in tensors) or callable(opened.job.batch):
            return ""
        kinds = {tensor.device.type for tensor in tensors}
        if kinds == {"cuda"}:
            return str(torch.cuda.get_device_properties(tensors[0].device).name)
        return "cpu" if kinds == {"cpu"} else ""

    def measure(
        self, sizes: list[int], *, precision: str | None = None, limit_seconds: float = _LIMIT_SECONDS
    ) -> tuple[Measurement, ...]:
        """Short real passes at some micro-batch sizes, smallest first; none where they fail."""
        opened = self._opened
        try:
            return calibration.measure(
                opened.model,
                opened.loss,
                opened.job.batch,
                sizes,
                precision=precision or opened.job.precision,
                limit_seconds=limit_seconds,
            )
        except (MemfitError, RuntimeError):
            # A real step may fail where a simulated one doesn't, for want of memory first of all.
            return ()

    def time_passes(self, plans: Sequence[Settings], limit_seconds: float) -> list[float | None]:
        """Seconds of all passes of an update as each of these settings runs them; none at all where one fails."""
        opened = self._opened
        try:
            return calibration.time_passes(
                opened.model,
                opened.loss,
                opened.job.batch,
                plans,
                batch_size=opened.batch_size,
                limit_seconds=limit_seconds,
            )
        except (MemfitError, RuntimeError):
            return []

    def measure_updates(self) -> dict[str, float]:
        """Seconds of an update by kind of kernels; empty where the optimizer isn't at hand."""
        optimizer = self._opened.job.optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            return {}
        found = calibration.update_seconds(optimizer, self._opened.model)
        return {str(OptimizerKernels(kind).value): seconds for kind, seconds in found.items()}

    def host_rates(self) -> tuple[float, float]:
        """(floating-point operations, bytes moved) per second of this machine's processor, measured."""
        return calibration.rates()

    @property
    def num_samples(self) -> int | None:
        """Samples of the batch that was given, which may be fewer than those of one update."""
        tensors = [tensor for tensor in _tensors(self._opened.job.batch) if tensor.dim()]
        return tensors[0].shape[0] if tensors else None


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [] if callable(batch) else list(tensors_in(batch))
