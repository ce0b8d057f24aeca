"""A training step whose batch is computed in parts: what is the same whichever backend runs it.

The backends differ in how parts follow one another and how gradients are added up (`jax_steps`, `tensorflow_steps`,
`torch_steps`). What a part adds to the loss, and what can't be split, is decided here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import keras

from memfit.core.errors import BadBatch, BadModel
from memfit.core.settings import Settings
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.apply import probing
from memfit.frameworks.keras.apply.probing import Concrete
from memfit.frameworks.keras.apply.weights import BatchLoss, Kind, NeedsWeights, Part, Share


class SplitStep(ABC):
    """A `train_step` that computes a batch in parts; each backend has its own, called `Step`.

    Batches of one part are given to `plain`, the model's own step. With `approximate`, losses that don't add up are
    weighed by samples instead of being refused.
    """

    concrete: Concrete
    """A context in which operations are computed at once, also while a graph is made."""

    def __init__(self, settings: Settings, model: Any, plain: Callable[..., Any], approximate: bool = False) -> None:
        self.settings = settings
        self.model = model
        self.plain = plain
        self._is_counted = False
        self._approximate = approximate
        self.loss = BatchLoss(model, self._kind_of_loss)
        self._step_kind: Kind | None = None
        self._added: list[Kind] = []

    @abstractmethod
    def __call__(self, *arguments: Any) -> Any:
        """Trains on a batch, with the arguments that Keras gives to `train_step` on this backend."""

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
        return self.model(x, **internals.training_keyword(self.model, training))

    @abstractmethod
    def numbers_of(self, variables: Sequence[Any]) -> list[Any]:
        """Numbers in the shapes of variables: any will do, their own where they can be had."""

    def prepare(self, data: tuple[Any, Any, Any], losses: Sequence[Any]) -> None:
        """Finds out how a loss of the user's own, and those that layers add, count."""
        num_added = len(losses) - probing.num_regularized(self.model) if losses else 0
        if not (self._step_kind is None if self.has_own_loss else num_added > 0 and not self._added):
            return
        model, concrete = self.model, type(self).concrete
        values = self.numbers_of(model.trainable_variables), self.numbers_of(model.non_trainable_variables)
        if self.has_own_loss:
            found = probing.kind_of_step(concrete, model, values, data)
            self._step_kind = self._accepted(found, f"compute_loss of {type(model).__name__}")
        else:
            kinds = probing.kinds_of_added(concrete, model, values, data[0])
            name = f"loss that a layer of the model {model.name!r} adds"
            self._added = [self._accepted(kind, name) for kind in kinds or [Kind.NEITHER]]

    def share(self, part: Part, data: tuple[Any, Any, Any], y_pred: Any, losses: Sequence[Any]) -> Share:
        """What a part adds to the loss of the batch."""
        x, y, sample_weight = data
        if self._step_kind is not None:
            value = internals.compute_loss(
                self.model, x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
            )
            return Share(value if self._step_kind is Kind.SUM else value * part.ratio(value.dtype), [])
        kinds = [*self._added, *[Kind.SAMPLES] * (len(losses) - len(self._added))]
        others = list(zip(losses, kinds, strict=False))
        return self.loss.share(part, y, y_pred, sample_weight, others)

    def part_loss(
        self, data: tuple[Any, Any, Any], length: Any, num_samples: Any, weights: Any
    ) -> tuple[Share, Any, Any]:
        """(the share of a part, what to differentiate for it, its predictions)."""
        y_pred = self.call(data[0])
        losses = [] if self.has_own_loss else self.model.losses
        self.prepare(data, losses)
        found = self.share(Part(length, num_samples, weights), data, y_pred, losses)
        optimizer = self.model.optimizer
        return found, found.total if optimizer is None else optimizer.scale_loss(found.total), y_pred

    def weighed(self, count: Callable[[], Any], run: Callable[[Any], Any]) -> Any:
        """`run(weights)`, with the denominators of the batch counted first where a loss turns out to need them."""
        try:
            return run(count() if self._is_counted else None)
        except NeedsWeights:
            # Raised by the first part, before anything was added up.
            self._is_counted = True
            return run(count())

    def num_values(self) -> int:
        """Losses of single outputs that Keras keeps a metric of, and that are updated once for the batch."""
        return 0 if self.has_own_loss else len(self.loss.metrics)

    def finish_metrics(self, share: Any, values: Sequence[Any], num_samples: Any, known_samples: Any) -> None:
        """Updates the metrics of the loss and of its outputs as the plain step does, once for the batch.

        Keras weighs the losses of outputs only where the number of samples is known ahead (`known_samples`).
        """
        internals.loss_tracker(self.model).update_state(share, sample_weight=num_samples)
        if values:
            for metric, value in zip(self.loss.metrics, values, strict=True):
                metric.update_state(value, sample_weight=known_samples)

    def logs(self, last: Any) -> dict[str, Any]:
        """What the step returns: metrics, and what the model's own `compute_metrics` gave for the last part."""
        found = self.model.get_metrics_result()
        return {**last, **found} if self.has_own_metrics and isinstance(last, dict) else found

    def _kind_of_loss(self, loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> Kind:
        found = probing.kind_of_loss(type(self).concrete, loss, y, y_pred, sample_weight)
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


def splits(settings: Settings) -> bool:
    """Whether the settings ask for more than one part."""
    return settings.micro_batches > 1 or settings.micro_batch_size > 0


def part_size(settings: Settings, num_samples: Any) -> Any:
    """Samples of all parts but the last, which has what is left; a tensor where a graph only knows when it runs."""
    if settings.micro_batch_size > 0:
        return settings.micro_batch_size
    # At least one sample: a batch smaller than the number of parts is split into as many parts as it has samples.
    return (num_samples + settings.micro_batches - 1) // settings.micro_batches


def leaves(data: Any) -> list[Any]:
    """The arrays of a batch."""
    return [leaf for leaf in keras.tree.flatten(data) if leaf is not None]


def check_first_dimensions(data: Any) -> int | None:
    """The batch's samples, None where they are only known when it runs; refuses arrays that disagree."""
    sizes: dict[int, tuple[Any, ...]] = {}
    for leaf in leaves(data):
        shape = tuple(leaf.shape)
        if not shape:
            raise BadBatch(
                "the batch holds a number without dimensions, which can't be split into micro-batches. "
                "Give arrays that all have one row for each sample."
            )
        if shape[0] is not None:
            sizes.setdefault(int(shape[0]), shape)
    if len(sizes) > 1:
        shapes = ", ".join(map(str, sizes.values()))
        raise BadBatch(
            f"the arrays of the batch differ in their first dimension, which can't be split into micro-batches: "
            f"shapes {shapes}. Give arrays that all have one row for each sample."
        )
    return next(iter(sizes), None)
