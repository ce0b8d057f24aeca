"""The tensors of an ensemble: passes without gradients, outputs joined and combined in host memory."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from memfit.adapters.torch.fitting.micro_batches import places, split
from memfit.adapters.torch.job import common_first_dimension
from memfit.adapters.torch.stand_in import map_tensors
from memfit.core.errors import BadInput

COMBINATIONS = ("mean", "sum", "vote", "stack")
batch_size = common_first_dimension
_PROBED = 32
"""Elements of each tensor that tell one batch from another."""

__all__ = [
    "COMBINATIONS",
    "batch_size",
    "combined_by",
    "fingerprint",
    "is_model",
    "join",
    "predict",
    "ready",
    "shuffles",
    "split",
    "structure",
]


def is_model(value: object) -> bool:
    """Whether it is a model that is in memory already."""
    return isinstance(value, torch.nn.Module)


def structure(model: torch.nn.Module) -> object:
    """The same for models that are built alike, whatever their values."""
    return str(model), tuple((name, tuple(value.shape), value.dtype) for name, value in model.named_parameters())


def ready(model: Any) -> Any:
    """A member as it is used: in evaluation mode."""
    if not isinstance(model, torch.nn.Module):
        raise BadInput(f"a member of the ensemble is built as {type(model).__name__}, but a torch.nn.Module is needed.")
    return model.eval()


def predict(function: Callable[[Any, Any], Any], model: Any, batch: Any) -> Any:
    """One pass without gradients, its output in host memory."""
    with torch.no_grad():
        output = map_tensors(function(model, batch), lambda tensor: tensor.detach().to("cpu"))
    if not dict(places(output)):
        raise BadInput(f"predict must return tensors, but it returned {type(output).__name__}.")
    return output


def join(outputs: list[Any], sizes: list[int]) -> Any:
    """The output of the whole batch from those of its parts."""
    tensors = [dict(places(output)) for output in outputs]
    for place in tensors[0]:
        for found, size in zip(tensors, sizes, strict=True):
            shape = tuple(found[place].shape) if place in found else None
            if not shape or shape[0] != size:
                raise BadInput(
                    f"predict returned a tensor of shape {shape} for {size} samples{_at(place)}, so that outputs of "
                    "parts of a batch can't be joined. Return tensors with one row per sample, or give smaller batches."
                )
    joined = iter([torch.cat([found[place] for found in tensors]) for place in tensors[0]])
    return map_tensors(outputs[0], lambda _: next(joined))


def fingerprint(batch: Any) -> object:
    """Shapes and a few values of each tensor."""
    return tuple((place, tuple(tensor.shape), *_probe(tensor)) for place, tensor in places(batch))


def shuffles(batches: Any) -> bool:
    """Whether it is a loader that gives another order every time."""
    loader = isinstance(batches, torch.utils.data.DataLoader)
    return loader and isinstance(batches.sampler, torch.utils.data.RandomSampler)


def _probe(tensor: torch.Tensor) -> list[Any]:
    if tensor.layout is not torch.strided or not tensor.numel():
        return []
    flat = tensor.detach().reshape(-1)
    chosen = flat[:: max(1, flat.numel() // _PROBED)].to("cpu")
    # As text, because not-a-number equals nothing, itself included.
    return [str(value) for value in chosen.tolist()]


def combined_by(combine: Any, precise: bool) -> Any:
    """What takes the outputs: by name, or a function of all members' outputs of a batch, stacked."""
    if combine in ("mean", "sum"):
        return _Running(mean=combine == "mean", precise=precise)
    if combine == "vote":
        return _Votes()
    if combine == "stack":
        return _Stacked(lambda stacked: stacked)
    if callable(combine):
        return _Stacked(combine)
    raise BadInput(f"combine must be one of {', '.join(COMBINATIONS)} or a function, but {combine!r} was given.")


class _Running:
    """A sum that is added to in place.

    Args:
        mean: whether it is divided by the number of members at the end.
        precise: whether to add in float64; otherwise in the outputs' own precision, float32 at least.
    """

    def __init__(self, *, mean: bool, precise: bool) -> None:
        self._mean, self._precise = mean, precise
        self._sums: list[Any] = []
        self._types: list[dict[str, torch.dtype]] = []

    def add(self, index: int, output: Any) -> None:
        if index == len(self._sums):
            self._types.append({place: tensor.dtype for place, tensor in places(output)})
            self._sums.append(map_tensors(output, self._started))
            return
        sums, found = dict(places(self._sums[index])), dict(places(output))
        _check_same(index, sums, found)
        for place, total in sums.items():
            total.add_(found[place])

    def finished(self, index: int, num_members: int) -> Any:
        types = iter(self._types[index].values())

        def finish(total: torch.Tensor) -> torch.Tensor:
            kind = next(types)
            if self._mean:
                total.div_(num_members)
            return total if total.dtype == kind or not kind.is_floating_point else total.to(kind)

        result = map_tensors(self._sums[index], finish)
        # What is handed out need not be held here as well.
        self._sums[index] = None
        return result

    def _started(self, tensor: torch.Tensor) -> torch.Tensor:
        kind = tensor.dtype
        if kind.is_complex:
            kind = torch.complex128 if self._precise else kind
        elif self._precise or (self._mean and not kind.is_floating_point):
            kind = torch.float64
        elif kind.is_floating_point:
            kind = torch.promote_types(kind, torch.float32)
        elif kind == torch.bool:
            kind = torch.int64
        # A copy in any case: the output may be a tensor that the user's code keeps.
        return tensor.to(kind, copy=True)


class _Stacked:
    """All members' outputs of a batch, in one more dimension in front, given to a function at the end."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._outputs: list[list[Any]] = []

    def add(self, index: int, output: Any) -> None:
        if index == len(self._outputs):
            self._outputs.append([])
        else:
            _check_same(index, dict(places(self._outputs[index][0])), dict(places(output)))
        self._outputs[index].append(map_tensors(output, torch.clone))

    def finished(self, index: int, num_members: int) -> Any:
        outputs, self._outputs[index] = self._outputs[index], []
        stacked = iter([torch.stack(found) for found in zip(*(dict(places(o)).values() for o in outputs), strict=True)])
        return self._function(map_tensors(outputs[0], lambda _: next(stacked)))


class _Votes:
    """The label that most members give; of several that as many give, the smallest."""

    def __init__(self) -> None:
        self._labels = _Stacked(lambda labels: map_tensors(labels, _winner))

    def add(self, index: int, output: Any) -> None:
        self._labels.add(index, map_tensors(output, _labels_of))

    def finished(self, index: int, num_members: int) -> Any:
        return self._labels.finished(index, num_members)


def _labels_of(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.dtype.is_floating_point:
        return tensor.to(torch.int64)
    if tensor.dim() < 2:
        raise BadInput(
            f"for combine='vote' predict must return labels (whole numbers) or scores with the classes in the last "
            f"dimension, but it returned a {tensor.dtype} of shape {tuple(tensor.shape)}."
        )
    return tensor.argmax(-1)


def _winner(labels: torch.Tensor) -> torch.Tensor:
    counts = torch.stack([(labels == own).sum(0) for own in labels])
    most = counts == counts.amax(0)
    return torch.where(most, labels, torch.iinfo(torch.int64).max).amin(0)


def _check_same(index: int, first: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> None:
    """Refuses outputs of members that don't go together."""
    for place in {**first, **found}:
        shapes = [tuple(part[place].shape) if place in part else None for part in (first, found)]
        if shapes[0] != shapes[1]:
            raise BadInput(
                f"outputs of members for batch {index} have the shapes {shapes[0]} and {shapes[1]}{_at(place)}, and "
                "can't be combined."
            )


def _at(place: str) -> str:
    return f" at {place}" if place else ""
