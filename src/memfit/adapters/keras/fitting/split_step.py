"""A training step whose batch is computed in parts: what is the same whichever backend runs it.

The backends differ in how parts follow one another and how gradients are added up (`jax_steps`, `tensorflow_steps`,
`torch_steps`). What a part adds to the loss, and what can't be split, is decided here.
"""

from collections.abc import Sequence
from typing import Any

import keras

from memfit.adapters.keras.fitting import probing
from memfit.adapters.keras.fitting.accumulation import check_first_dimensions
from memfit.adapters.keras.fitting.probing import Concrete
from memfit.adapters.keras.fitting.weights import BatchLoss, Kind, Part, Share
from memfit.core.errors import BadModel
from memfit.core.settings import Settings


class SplitStep:
    """What the steps of all backends need.

    Args:
        settings: into how many parts, or how large ones.
        model: compiled.
        concrete: a context in which operations are computed at once, also while a graph is made.
        approximate: whether losses that don't add up are weighed by samples instead of being refused.
    """

    def __init__(self, settings: Settings, model: Any, concrete: Concrete, approximate: bool = False) -> None:
        self.settings = settings
        self.model = model
        self.is_counted = False
        """Whether the denominators of the batch must be counted first."""
        self._concrete = concrete
        self._approximate = approximate
        self.loss = BatchLoss(model, self._kind_of_loss)
        self._step_kind: Kind | None = None
        self._added: list[Kind] = []

    @property
    def has_own_loss(self) -> bool:
        """Whether the model has a `compute_loss` of its own."""
        return type(self.model).compute_loss is not keras.Model.compute_loss

    @property
    def has_own_metrics(self) -> bool:
        """Whether the model has a `compute_metrics` of its own, which may return more than metrics."""
        return type(self.model).compute_metrics is not keras.Model.compute_metrics

    def open(self, data: Any) -> tuple[Any, Any, Any, int | None]:
        """(x, y, sample weights, number of samples if known) of a batch that can be split."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        return x, y, sample_weight, check_first_dimensions((x, y, sample_weight))

    def call(self, x: Any, *, training: bool = True) -> Any:
        """The model's predictions."""
        return self.model(x, training=training) if self.model._call_has_training_arg else self.model(x)

    def prepare(self, values: tuple[list[Any], list[Any]], data: tuple[Any, Any, Any], num_added: int) -> None:
        """Finds out how a loss of the user's own, and those that layers add, count.

        Args:
            values: of the trainable and the other variables; any numbers will do.
            data: x, y and sample weights, of which only shapes and types count.
            num_added: losses that layers add, besides regularizers of weights.
        """
        if self.has_own_loss:
            if self._step_kind is None:
                found = probing.kind_of_step(self._concrete, self.model, values, data)
                name = f"compute_loss of {type(self.model).__name__}"
                self._step_kind = self._accepted(found, name)
        elif num_added and not self._added:
            kinds = probing.kinds_of_added(self._concrete, self.model, values, data[0])
            name = f"loss that a layer of the model {self.model.name!r} adds"
            self._added = [self._accepted(kind, name) for kind in kinds or [Kind.NEITHER]]

    def share(self, part: Part, data: tuple[Any, Any, Any], y_pred: Any, losses: Sequence[Any]) -> Share:
        """What a part adds to the loss of the batch.

        Args:
            part: its size, and what was counted.
            data: its x, y and sample weights.
            y_pred: its predictions.
            losses: that layers added, and regularizers.
        """
        x, y, sample_weight = data
        if self._step_kind is not None:
            value = self.model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
            return Share(value if self._step_kind is Kind.SUM else value * part.ratio(value.dtype), [])
        others = [(loss, self._added_kind(index)) for index, loss in enumerate(losses)]
        return self.loss.share(part, y, y_pred, sample_weight, others)

    def num_values(self) -> int:
        """Losses of single outputs that Keras keeps a metric of, and that are updated once for the batch."""
        return 0 if self.has_own_loss else len(self.loss.metrics)

    def num_added(self, losses: Sequence[Any]) -> int:
        """Losses that layers added, besides regularizers of weights, which come last."""
        return len(losses) - probing.num_regularized(self.model)

    def finish_metrics(self, share: Any, values: Sequence[Any], num_samples: Any, known_samples: Any) -> None:
        """Updates the metrics of losses as the plain step does, once for the batch.

        Args:
            share: the loss of the batch.
            values: the losses of its outputs.
            num_samples: samples of the batch.
            known_samples: the same where it is known ahead; Keras weighs the losses of outputs only then.
        """
        self.model._loss_tracker.update_state(share, sample_weight=num_samples)
        if values:
            for metric, value in zip(self.loss.metrics, values, strict=True):
                metric.update_state(value, sample_weight=known_samples)

    def logs(self, last: Any) -> dict[str, Any]:
        """What the step returns, after all metrics are updated.

        Args:
            last: what a `compute_metrics` of the model's own returned for the last part.
        """
        found = self.model.get_metrics_result()
        return {**last, **found} if self.has_own_metrics and isinstance(last, dict) else found

    def _added_kind(self, index: int) -> Kind:
        return self._added[index] if index < len(self._added) else Kind.SAMPLES

    def _kind_of_loss(self, loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> Kind:
        found = probing.kind_of_loss(self._concrete, loss, y, y_pred, sample_weight)
        return self._accepted(found, f"loss {loss.name!r} of the model {self.model.name!r}")

    def _accepted(self, kind: Kind, name: str) -> Kind:
        if kind is not Kind.NEITHER:
            return kind
        if self._approximate:
            return Kind.SAMPLES
        raise BadModel(
            f"the {name} is neither a mean nor a sum over samples, so that micro-batches don't add up to it. "
            "Use one that is, leave micro-batches out, or allow what is approximate (approximate=True)."
        )
