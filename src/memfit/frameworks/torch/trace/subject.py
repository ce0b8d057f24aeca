"""What a plan is about: a job as the planner asks for it, by profiles, probes and measurements."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from memfit.core.errors import BadInput, MemfitError
from memfit.core.profile import Measurement, Profile
from memfit.core.settings import Settings
from memfit.core.units import format_size
from memfit.frameworks.torch.apply.fitted import check_unfitted
from memfit.frameworks.torch.apply.micro_batches import split
from memfit.frameworks.torch.apply.recomputation import without_cache
from memfit.frameworks.torch.shapes.stand_in import tensors_in
from memfit.frameworks.torch.shapes.tensor_types import WEIGHTS
from memfit.frameworks.torch.trace import calibration
from memfit.frameworks.torch.trace import loss_probe as probe
from memfit.frameworks.torch.trace.job import OpenJob
from memfit.frameworks.torch.trace.profile import compiled_profile, profile


class Subject:
    """An opened job that a plan is made for; see `memfit.core.adapter.ProfiledStep`."""

    def __init__(self, opened: OpenJob) -> None:
        check_unfitted(opened.model)
        if opened.job.data_parallel > 1:
            trained = (p for p in opened.model.parameters() if p.requires_grad)
            buckets = format_size(sum(p.numel() * p.element_size() for p in trained))
            raise BadInput(
                f"a plan is made for one process, but the job has data_parallel={opened.job.data_parallel}. Plan "
                f"without it, within a budget that is smaller by the buckets of DistributedDataParallel ({buckets})."
            )
        self._opened = opened
        self._model = opened.model
        # What the user gave: of another size than one update's, maybe, or a function.
        self._batch = opened.job.batch
        self._tensors = [] if callable(self._batch) else list(tensors_in(self._batch))
        self.batch_size = opened.batch_size

    @property
    def is_compiled(self) -> bool:
        """Whether the step, as it is, runs compiled code."""
        return self._opened.is_compiled

    def profile(self, batch_size: int | None, settings: Settings) -> Profile:
        """The step at a batch size, closely observed, as settings run it."""
        plain = settings == Settings(set_to_none=settings.set_to_none)
        step = self._opened.step(batch_size, None if plain else settings)
        if not plain and settings.precision:
            step = replace(step, precision=settings.precision, settings=replace(settings, precision=None))
        # Modules that fill a cache can't be computed again; plans that do so switch it off.
        undo = without_cache(self._model)
        try:
            made = replace(profile(step, self._opened.device), batch_size=batch_size)
        finally:
            undo()
        if not (settings.compile or self.is_compiled):
            return made
        return compiled_profile(made, self._opened.trace(batch_size, None if plain else settings))

    def why_not_split(self) -> str:
        """Why the batch can't be split into micro-batches, with the tensor that stands in the way."""
        try:
            split(self._opened.batch, 2)
        except BadInput as error:
            return str(error)
        return "the batch's tensors share no first dimension"

    def find_weighting(self) -> probe.Found:
        """How the losses of micro-batches add up."""
        return probe.find_weighting(self._model, self._opened.loss, self._batch)

    @property
    def gives_weight(self) -> bool:
        """Whether the loss function returns (loss, weight)."""
        return self._opened.gives_weight

    def check_width(self, precision: str) -> None:
        """Refuses to plan for parameters of another width than those of a model that is there."""
        model = self._opened.job.model
        parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
        wanted = WEIGHTS[precision]
        other = next((p.dtype for p in parameters if p.is_floating_point() and p.dtype is not wanted), None)
        if other is not None:
            name, has = (str(dtype).removeprefix("torch.") for dtype in (wanted, other))
            raise BadInput(
                f"precision {precision!r} means a model in {name}, but the model given is in {has}, and a plan doesn't "
                f"change that. Give model.to(torch.{name}), or precision='amp-{precision}' for autocast."
            )

    def place(self) -> str:
        """Where model and batch have values: "cpu", the name of this machine's GPU, or "" where they have none."""
        tensors = [*self._model.parameters(), *self._model.buffers(), *self._tensors]
        if self.is_compiled:
            # Compiling it for real may take minutes.
            return ""
        kinds = {"meta" if tensor.is_meta else tensor.device.type for tensor in tensors}
        if callable(self._batch) or len(kinds) != 1:
            return ""
        if kinds == {"cuda"}:
            return str(torch.cuda.get_device_properties(tensors[0].device).name)
        return "cpu" if kinds == {"cpu"} else ""

    def measure(
        self, sizes: list[int], *, precision: str | None = None, limit_seconds: float = 4.0
    ) -> tuple[Measurement, ...]:
        """Short real passes at some micro-batch sizes, smallest first; none where they fail."""
        precision = precision or self._opened.job.precision
        try:
            return calibration.measure(
                self._model, self._opened.loss, self._batch, sizes, precision, limit_seconds=limit_seconds
            )
        except (MemfitError, RuntimeError):
            # A real step may fail where a simulated one doesn't, for want of memory first of all.
            return ()

    def time_passes(self, plans: Sequence[Settings], limit_seconds: float) -> list[float | None]:
        """Seconds of all passes of an update as each of these settings runs them; none at all where one fails."""
        try:
            return calibration.time_passes(
                self._model,
                self._opened.loss,
                self._batch,
                plans,
                batch_size=self.batch_size,
                limit_seconds=limit_seconds,
            )
        except (MemfitError, RuntimeError):
            return []

    def measure_updates(self) -> dict[str, float]:
        """Seconds of an update by kind of kernels; empty where the optimizer isn't at hand."""
        optimizer: Any = self._opened.job.optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            return {}
        return {
            str(kind.value): seconds for kind, seconds in calibration.update_seconds(optimizer, self._model).items()
        }

    def host_rates(self) -> tuple[float, float]:
        """(floating-point operations, bytes moved) per second of this machine's processor, measured."""
        return calibration.rates()

    @property
    def num_samples(self) -> int | None:
        """Samples of the batch that was given, which may be fewer than those of one update."""
        return next((tensor.shape[0] for tensor in self._tensors if tensor.dim()), None)
