"""A training step whose batch is computed in parts: what is the same whichever backend runs it.

The backends differ in how parts follow one another and how gradients are added up (`jax_steps`, `tensorflow_steps`,
`torch_steps`). What a part adds to the loss, and what can't be split, is decided here.

A loss function of the user's, a loss that a layer adds, or a `compute_loss` may be a mean over samples, a sum over
them, or neither. Their code doesn't say, so they are computed for a small batch of our own numbers and for two unequal
parts of it: one weighting of the parts gives the value for the whole, or none does. Thresholds hide in numbers of one
size, so that further batches have samples of very different sizes, and the weighting has to hold for all of them. The
batch that trains isn't touched: in a graph there are no numbers yet, and random states and metrics must not move.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import keras
import numpy as np
from keras import ops

from memfit.core.errors import BadBatch, BadModel
from memfit.core.settings import Settings
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.apply.weights import BatchLoss, BatchPart, LossKind, LossShare, NeedsWeights, share_of
from memfit.frameworks.keras.batch import leaves

_FIRST, _SECOND = 2, 3
_UNKNOWN_SIZE = 6
_TOLERANCE = 1e-5
# Batches whose samples are each of a size of their own, between these powers of ten.
_NUM_SCALED = 3
_SCALES = (-1.5, 2.0)

_PARTS = ((_FIRST, slice(0, _FIRST)), (_SECOND, slice(_FIRST, None)))
_KINDS = (LossKind.SAMPLES, LossKind.SUM)

Concrete = Callable[[], AbstractContextManager[Any]]
_Drawn = TypeVar("_Drawn")


def kind_of_loss(concrete: Concrete, loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> LossKind:
    """How the values of a loss for parts of a batch make up that of the batch.

    Of targets, predictions and weights only shapes and types count. Within `concrete`, operations are computed at once.
    """

    def draw(random: np.random.Generator, scale: Any) -> tuple[set[LossKind], bool]:
        made = [_made(spec, random, 0.05, scale) for spec in (y, y_pred)] + [_made(sample_weight, random, 0.05)]
        parts = [(BatchPart(size, _FIRST + _SECOND), _rows(made, rows)) for size, rows in _PARTS]
        whole = _number(loss(*_rows(made, slice(None))))
        shares = {kind: [_number(share_of(loss, part, 0, kind, *given)) for part, given in parts] for kind in _KINDS}
        return {kind for kind in _KINDS if _is_sum(whole, shares[kind])}, bool(np.isfinite(whole) and whole != 0)

    draws = _draws(concrete, 0, draw)
    kinds = [kinds for kinds, _ in draws]
    # A value for each sample is summed up by Keras itself: nothing is left to tell apart.
    is_by_sample = any(is_something for _, is_something in draws) and all(len(found) == 2 for found in kinds)
    return LossKind.SAMPLES if is_by_sample else _agreed(kinds)


def kinds_of_added(
    concrete: Concrete, model: Any, values: tuple[list[Any], list[Any]], x: Any, training: bool = True
) -> list[LossKind]:
    """How the losses that layers add, and regularizers, count; in the order of `model.losses`.

    `values` are those of the trainable and the other variables; of `x` only shapes and types count. Random layers
    called as in `training` tell nothing.
    """

    def losses(made: Any, rows: slice) -> list[float]:
        keywords = internals.training_keyword(model, training)
        found = model.stateless_call(*values, *_rows([made], rows), return_losses=True, **keywords)[2]
        return [_number(internals.added_loss(model, loss)) for loss in found]

    def draw(random: np.random.Generator, scale: Any) -> list[list[float]]:
        made = _made(x, random, -1.0, scale)
        return [losses(made, slice(None)), *(losses(made, rows) for _, rows in _PARTS)]

    draws = _draws(concrete, 1, draw)
    counts = {len(values) for drawn in draws for values in drawn}
    if len(counts) != 1:
        return []
    # Regularizers of weights come last, and are the same for all parts.
    num_added = counts.pop() - num_regularized(model)
    found = [_agreed([_kinds(*(values[index] for values in drawn)) for drawn in draws]) for index in range(num_added)]
    if LossKind.NEITHER in found and training:
        return kinds_of_added(concrete, model, values, x, training=False)
    return found + [LossKind.SAMPLES] * num_regularized(model)


def num_regularized(model: Any) -> int:
    """Losses of the model that are regularizers of weights."""
    # Counted, not computed: while a step is compiled for JAX, variables have no values outside of it.
    return sum(getattr(variable, "regularizer", None) is not None for variable in model.trainable_weights)


def kind_of_step(
    concrete: Concrete, model: Any, values: tuple[list[Any], list[Any]], data: tuple[Any, Any, Any]
) -> LossKind:
    """How the values of a `compute_loss` of the user's own count."""
    metrics = [np.zeros(variable.shape, variable.dtype) for variable in model.metrics_variables]

    def loss(made: list[Any], rows: slice) -> float:
        x, y, sample_weight = _rows(made, rows)
        keywords = internals.training_keyword(model, False)
        y_pred, others, added = model.stateless_call(*values, x, return_losses=True, **keywords)
        with internals.losses_given(model, added):
            arguments = {"x": x, "y": y, "y_pred": y_pred, "sample_weight": sample_weight, "training": True}
            found, _ = model.stateless_compute_loss(
                values[0], others, list(map(ops.convert_to_tensor, metrics)), **arguments
            )
        return _number(found)

    def draw(random: np.random.Generator, scale: Any) -> set[LossKind]:
        made = [_made(data[0], random, -1.0, scale), _made(data[1], random, 0.05, scale)]
        made.append(_made(data[2], random, 0.05))
        parts = [loss(made, rows) for _, rows in _PARTS]
        return _kinds(loss(made, slice(None)), *parts)

    return _agreed(_draws(concrete, 2, draw))


def _draws(concrete: Concrete, seed: int, draw: Callable[[np.random.Generator, Any], _Drawn]) -> list[_Drawn]:
    """What is drawn for numbers as they are (scale None), and for samples of very different sizes.

    Nothing where the user's code fails on plain numbers that aren't its own.
    """
    random, scales, found = np.random.default_rng(seed), np.random.default_rng(3), []
    with concrete():
        for scale in (None, *(10 ** scales.uniform(*_SCALES, _FIRST + _SECOND) for _ in range(_NUM_SCALED))):
            try:
                found.append(draw(random, scale))
            except Exception:  # whatever the user's own code raises
                if scale is None:
                    return []
    return found


def _kinds(whole: float, first: float, second: float) -> set[LossKind]:
    """The weightings that give the value for the whole; both where it is nothing or not finite."""
    num_samples = _FIRST + _SECOND
    weighted = {
        LossKind.SAMPLES: [_FIRST * first / num_samples, _SECOND * second / num_samples],
        LossKind.SUM: [first, second],
    }
    return {kind for kind, values in weighted.items() if _is_sum(whole, values)}


def _agreed(draws: list[set[LossKind]]) -> LossKind:
    """The one weighting that holds for each batch, and that one batch at least tells from the other."""
    left = set.intersection(*draws) if draws else set()
    return left.pop() if len(left) == 1 else LossKind.NEITHER


def _is_sum(whole: float, values: list[float]) -> bool:
    size = max(abs(whole), sum(map(abs, values)), 1e-9)
    # What overflows tells nothing.
    return not np.isfinite(size) or abs(whole - sum(values)) <= _TOLERANCE * size


def _number(value: Any) -> float:
    return float(ops.stop_gradient(ops.sum(value)))


def _made(specs: Any, random: np.random.Generator, low: float, scale: Any = None) -> Any:
    """Arrays of a few samples, of the types and otherwise the shapes of a batch's."""

    def made(spec: Any) -> Any:
        shape = [_FIRST + _SECOND, *(size if size is not None else _UNKNOWN_SIZE for size in spec.shape[1:])]
        dtype = keras.backend.standardize_dtype(spec.dtype)
        if "float" in dtype:
            # float32 would hide a difference of weightings behind rounding where a loss is a large sum.
            values = random.uniform(low, 0.95, shape)
            if scale is not None:
                values *= scale.reshape([-1] + [1] * (len(shape) - 1))
            return values.astype(dtype if dtype in ("float16", "float64") else "float32")
        # Zeros and ones are labels and tokens that every model has, and zeros are masked.
        labels = random.integers(0, 2, shape)
        labels.flat[0] = 1
        return labels.astype(dtype)

    return keras.tree.map_structure(lambda spec: None if spec is None else made(spec), specs)


def _rows(values: list[Any], rows: slice) -> list[Any]:
    def taken(value: Any) -> Any:
        return None if value is None else ops.convert_to_tensor(value[rows])

    return [keras.tree.map_structure(taken, value) for value in values]


class SplitStep(ABC):
    """A `train_step` that computes a batch in parts; each backend has its own, called `BackendSplitStep`.

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
        self._step_kind: LossKind | None = None
        self._added: list[LossKind] = []

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
        num_added = len(losses) - num_regularized(self.model) if losses else 0
        if not (self._step_kind is None if self.has_own_loss else num_added > 0 and not self._added):
            return
        model, concrete = self.model, type(self).concrete
        values = self.numbers_of(model.trainable_variables), self.numbers_of(model.non_trainable_variables)
        if self.has_own_loss:
            found = kind_of_step(concrete, model, values, data)
            self._step_kind = self._accepted(found, f"compute_loss of {type(model).__name__}")
        else:
            kinds = kinds_of_added(concrete, model, values, data[0])
            name = f"loss that a layer of the model {model.name!r} adds"
            self._added = [self._accepted(kind, name) for kind in kinds or [LossKind.NEITHER]]

    def share(self, part: BatchPart, data: tuple[Any, Any, Any], y_pred: Any, losses: Sequence[Any]) -> LossShare:
        """What a part adds to the loss of the batch."""
        x, y, sample_weight = data
        if self._step_kind is not None:
            value = internals.compute_loss(
                self.model, x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
            )
            return LossShare(value if self._step_kind is LossKind.SUM else value * part.ratio(value.dtype), [])
        kinds = [*self._added, *[LossKind.SAMPLES] * (len(losses) - len(self._added))]
        others = list(zip(losses, kinds, strict=False))
        return self.loss.share(part, y, y_pred, sample_weight, others)

    def part_loss(
        self, data: tuple[Any, Any, Any], length: Any, num_samples: Any, weights: Any
    ) -> tuple[LossShare, Any, Any]:
        """(the share of a part, what to differentiate for it, its predictions)."""
        y_pred = self.call(data[0])
        losses = [] if self.has_own_loss else self.model.losses
        self.prepare(data, losses)
        found = self.share(BatchPart(length, num_samples, weights), data, y_pred, losses)
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

    def _kind_of_loss(self, loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> LossKind:
        found = kind_of_loss(type(self).concrete, loss, y, y_pred, sample_weight)
        return self._accepted(found, f"loss {loss.name!r} of the model {self.model.name!r}")

    def _accepted(self, kind: LossKind, name: str) -> LossKind:
        if kind is not LossKind.NEITHER:
            return kind
        if self._approximate:
            return LossKind.SAMPLES
        raise BadModel(
            f"the {name} is neither a mean nor a sum over samples, so that micro-batches don't add up to it. "
            "Use one that is, leave micro-batches out, or allow what is approximate (approximate=True)."
        )


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
