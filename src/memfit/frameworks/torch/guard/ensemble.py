"""The predictions of several models, of which one is in memory at a time.

Each member is built, run over all batches, and freed before the next is built. What stays is one result per batch in
host memory, to which each member's output is added. Where a member hits OOM, its batches are run in halves, then in
quarters, and so on; the parts' outputs are joined before they are added.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from memfit.core.errors import BadInput
from memfit.core.guarding import CannotFit
from memfit.core.oom import caught
from memfit.frameworks.torch import oom
from memfit.frameworks.torch.apply.micro_batches import places, split
from memfit.frameworks.torch.guard import parameters, release_model
from memfit.frameworks.torch.shapes.batch import common_first_dimension
from memfit.frameworks.torch.shapes.stand_in import map_tensors

COMBINATIONS = ("mean", "sum", "vote", "stack")
_PROBED = 32  # elements of each tensor that tell one batch from another
_AGAIN = (
    "Each member reads all batches: give a list, or a loader that gives the same batches in the same order every time "
    "(shuffle=False, no random augmentation)."
)

SizeWithin = Callable[[Any, Any], int | None]
"""Samples that a pass of a member may have, from the model and a batch; None where nothing is known."""


class Ensemble:
    """Members run one after another; `size_within` is called with a model and a batch, the largest so far."""

    def __init__(
        self,
        members: Any,
        predict: Callable[[Any, Any], Any],
        batches: Any,
        combined: "Combined",
        size_within: SizeWithin,
    ) -> None:
        self._members = _named(members)
        if isinstance(batches, Iterator) or not hasattr(batches, "__iter__"):
            raise BadInput(f"batches are read once per member, which {type(batches).__name__} doesn't allow. {_AGAIN}")
        if isinstance(getattr(batches, "sampler", None), torch.utils.data.RandomSampler):
            raise BadInput("the loader shuffles, and each member reads it anew. Give one with shuffle=False.")
        self._batches: Iterable[Any] = batches
        self._predict, self._combined, self._size_within = predict, combined, size_within
        self._fingerprints: list[object] = []

    def run(self) -> list[Any]:
        """The result of each batch."""
        for number, (name, member) in enumerate(self._members.items()):
            leftovers = release_model.watch()
            self._run_member(name, *member, is_first=number == 0)
            held = leftovers()
            if held:
                warnings.warn(f"{name} of the ensemble has been run, but {held}", UserWarning, stacklevel=3)
        return [self._combined.finished(index, len(self._members)) for index in range(len(self._fingerprints))]

    def _run_member(self, name: str, build: Callable[[], Any], path: Path | None, *, is_first: bool) -> None:
        model = build()
        if path is not None:
            parameters.read(model, path)
        if not isinstance(model, torch.nn.Module):
            raise BadInput(f"{name} of the ensemble is built as {type(model).__name__}, not as a torch.nn.Module.")
        model.eval()
        size: int | None = None
        largest = count = 0
        for index, batch in enumerate(self._batches):
            fingerprint = fingerprint_of(batch)
            if is_first:
                self._fingerprints.append(fingerprint)
            elif index < len(self._fingerprints) and self._fingerprints[index] != fingerprint:
                raise BadInput(
                    f"batch {index} is another one for {name} of the ensemble than it was before, so that predictions "
                    f"for different samples would be combined. {_AGAIN}"
                )
            samples = common_first_dimension(batch) or 0
            # Where a smaller batch fitted as a whole, a larger one may have to be split, or may not.
            if samples > largest and size in (None, largest):
                size, largest = self._size_within(model, batch), samples
            output, size = self._output(name, model, batch, size)
            self._combined.add(index, output)
            count = index + 1
        if count != len(self._fingerprints):
            raise BadInput(
                f"{name} of the ensemble was given {count} batches, and the members before it "
                f"{len(self._fingerprints)}. {_AGAIN}"
            )
        if not count:
            raise BadInput("there are no batches: give at least one.")

    def _output(self, name: str, model: Any, batch: Any, size: int | None) -> tuple[Any, int | None]:
        """(the output of one batch, samples of a pass from now on)."""
        samples = common_first_dimension(batch)
        outputs: list[Any] = []

        def run() -> None:
            outputs.clear()
            parts = split(batch, count)
            outputs.extend(self._pass(model, part) for part in parts)
            if count > 1:
                outputs[:] = [join(outputs, list(map(common_first_dimension, parts)))]

        while True:
            count = 1 if size is None or samples is None else -(-samples // size)
            failure = caught(run)
            if failure is None:
                return outputs[0], size
            oom.release()
            if samples is None or samples <= count:
                parts_tried = "a batch that can't be split" if samples is None else "one sample at a time"
                raise CannotFit(
                    f"{name} of the ensemble runs out of memory with {parts_tried}: {failure.text}. "
                    "Use a smaller member, a lower precision, or a device with more memory.",
                    failure,
                )
            size = -(-samples // (2 * count))

    def _pass(self, model: Any, batch: Any) -> Any:
        with torch.no_grad():
            output = map_tensors(self._predict(model, batch), lambda tensor: tensor.detach().to("cpu"))
        if not dict(places(output)):
            raise BadInput(f"predict must return tensors, but it returned {type(output).__name__}.")
        return output


class Combined:
    """The results of an ensemble: of each batch the sum so far, or every member's output."""

    def __init__(self, combine: Any, precise: bool = False) -> None:
        if not callable(combine) and combine not in COMBINATIONS:
            raise BadInput(
                f"combine must be one of {', '.join(COMBINATIONS)} or a function, but {combine!r} was given."
            )
        self._combine, self._precise = combine, precise
        self._is_sum = combine in ("mean", "sum")
        self._outputs: list[list[Any]] = []
        self._dtypes: list[list[torch.dtype]] = []

    def add(self, index: int, output: Any) -> None:
        """Adds a member's output of a batch."""
        if self._combine == "vote":
            output = map_tensors(output, _labels_of)
        if index == len(self._outputs):
            self._dtypes.append([tensor.dtype for _, tensor in places(output)])
            # A copy in any case: the output may be a tensor that the user's code keeps.
            self._outputs.append([map_tensors(output, self._accumulator if self._is_sum else torch.clone)])
            return
        first, other = dict(places(self._outputs[index][0])), dict(places(output))
        for place in {**first, **other}:
            shapes = [tuple(tensors[place].shape) if place in tensors else None for tensors in (first, other)]
            if shapes[0] != shapes[1]:
                raise BadInput(
                    f"outputs of members for batch {index} have the shapes {shapes[0]} and {shapes[1]}{_at(place)}, "
                    "and can't be combined."
                )
            if self._is_sum:
                first[place].add_(other[place])
        if not self._is_sum:
            self._outputs[index].append(map_tensors(output, torch.clone))

    def finished(self, index: int, num_members: int) -> Any:
        """The result of a batch, which is no longer held here."""
        outputs, self._outputs[index] = self._outputs[index], []
        if not self._is_sum:
            stacked = _merged(torch.stack, outputs)
            if self._combine == "vote":
                return map_tensors(stacked, _winner)
            return stacked if self._combine == "stack" else self._combine(stacked)
        dtypes = iter(self._dtypes[index])

        def finish(total: torch.Tensor) -> torch.Tensor:
            dtype = next(dtypes)
            if self._combine == "mean":
                total.div_(num_members)
            return total.to(dtype) if dtype.is_floating_point else total

        return map_tensors(outputs[0], finish)

    def _accumulator(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = tensor.dtype
        if dtype.is_complex:
            dtype = torch.complex128 if self._precise else dtype
        elif self._precise or (self._combine == "mean" and not dtype.is_floating_point):
            dtype = torch.float64
        elif dtype.is_floating_point:
            dtype = torch.promote_types(dtype, torch.float32)
        elif dtype == torch.bool:
            dtype = torch.int64
        return tensor.to(dtype, copy=True)


def structure(model: torch.nn.Module) -> object:
    """A value that is equal for models of the same architecture, whatever their weights."""
    return str(model), tuple((name, tuple(value.shape), value.dtype) for name, value in model.named_parameters())


def join(outputs: list[Any], sizes: list[int | None]) -> Any:
    """The output of the whole batch from those of its parts."""
    for output, size in zip(outputs, sizes, strict=True):
        tensors = dict(places(output))
        for place in dict(places(outputs[0])):
            shape = tuple(tensors[place].shape) if place in tensors else None
            if not shape or shape[0] != size:
                raise BadInput(
                    f"predict returned a tensor of shape {shape} for {size} samples{_at(place)}, so that outputs of "
                    "parts of a batch can't be joined. Return tensors with one row per sample, or give smaller batches."
                )
    return _merged(torch.cat, outputs)


def fingerprint_of(batch: Any) -> object:
    """Shapes and a few values of each tensor: it differs, almost surely, between different batches."""

    def probe(tensor: torch.Tensor) -> list[str]:
        if tensor.layout is not torch.strided or not tensor.numel():
            return []
        flat = tensor.detach().reshape(-1)
        # As text, because not-a-number equals nothing, itself included.
        return [str(value) for value in flat[:: max(1, flat.numel() // _PROBED)].tolist()]

    return tuple((place, tuple(tensor.shape), *probe(tensor)) for place, tensor in places(batch))


def _named(members: Any) -> dict[str, tuple[Callable[[], Any], Path | None]]:
    """What builds each member and the file of its parameters, by its name in messages."""
    is_list = isinstance(members, Iterable) and not isinstance(members, str | dict)
    builders = list(members) if is_list else []
    if not builders:
        raise BadInput(
            "members must be a list of functions that build a model, or of pairs (function, file of parameters), "
            f"but {members!r} was given."
        )
    named: dict[str, tuple[Callable[[], Any], Path | None]] = {}
    for index, member in enumerate(builders):
        name = f"member {index}"
        build, *files = member if isinstance(member, tuple) and len(member) == 2 else (member,)
        if isinstance(build, torch.nn.Module):
            raise BadInput(
                f"{name} is a model that is in memory already, and all of them would be at once. Give a function that "
                "builds it, such as lambda: Model(width=64), with a file of its parameters: (function, file)."
            )
        if not callable(build):
            raise BadInput(
                f"{name} must be a function that builds a model, or a pair (function, file of parameters), "
                f"but {member!r} was given."
            )
        if files and not Path(files[0]).is_file():
            raise BadInput(f"there is no file {str(files[0])!r}; give a file of parameters (safetensors).")
        named[f"{name} ({files[0]})" if files else name] = build, Path(files[0]) if files else None
    return named


def _merged(function: Callable[[list[torch.Tensor]], torch.Tensor], outputs: list[Any]) -> Any:
    """One output, each of its tensors made of those at the same place in several."""
    tensors = [dict(places(output)) for output in outputs]
    merged = iter([function([each[place] for each in tensors]) for place in tensors[0]])
    return map_tensors(outputs[0], lambda _: next(merged))


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
    """The label that most members give; of several that as many give, the smallest."""
    counts = torch.stack([(labels == own).sum(0) for own in labels])
    most = counts == counts.amax(0)
    return torch.where(most, labels, torch.iinfo(torch.int64).max).amin(0)


def _at(place: str) -> str:
    return f" at {place}" if place else ""
