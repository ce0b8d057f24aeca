"""Hypotheses about how a loss adds up, what each predicts from two parts, and batches that set them apart."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from memfit.core.settings import Weighting
from memfit.frameworks.torch.apply.micro_batches import places, tensor_at
from memfit.frameworks.torch.shapes.stand_in import map_tensors, tensors_in

# Values that losses leave out by convention: PyTorch's, padding, segmentation's "void".
USUAL_IGNORED = -100
_IGNORED = (USUAL_IGNORED, 0, -1, 255, 1)
# How far a loss may be off relative to its size, by the narrowest type that it was computed with: rounding of single
# elements averages out, so a fraction of the type's precision; other kernels for other sizes cost a few digits.
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-4, torch.bfloat16: 8e-4}
_DEFAULT_ROUNDING = 1e-3
# GPUs compute with fewer bits than float32 has (TF32).
_CUDA_ROUNDING = 1e-4
# Losses near 0 are differences of larger numbers.
_FLOOR = {torch.float64: 1e-14, torch.float32: 2e-7}
_DEFAULT_FLOOR = 1e-5
# So many of the numbers in a tensor are tried.
_MOST_NUMBERS = 16
# A prediction tells something where parts differ by this many times what it is off: their weights are then right to 2%.
_TELLING = 50


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of some samples.

    Args:
        value: the loss.
        weight: what it weighs, where the loss function says so.
        rounding: relative error that must be expected; `floor` is the absolute one.
        precision: distance to the next number of the loss's type.
    """

    value: float
    weight: float | None
    rounding: float
    floor: float
    precision: float

    @classmethod
    def read(cls, result: Any, narrowest: torch.dtype) -> "Loss | None":
        """What a loss function returned; None where it is no scalar, nor a scalar and its weight."""
        weight = None
        if isinstance(result, tuple | list) and len(result) == 2:
            result, given = result
            if isinstance(given, torch.Tensor) and given.numel() == 1:
                given = given.item()
            if isinstance(given, bool) or not isinstance(given, int | float):
                return None
            weight = float(given)
        if not isinstance(result, torch.Tensor) or result.numel() != 1 or result.is_complex():
            return None
        epsilon = torch.finfo(result.dtype).eps if result.is_floating_point() else 0.0
        # The loss itself is rounded to its type, once for each part.
        rounding = max(_ROUNDING.get(narrowest, _DEFAULT_ROUNDING), 2 * epsilon)
        rounding = max(rounding, _CUDA_ROUNDING) if result.is_cuda else rounding
        value = float(result.item())
        return cls(value, weight, rounding, _FLOOR.get(narrowest, _DEFAULT_FLOOR), epsilon * abs(value))


@dataclass(frozen=True, slots=True)
class Observation:
    """The loss of some samples, at once and in two parts, of which the first has `cut` samples."""

    batch: Any
    cut: int
    num_samples: int
    first: Loss
    second: Loss
    whole: Loss

    @property
    def is_finite(self) -> bool:
        """Whether the loss of the whole is a number; a part in which nothing counts may have none."""
        return math.isfinite(self.whole.value)

    @property
    def noise(self) -> float:
        """How far a right prediction may be off."""
        sizes = [abs(loss.value) for loss in (self.first, self.second, self.whole) if math.isfinite(loss.value)]
        return max(self.whole.floor, self.whole.rounding * max(sizes))


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A hypothesis; `can_be_tested`: whether a changed batch would tell it from a mean over samples."""

    weighting: Weighting
    can_be_tested: bool = False

    @property
    def order(self) -> tuple[bool, int, int]:
        """Of hypotheses that say the same, the least is the plainest."""
        return self.weighting.kind == "count", self.rank, self.weighting.skipped

    @property
    def rank(self) -> int:
        """Place of the ignored value among the usual ones."""
        ignored = self.weighting.ignored
        return _IGNORED.index(ignored) if ignored in _IGNORED else len(_IGNORED)

    def holds(self, observation: Observation) -> bool:
        """Whether the whole is what this predicts from the parts."""
        return self._residual(observation) <= observation.noise

    def weighs_both(self, observation: Observation) -> bool:
        """Whether something counts in both parts: where one alone does, the greater of two losses looks like a mean."""
        weights = self._weights(observation)
        return weights is not None and all(weights)

    def is_told_apart(self, observation: Observation) -> bool:
        """Whether another way to weigh would have predicted something else."""
        first, second = observation.first.value, observation.second.value
        if not self.weighs_both(observation):
            return False
        telling = abs(first + second) if self.weighting.kind == "sum" else abs(first - second)
        return telling > _TELLING * max(self._residual(observation), 4 * observation.whole.precision)

    def describe(self) -> str:
        """The hypothesis in words."""
        weighting = self.weighting
        if weighting.kind == "count":
            skipped = f", its first {weighting.skipped} of each sample left out" if weighting.skipped else ""
            return f"a mean over the elements of batch{weighting.tensor} that aren't {weighting.ignored}{skipped}"
        return {"samples": "a mean over samples", "sum": "a sum over samples"}.get(
            weighting.kind, "a mean weighted by what the loss function returns"
        )

    def _residual(self, observation: Observation) -> float:
        """How far the prediction is off."""
        weights = self._weights(observation)
        if weights is None or not any(weights):
            return math.inf
        losses = zip(weights, (observation.first, observation.second), strict=True)
        # A mean over nothing is not a number, and weighs nothing.
        predicted = sum(weight * loss.value for weight, loss in losses if weight)
        if self.weighting.kind != "sum":
            whole = observation.whole.weight if self.weighting.kind == "given" else None
            predicted /= whole or sum(weights) or 1
        return abs(predicted - observation.whole.value)

    def _weights(self, observation: Observation) -> tuple[float, float] | None:
        match self.weighting.kind:
            case "sum":
                return 1.0, 1.0
            case "samples":
                return float(observation.cut), float(observation.num_samples - observation.cut)
            case "count":
                tensor, skipped = tensor_at(observation.batch, self.weighting.tensor), self.weighting.skipped
                counted = (tensor[:, skipped:] if skipped else tensor) != self.weighting.ignored
                return float(counted[: observation.cut].sum()), float(counted[observation.cut :].sum())
        weights = observation.first.weight, observation.second.weight
        return None if None in weights or not observation.whole.weight else weights  # type: ignore[return-value]


def all_hypotheses(observation: Observation) -> list[Hypothesis]:
    """Every hypothesis for that batch, the plainest first."""
    if observation.whole.weight is not None:
        return [Hypothesis(Weighting("given"))]
    hypotheses = [Hypothesis(Weighting("samples")), Hypothesis(Weighting("sum"))]
    for place, tensor in places(observation.batch):
        has_positions = tensor.dim() > 1 and tensor.shape[1] > 2
        hypotheses += [
            Hypothesis(Weighting("count", place, ignored, skipped), has_positions)
            for ignored in _ignored_values(tensor)
            for skipped in ((0, 1) if has_positions else (0,))
        ]
    return hypotheses


def _ignored_values(tensor: torch.Tensor) -> list[int]:
    """Values of a tensor that a loss may leave out; none for measurements."""
    if not tensor.dim() or tensor.dtype.is_complex:
        return []
    if tensor.is_floating_point():
        return [0] if _is_mask(tensor) else []
    if tensor.dtype is torch.bool:
        return [0]
    flat = tensor.flatten()
    # Padding stands at the end, and a value that is left out is often the most frequent or an extreme one.
    own = [int(flat[-1]), int(flat.mode().values), int(flat.min()), int(flat.max())]
    bounds = torch.iinfo(tensor.dtype)
    return [value for value in dict.fromkeys((*_IGNORED, *own)) if bounds.min <= value <= bounds.max]


def shortened(batch: Any, place: str, ignored: int) -> Any:
    """The batch with all but a few elements of one tensor ignored: 1 position of its first sample, 3 of the others.

    So few that one position more or less makes a difference: where labels are shifted, the first sample has none left.
    A sample of which nothing counts gets the elements of the one of which most does.
    """
    target = tensor_at(batch, place)
    changed = target.clone()
    counts = _counts(changed, ignored)
    changed[counts == 0] = changed[counts.argmax()].clone()
    for sample, row in enumerate(changed):
        counts = (row != ignored).flatten(1).any(1) if row.dim() > 1 else row != ignored
        row[counts.cumsum(0) > (1 if sample == 0 else min(3, len(row) - 1))] = ignored
    return map_tensors(batch, lambda tensor: changed if tensor is target else tensor)


def evened(batch: Any, weighting: Weighting) -> Any:
    """The batch in which samples of which nothing counts have the elements of the one of which most does."""
    target, skipped = tensor_at(batch, weighting.tensor), weighting.skipped
    counts = _counts(target[:, skipped:] if skipped else target, weighting.ignored)
    changed = target.clone()
    changed[counts == 0] = target[counts.argmax()]
    return map_tensors(batch, lambda tensor: changed if tensor is target else tensor)


def has_empty(batch: Any, place: str, ignored: int) -> bool:
    """Whether nothing of some sample counts: any mean over what counts then looks like any other."""
    return bool((_counts(tensor_at(batch, place), ignored) == 0).any())


def _counts(tensor: torch.Tensor, ignored: int) -> torch.Tensor:
    return (tensor != ignored).reshape(len(tensor), -1).sum(1)


def contrasted(batch: Any, *, num_classes: int | None = None) -> Any:
    """The batch with a first sample unlike the others, where samples of random data are all alike.

    Its measurements are halved, and the second half of its positions hold what the first one does: values that any
    loss takes. The first half stays, so that not all of what counts is gone. Where all have the same number, such as a
    class, it gets the one next to it: classes may weigh differently.

    With `num_classes`, no operator can refuse the numbers: positions stay, and the class after 0 is taken where the
    loss is known to have it.
    """

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.dtype.is_complex:
            return tensor
        changed = tensor.clone()
        if tensor.is_floating_point():
            # Half a mask would be another weight.
            if not _is_mask(tensor):
                changed[0] *= 0.5
        elif tensor.dim() > 1:
            if num_classes is None:
                changed[0, tensor.shape[1] // 2 :] = tensor[0, :1]
        elif tensor.dtype is not torch.bool and bool((tensor == tensor[0]).all()):
            number = int(tensor[0])
            if number > 0:
                changed[0] = number - 1
            elif num_classes is None or (number == 0 and num_classes > 1):
                changed[0] = 1
        return changed

    return map_tensors(batch, change)


HOLLOW = (0.0, -1.0, math.nan)
"""What elements are often told by that don't count: missing values, distances, weights."""


def hollowed(batch: Any, value: float) -> Any:
    """The batch with half of the first sample's measurements, and of its masks, replaced by a value."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 1 or not tensor.is_floating_point() or (value and _is_mask(tensor)):
            return tensor
        changed = tensor.clone()
        elements = changed[0].reshape(-1)
        elements[len(elements) // 2 :] = value
        changed[0] = elements.view_as(changed[0])
        return changed

    return map_tensors(batch, change)


def numbers_of(batch: Any) -> list[list[int]]:
    """The whole numbers in each tensor of a batch, in order; some of them where they are many, none where none are."""
    numbers: list[list[int]] = []
    for tensor in tensors_in(batch):
        is_whole = tensor.dim() > 0 and not tensor.is_floating_point() and tensor.dtype is not torch.bool
        found = tensor.unique().tolist() if is_whole and not tensor.is_complex() and not tensor.is_sparse else []
        step = max(1, (len(found) - 1) / (_MOST_NUMBERS - 1))
        numbers.append([found[round(place * step)] for place in range(min(len(found), _MOST_NUMBERS))])
    return numbers


def spread(batch: Any, numbers: list[list[int]]) -> Any:
    """The batch with all numbers that occur in its tensors, the smaller ones first; None where that changes nothing.

    A loss may leave out elements of some classes, of which the first samples hold none.
    """
    tensors = tensors_in(batch)
    if not any(len(found) > 1 for found in numbers):
        return None
    changed: dict[int, torch.Tensor] = {}
    for tensor, found in zip(tensors, numbers, strict=True):
        if len(found) < 2:
            continue
        other = tensor.clone()
        for place in range(len(other)):
            number = found[place * len(found) // len(other)]
            if other.dim() > 1:
                other[place, other.shape[1] // 2 :] = number
            else:
                other[place] = number
        changed[id(tensor)] = other
    return map_tensors(batch, lambda tensor: changed.get(id(tensor), tensor))


def _is_mask(tensor: torch.Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == 1)).all())
