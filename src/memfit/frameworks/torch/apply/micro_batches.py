"""Micro-batches: a batch taken apart along its first dimension, and how much each part's loss weighs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch

from memfit.core.errors import BadBatch
from memfit.core.settings import Weighting
from memfit.frameworks.torch.apply.tensor_memory import simulated
from memfit.frameworks.torch.shapes.batch import common_first_dimension
from memfit.frameworks.torch.shapes.stand_in import map_tensors


def split(batch: Any, count: int) -> list[Any]:
    """The batch in `count` parts, whose sizes differ by one at most, larger ones first.

    Tensors of the parts are views. Tensors without dimensions, and whatever isn't a tensor, are in each part.
    """
    if count == 1:
        return [batch]
    num_samples = common_first_dimension(batch)
    if num_samples is None:
        raise BadBatch(_why_not(batch, count))
    if num_samples < count:
        raise BadBatch(
            f"a batch of {num_samples} samples can't be split into {count} parts. Give a batch of {count} samples or "
            "more, or plan for fewer micro-batches."
        )
    parts: dict[int, Sequence[torch.Tensor]] = {}

    def part(tensor: torch.Tensor, index: int) -> torch.Tensor:
        if not tensor.dim():
            return tensor
        if id(tensor) not in parts:
            parts[id(tensor)] = torch.tensor_split(tensor, count)
        return parts[id(tensor)][index]

    return [map_tensors(batch, partial(part, index=index)) for index in range(count)]


def places(batch: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the batch with its place, such as "['labels']", "[1]" or ".field"; "" is the batch itself."""
    if isinstance(batch, torch.Tensor):
        yield prefix, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from places(value, f"{prefix}[{key!r}]")
    elif isinstance(batch, list | tuple):
        for index, value in enumerate(batch):
            yield from places(value, f"{prefix}[{index}]")
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from places(getattr(batch, field.name), f"{prefix}.{field.name}")


def tensor_at(batch: Any, place: str) -> torch.Tensor:
    """The tensor of the batch at a place such as "['labels']"."""
    found = dict(places(batch))
    if place not in found:
        raise BadBatch(
            f"the batch has no tensor at {place or '(the batch itself)'}, whose elements weigh the micro-batches; it "
            f"has {', '.join(name or '(the batch itself)' for name in found) or 'none'}. Give a batch of the kind "
            "that was planned for."
        )
    return found[place]


def shares(parts: list[Any], weighting: Weighting) -> list[float]:
    """What each part's loss is multiplied by before they are added; 0 for a part that must be left out."""
    if len(parts) == 1 or weighting.kind in ("sum", "given"):
        return [1.0] * len(parts)
    weights = raw_weights(parts, weighting)
    return [weight / sum(weights) for weight in weights]


def raw_weights(parts: list[Any], weighting: Weighting) -> list[float]:
    """How much each part counts, not divided by anything: samples, or elements of a tensor; 1 where losses just add up.

    Weights that the loss itself gives are only known afterwards, so those are 1.
    """
    if weighting.kind in ("sum", "given"):
        return [1.0] * len(parts)
    if weighting.kind == "count":
        counted = [tensor_at(part, weighting.tensor) for part in parts]
        if not any(simulated(tensor) for tensor in counted):
            with torch.no_grad():
                counted = [tensor[:, weighting.skipped :] if weighting.skipped else tensor for tensor in counted]
                counts = torch.stack([(tensor != weighting.ignored).sum() for tensor in counted]).tolist()
            # Where nothing counts at all, the loss of the batch is as undefined as without micro-batches.
            if any(counts):
                return [float(count) for count in counts]
    return [float(common_first_dimension(part) or 1) for part in parts]


def _why_not(batch: Any, count: int) -> str:
    """Which tensor keeps the batch from being split, and what to do."""
    found = [(place, tensor) for place, tensor in places(batch) if tensor.dim()]
    what_to_do = (
        "Give a batch whose tensors all have the samples as their first dimension; put what belongs to the whole batch "
        "into the model or the loss function."
    )
    if not found:
        return f"the batch can't be split into {count} parts: it holds no tensor with dimensions. {what_to_do}"
    for place, tensor in found:
        if tensor.layout is not torch.strided:
            return (
                f"the batch can't be split into {count} parts: the tensor at {place or '(the batch itself)'} of shape "
                f"{tuple(tensor.shape)} is sparse ({tensor.layout}). {what_to_do}"
            )
    sizes = Counter(tensor.shape[0] for _, tensor in found)
    usual, _ = sizes.most_common(1)[0]
    if len(sizes) == 1:
        place, tensor = found[0]
        return (
            f"the batch can't be split into {count} parts: it holds a list of samples (the tensor at {place} of shape "
            f"{tuple(tensor.shape)} is one of them), whose first dimension is not the samples'. {what_to_do}"
        )
    place, tensor = next((p, t) for p, t in found if t.shape[0] != usual)
    return (
        f"the batch can't be split into {count} parts: the first dimension of the tensor at {place} of shape "
        f"{tuple(tensor.shape)} is {tensor.shape[0]}, that of others is {usual}. {what_to_do}"
    )
