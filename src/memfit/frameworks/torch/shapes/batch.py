"""Batches as PyTorch loops have them: checked, measured along their first dimension, and made anew at another size."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch

from memfit.core.errors import BadBatch
from memfit.frameworks.torch.shapes.stand_in import map_tensors, tensors_in


def check_batch(batch: Any) -> None:
    """Refuses a batch without tensors, with no sample, or spread over devices."""
    tensors = list(tensors_in(batch))
    if not tensors:
        raise BadBatch(
            f"the batch holds no tensor ({type(batch).__name__} was given); give the tensors one step works on, "
            "alone or in tuples, lists, dictionaries or dataclasses: of a loader, next(iter(loader)); of NumPy arrays, "
            "torch.from_numpy(array)."
        )
    # Empty tensors beside others are fine: an image without boxes.
    if common_first_dimension(batch) == 0 or all(tensor.numel() == 0 for tensor in tensors):
        raise BadBatch(
            f"the batch holds an empty tensor of shape {tuple(tensors[0].shape)}; a batch needs at least 1 sample."
        )
    devices = {str(t.device) for t in tensors if t.device.type != "meta"}
    if len(devices) > 1:
        raise BadBatch(
            f"the batch's tensors are on mixed devices: {', '.join(sorted(devices))}. Put them on one; any will do."
        )


def common_first_dimension(batch: Any) -> int | None:
    """The batch size, if every tensor with dimensions has the same first one.

    In a list of samples, as detectors take, the first dimension is something else (the channels), so there is none.
    Tensors in a list may be either, samples or the fields of a batch: a loader makes a list of (tokens, mask, labels).
    What can't be told by its looks has a size here; `may_be_samples` says so, and running the loss on a part decides.
    """
    tensors = list(tensors_in(batch))
    if any(t.layout is not torch.strided for t in tensors) or _has_list_of_samples(batch):
        return None
    sizes = {t.shape[0] for t in tensors if t.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def may_be_samples(batch: Any) -> bool:
    """Whether more than two tensors of one shape stand in a list inside of the batch: they may be samples."""
    return any(len(part) > 2 and _is_of_one_shape(part) for part in _lists_inside(batch))


def _has_list_of_samples(value: Any) -> bool:
    """True if a list surely holds samples: it stands beside a list of as many entries, or holds many images."""
    parts = list(_parts(value))
    lists = [part for part in parts if isinstance(part, list | tuple)]
    for part in lists:
        is_of_entries = bool(part) and all(isinstance(entry, Mapping) for entry in part)
        if is_of_entries and any(other is not part and len(other) == len(part) for other in lists):
            return True
    return any(map(_is_of_images, [value, *lists] if isinstance(value, list) else lists)) or any(
        map(_has_list_of_samples, parts)
    )


def _is_of_images(value: Any) -> bool:
    if len(value) <= 3 or not _is_of_one_shape(value):
        return False
    holds_pixels = value[0].dtype.is_floating_point or value[0].dtype is torch.uint8
    return holds_pixels and value[0].dim() == 3 and value[0].shape[0] in (1, 3, 4)


def _is_of_one_shape(value: Any) -> bool:
    shapes = {tuple(part.shape) if isinstance(part, torch.Tensor) else () for part in value}
    return len(shapes) == 1 and len(shapes.pop()) > 1


def _lists_inside(value: Any) -> Iterator[Any]:
    for part in _parts(value):
        if isinstance(part, list | tuple):
            yield part
        yield from _lists_inside(part)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def resized(batch: Any, old: int | None, new: int) -> Any:
    """The batch with another first dimension, as shapes; what is one tensor stays one."""

    # By identity, which is what tensors are hashed by.
    @cache
    def change(tensor: torch.Tensor) -> torch.Tensor:
        size = (new, *tensor.shape[1:]) if tensor.dim() and tensor.shape[0] == old else tuple(tensor.shape)
        # The order of strides is kept, so that a channels-last batch stays one.
        order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d]), reverse=True)
        made = torch.empty([size[d] for d in order], dtype=tensor.dtype, device="meta")
        back = [order.index(d) for d in range(tensor.dim())]
        return made.permute(back).requires_grad_(tensor.requires_grad)

    return map_tensors(batch, change)
