"""The loss of a batch as a sum of shares, one for each part of it.

A mean over the batch isn't the mean of the means of its parts: parts differ in size, in sample weights and in how much
of them is masked. Every loss of Keras is however a sum over elements, divided by a number of the whole batch: its
elements, those that aren't masked, the sum of its sample weights, or 1. So each loss is computed with the reduction
"sum", which takes care of weights and masks, and divided by the number of the whole batch. The shares then add up to
the loss of the plain step, and so do their gradients, for each output by its own measure.

How many elements the batch has follows from a part. How many aren't masked doesn't, as the mask is made by the model:
`NeedsWeights` is raised where that must be counted first, in a pass without gradients.

A loss that returns a single number has divided by itself: whether that number adds up as a mean over samples or as a
sum is found out on numbers of our own (`split_step`). What does neither is refused.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

from keras import ops

from memfit.core.errors import BadModel
from memfit.frameworks.keras import internals

_MEANS = ("mean", "sum_over_batch_size", "mean_with_sample_weight")
# Losses of Keras that relate the samples of a batch to each other, whatever their reduction.
_RELATING = {"Dice", "Tversky", "Circle", "dice", "tversky", "circle"}


class LossKind(StrEnum):
    """How a single number of a part counts in that of the batch."""

    SAMPLES = "samples"
    """As in a mean over samples; what doesn't depend on the batch, such as a weight regularizer, counts once so too."""
    SUM = "sum"
    """Numbers of parts add up."""
    NEITHER = "neither"


class NeedsWeights(Exception):
    """The denominators of the whole batch must be counted before the shares can be computed."""


@dataclass(slots=True)
class BatchPart:
    """A part of a batch, as its losses see it."""

    num_samples: Any
    num_total: Any
    weights: Sequence[Any] | None = None  # what each loss divides by, where that must be counted
    counting: bool = False  # this is the pass that counts
    counted: list[Any] = field(default_factory=list)

    def ratio(self, dtype: Any) -> Any:
        """Samples of the part over those of the batch."""
        return ops.cast(self.num_samples, dtype) / ops.cast(self.num_total, dtype)


@dataclass(frozen=True, slots=True)
class LossShare:
    """What a part adds to the loss of the batch."""

    total: Any
    values: list[Any]  # of single outputs that Keras keeps a metric of


class BatchLoss:
    """The loss that a model was compiled with, in shares; `find_kind` tells how one that isn't Keras's counts."""

    def __init__(self, model: Any, find_kind: Callable[[Any, Any, Any, Any], LossKind]) -> None:
        self._model = model
        self._find_kind = find_kind
        self._kinds: dict[int, LossKind] = {}

    @property
    def num_losses(self) -> int:
        """Losses that the compiled loss consists of."""
        return len(internals.losses_of(self._model))

    @property
    def metrics(self) -> list[Any]:
        """Keras's metrics of single losses."""
        compiled = internals.compiled_loss(self._model)
        return list(compiled.metrics) if compiled is not None else []

    def count(self, y: Any, y_pred: Any, sample_weight: Any) -> list[Any]:
        """What each loss counts of a part: the sums of these over all parts are the weights of the batch."""
        part = BatchPart(1, 1, counting=True)
        self._call(part, y, y_pred, sample_weight, [])
        return part.counted

    def share(
        self, part: BatchPart, y: Any, y_pred: Any, sample_weight: Any, others: Sequence[tuple[Any, LossKind]]
    ) -> LossShare:
        """The share of a part; `others` are losses that layers added, and regularizers."""
        values: list[Any] = []
        terms = []
        if internals.compiled_loss(self._model) is not None:
            total = self._call(part, y, y_pred, sample_weight, values)
            if total is not None:
                terms.append(total)
        for loss, kind in others:
            value = internals.added_loss(self._model, loss)
            terms.append(value if kind is LossKind.SUM else value * part.ratio(value.dtype))
        if not terms:
            raise BadModel(f"the model {self._model.name!r} has no loss. Compile it with one: model.compile(loss=...).")
        total = terms[0]
        for term in terms[1:]:
            total = total + ops.cast(term, total.dtype)
        return LossShare(total, values)

    def _call(self, part: BatchPart, y: Any, y_pred: Any, sample_weight: Any, values: list[Any]) -> Any:
        compiled = internals.compiled_loss(self._model)
        losses = enumerate(internals.losses_of(self._model))
        shares = [_PartLoss(loss, index, part, self._kind_of) for index, loss in losses]
        # Stands where Keras updates the metric of an output's loss.
        recorder = SimpleNamespace(update_state=lambda value, sample_weight=None: values.append(value))
        recorders = [recorder for _ in compiled.metrics]
        return internals.with_losses(compiled, shares, recorders)(y, y_pred, sample_weight)

    def _kind_of(self, loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> LossKind:
        """How the loss counts; SAMPLES for Keras's own, which all divide by elements or not at all."""
        if is_elementwise(loss):
            return LossKind.SAMPLES
        if id(loss) not in self._kinds:
            self._kinds[id(loss)] = self._find_kind(loss, y, y_pred, sample_weight)
        kind = self._kinds[id(loss)]
        if kind is LossKind.NEITHER:
            raise BadModel(
                f"the loss {loss.name!r} of the model {self._model.name!r} relates the samples of a batch to each "
                "other, so that parts of a batch don't add up to it. Use a loss that is a mean or a sum over samples, "
                "or leave micro-batches out."
            )
        return kind


def is_elementwise(loss: Any) -> bool:
    """True for a loss of Keras that is computed for each sample by itself."""
    function = getattr(loss, "fn", None)
    named = loss if function is None or type(loss).__name__ != "LossFunctionWrapper" else function
    kind = named if named is function else type(loss)
    own = str(getattr(kind, "__module__", "")).startswith("keras.src.losses")
    return own and getattr(kind, "__name__", "") not in _RELATING


class _PartLoss:
    """One loss, which returns its share of the batch's loss in place of its value."""

    def __init__(
        self, loss: Any, index: int, part: BatchPart, kind_of: Callable[[Any, Any, Any, Any], LossKind]
    ) -> None:
        self._loss = loss
        self._index = index
        self._part = part
        self._kind_of = kind_of
        self.name = loss.name

    def __call__(self, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if self._part.counting:
            count = _count(self._loss, y, y_pred, sample_weight)
            self._part.counted.append(ops.cast(count, self._loss.dtype))
            return ops.zeros((), self._loss.dtype)
        kind = self._kind_of(self._loss, y, y_pred, sample_weight)
        return share_of(self._loss, self._part, self._index, kind, y, y_pred, sample_weight)


def _count(loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
    """What a loss divides by that only its mask and weights tell; 0 where neither counts."""
    _, values, mask = _summed(loss, y, y_pred, sample_weight)
    if values is None or loss.reduction not in _MEANS or (sample_weight is None and mask is None):
        return 0
    if loss.reduction != "mean_with_sample_weight":
        return 0 if mask is None else ops.sum(ops.cast(mask, loss.dtype))
    weight = None if sample_weight is None else ops.cast(sample_weight, values.dtype)
    if mask is None:
        return ops.sum(weight)
    mask = ops.cast(mask, values.dtype)
    return ops.sum(internals.apply_mask(weight, mask, dtype=values.dtype, reduction=loss.reduction))


def share_of(loss: Any, part: BatchPart, index: int, kind: LossKind, y: Any, y_pred: Any, sample_weight: Any) -> Any:
    """What one loss of a part adds to its value for the batch."""
    total, values, mask = _summed(loss, y, y_pred, sample_weight)
    is_single = values is None or (not len(values.shape) and sample_weight is None and mask is None)
    if is_single:
        if len(total.shape):
            total = ops.sum(total)
        return total if kind is LossKind.SUM else total * part.ratio(total.dtype)
    if loss.reduction not in _MEANS:
        return total
    weighs = loss.reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None)
    if mask is None and not weighs:
        sized = values if len(values.shape) else sample_weight
        return total / _size(sized, total.dtype) * part.ratio(total.dtype)
    if part.weights is None:
        raise NeedsWeights
    weight = ops.cast(part.weights[index], total.dtype)
    if weighs:
        return ops.divide_no_nan(total, weight)
    sized = values if len(values.shape) else mask
    # Keras divides by all elements, masked or not, and multiplies by those of the mask over those that aren't masked.
    return ops.divide_no_nan(total * (_size(mask, total.dtype) / _size(sized, total.dtype)), weight)


def _summed(loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """(the sum that the loss is a quotient of, its values for each element, their mask), by the loss's own code."""
    seen: list[Any] = []

    def call(y_true: Any, y_pred: Any) -> Any:
        seen.append(loss.call(y_true, y_pred))
        return seen[-1]

    summed = internals.copied(loss)
    summed.reduction = "sum"
    summed.call = call
    total = summed(y, y_pred, sample_weight)
    if not seen:
        # The loss has a __call__ of its own, and what that does to reductions and masks is its own business.
        return total, None, None
    values = seen[-1]
    masks = [mask for mask in (internals.get_mask(y_pred), internals.get_mask(values)) if mask is not None]
    mask = None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]
    return total, ops.convert_to_tensor(values, dtype=loss.dtype), mask


def _size(tensor: Any, dtype: Any) -> Any:
    """Elements of a tensor, which a graph may only know when it runs."""
    return ops.cast(math.prod(ops.shape(tensor)), dtype)
