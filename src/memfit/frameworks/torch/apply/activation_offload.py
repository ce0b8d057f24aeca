"""Activation offload: what modules save for the backward pass waits in host memory.

A tensor that is saved twice, in the same or another shape, travels once. On CUDA the copies are asynchronous, from and
to pinned memory, on the stream that computes: its order is all the synchronisation there is to get wrong, at the price
that copies don't overlap with kernels. On the CPU a copy is made as well; it saves nothing there.

On the simulated device only the shape is kept, and a new block is made when the tensor is needed again.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from memfit.frameworks.torch import internals
from memfit.frameworks.torch.apply.recomputation import chosen_modules, replaced_forward

_LEAST_BYTES = 64 * 1024


class Offload:
    """Has what some modules save for the backward pass wait in host memory; call it to undo that.

    A module that is computed again as well has only its inputs to save: apply `recompute` first. None of the paths may
    be inside of another.
    """

    def __init__(self, model: torch.nn.Module, paths: Sequence[str]) -> None:
        self._waiting_bytes = 0
        self.host_bytes = 0
        """The greatest number of bytes that waited on the host at once."""
        self._known: dict[Any, tuple[weakref.ref[Any], weakref.ref[_Waiting]]] = {}
        self._undo = ExitStack()
        for _, module in chosen_modules(model, paths, "offload"):
            self._undo.callback(replaced_forward(module, self._offloaded(module)))

    def __call__(self) -> None:
        """Puts the modules back as they were."""
        self._undo.close()

    def _offloaded(self, module: torch.nn.Module) -> Callable[..., Any]:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            staying = {
                internals.storage_address(t.untyped_storage())
                for t in (*module.parameters(), *module.buffers())
                if _is_plain(t)
            }
            with saved_tensors_hooks(lambda tensor: self._pack(tensor, staying), _unpack):
                return original(*args, **kwargs)

        return forward

    def _pack(self, tensor: torch.Tensor, staying: set[int]) -> "torch.Tensor | _Away":
        # The simulation's function mode would hide that tensors are shape-only.
        with internals.disable_torch_function(), torch.no_grad():
            if not _is_plain(tensor):
                return tensor
            storage = tensor.untyped_storage()
            if storage.nbytes() < _LEAST_BYTES or internals.storage_address(storage) in staying:
                return tensor
            once = tensor
            for dimension, stride in enumerate(tensor.stride()):
                once = once.narrow(dimension, 0, 1) if not stride and tensor.shape[dimension] > 1 else once
            strides = _dense_strides(once)
            if strides is None:
                return tensor
            waiting = self._moved(once, storage, strides)
            return _Away(waiting, tensor.dtype, tuple(once.shape), strides, tuple(tensor.shape))

    def _moved(self, tensor: torch.Tensor, storage: Any, strides: tuple[int, ...]) -> "_Waiting":
        """Where the elements of the tensor wait; they are moved if they don't wait already."""
        # A dense tensor may be saved in several shapes. Of others, each waits for itself: parts of one storage can be
        # written to without the others' version telling, as the gates of an LSTM are.
        layout = None if strides == tensor.stride() else (tuple(tensor.shape), tensor.stride())
        num_bytes = tensor.numel() * tensor.element_size()
        start = int(tensor.storage_offset()) * tensor.element_size()
        key = (internals.storage_address(storage), start, num_bytes, internals.version_of(tensor), layout)
        known = self._known.get(key)
        # A number may come back for another storage.
        waiting = known[1]() if known is not None and known[0]() is storage else None
        if waiting is None:
            waiting = _Waiting(tensor, strides)
            self._known[key] = (weakref.ref(storage), weakref.ref(waiting))
            self._change(num_bytes)
            weakref.finalize(waiting, self._change, -num_bytes)
        return waiting

    def _change(self, num_bytes: int) -> None:
        self._waiting_bytes += num_bytes
        self.host_bytes = max(self.host_bytes, self._waiting_bytes)
        if not self._waiting_bytes:
            self._known.clear()


class _Waiting:
    """The elements of a tensor in host memory, arranged without gaps by `strides`."""

    def __init__(self, tensor: torch.Tensor, strides: tuple[int, ...]) -> None:
        self.device = tensor.device
        self._num_bytes = tensor.numel() * tensor.element_size()
        self._back: weakref.ref[Any] | None = None
        self._host: torch.Tensor | None = None
        if not tensor.is_meta:
            self._host = torch.empty(self._num_bytes, dtype=torch.uint8, device="cpu", pin_memory=tensor.is_cuda)
            there = torch.empty(0, dtype=tensor.dtype, device="cpu")
            there.set_(self._host.untyped_storage(), 0, tuple(tensor.shape), strides)
            there.copy_(tensor, non_blocking=tensor.is_cuda)

    def storage(self) -> Any:
        """The elements, back on their device."""
        known = self._back() if self._back is not None else None
        if known is not None:
            return known
        made = torch.empty(self._num_bytes, dtype=torch.uint8, device=self.device)
        if self._host is not None:
            made.copy_(self._host, non_blocking=made.is_cuda)
        storage = made.untyped_storage()
        self._back = weakref.ref(storage)
        return storage


class _Away(NamedTuple):
    """A tensor whose elements wait; its `shape` may repeat them."""

    waiting: _Waiting
    dtype: torch.dtype
    once: tuple[int, ...]
    strides: tuple[int, ...]
    shape: tuple[int, ...]


def _unpack(saved: "torch.Tensor | _Away") -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    with internals.disable_torch_function(), torch.no_grad():
        tensor = torch.empty(0, dtype=saved.dtype, device=saved.waiting.device)
        tensor.set_(saved.waiting.storage(), 0, saved.once, saved.strides)
        return tensor.expand(saved.shape)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Strides of the same order without gaps; those of the tensor where it has none, None where elements overlap."""
    strides, reach, dense = list(tensor.stride()), 0, 1
    for dimension in sorted(range(tensor.dim()), key=tensor.stride):
        size, stride = tensor.shape[dimension], tensor.stride(dimension)
        if size == 1:
            continue
        if stride <= reach:
            return None
        reach += stride * (size - 1)
        strides[dimension] = dense
        dense *= size
    return tuple(strides)
