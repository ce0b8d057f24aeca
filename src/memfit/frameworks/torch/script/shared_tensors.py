"""Tensors on the simulated device that processes hand to each other: they count where they were made.

CUDA's own way (`torch.multiprocessing`, a handle for the memory of the other process) has no memory here to point to.
What is sent is the shape and a key of the storage; whoever gets it makes a tensor of that shape which takes nothing.
"""

import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing.reductions

from memfit.frameworks.torch import internals

_numbers = itertools.count(1)
_keys: "weakref.WeakKeyDictionary[Any, tuple[int, int]]" = weakref.WeakKeyDictionary()
_storages: "weakref.WeakValueDictionary[tuple[int, int], Any]" = weakref.WeakValueDictionary()
_received: Callable[[Any], None] = lambda storage: None  # noqa: E731 - replaced while a simulation lasts


@contextmanager
def sharing(is_simulated: Callable[[torch.Tensor], bool], received: Callable[[Any], None]) -> Iterator[None]:
    """Tensors of the device can be sent to other processes, and received, while it lasts."""
    global _received
    reducers: dict[type, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    kinds: list[type] = [kind for kind in (torch.Tensor, torch.nn.Parameter) if kind in reducers]
    before = {kind: reducers[kind] for kind in kinds}
    plain_received, _received = _received, received

    def reduce(tensor: torch.Tensor) -> Any:
        return _reduced(tensor) if is_simulated(tensor) else before[type(tensor)](tensor)

    reducers.update(dict.fromkeys(kinds, reduce))
    try:
        yield
    finally:
        reducers.update(before)
        _received = plain_received


def _reduced(tensor: torch.Tensor) -> Any:
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not support "
            "crossing process boundaries.  If you just want to transfer the data, call detach() on the tensor before "
            "serializing (e.g., putting it on the queue)."
        )
    with internals.disable_torch_function(), internals.disable_current_modes():
        storage = tensor.untyped_storage()
        key = _keys.setdefault(storage, (os.getpid(), next(_numbers)))
        _storages[key] = storage
        layout = tuple(tensor.size()), tensor.stride(), tensor.storage_offset(), tensor.dtype
        return rebuild, (type(tensor), key, storage.nbytes(), *layout, tensor.requires_grad)


def rebuild(
    kind: type,
    key: tuple[int, int],
    size_bytes: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    requires_grad: bool,
) -> Any:
    """The tensor that another process has sent."""
    with internals.disable_torch_function(), internals.disable_current_modes():
        storage = _storages.get(key)
        if storage is None:
            storage = torch.UntypedStorage(size_bytes, device="meta")
            _keys[storage] = key
            _storages[key] = storage
            if key[0] != os.getpid():
                _received(storage)
        tensor = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, size, stride)
        if kind is torch.nn.Parameter:
            return torch.nn.Parameter(tensor, requires_grad)
        return tensor.requires_grad_(requires_grad)
