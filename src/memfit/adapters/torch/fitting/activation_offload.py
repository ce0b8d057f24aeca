"""Activation offload: what modules save for the backward pass waits in host memory.

Saved tensors are moved storage by storage, so that several views of one storage, or one tensor that is saved twice,
travel once. On CUDA the copies are asynchronous, from and to pinned memory, on the stream that computes: the order of
that stream is all the synchronisation there is to get wrong, at the price that copies don't overlap with kernels. On
the CPU a copy is made all the same; it saves nothing there.

On the simulated device only the shape is kept, and a new block is made when the tensor is needed again.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from memfit.adapters.torch.fitting.recomputation import chosen_modules, replaced_forward

_LEAST_BYTES = 64 * 1024


def offload(model: torch.nn.Module, paths: Sequence[str]) -> "Offload":
    """Has what these modules save for the backward pass wait in host memory; calling the result undoes it.

    A module that is computed again as well has only its inputs to save: apply `recompute` first.

    Args:
        model: the module that holds them.
        paths: their dotted paths; none may be inside of another.
    """
    return Offload(model, paths)


class Offload:
    """The offload of some modules of a model; call it to undo it.

    Args:
        model: the module that holds them.
        paths: their dotted paths.
    """

    def __init__(self, model: torch.nn.Module, paths: Sequence[str]) -> None:
        self._model = model
        self._waiting_bytes = 0
        self.host_bytes = 0
        """The greatest number of bytes that waited on the host at once."""
        self._known: dict[int, tuple[weakref.ref[Any], int, weakref.ref[_Waiting]]] = {}
        self._undo: list[Callable[[], None]] = []
        for _, module in chosen_modules(model, paths, "offload"):
            self._undo.append(replaced_forward(module, self._offloaded(module)))

    def __call__(self) -> None:
        """Puts the modules back as they were."""
        while self._undo:
            self._undo.pop()()

    def _offloaded(self, module: torch.nn.Module) -> Callable[..., Any]:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            staying = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers()) if _is_plain(t)}
            with saved_tensors_hooks(lambda tensor: self._pack(tensor, staying), _unpack):
                return original(*args, **kwargs)

        return forward

    def _pack(self, tensor: torch.Tensor, staying: set[int]) -> "torch.Tensor | _View":
        # The simulation's function mode would hide that tensors are shape-only.
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if not _is_plain(tensor):
                return tensor
            storage = tensor.untyped_storage()
            if storage.nbytes() < _LEAST_BYTES or storage._cdata in staying:
                return tensor
            place = (int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
            return _View(self._moved(tensor, storage), tensor.dtype, place)

    def _moved(self, tensor: torch.Tensor, storage: Any) -> "_Waiting":
        """Where the storage waits; it is moved if it doesn't wait already."""
        key, version = storage._cdata, tensor._version
        # A number may come back for another storage, and a storage may have been written to since.
        known = self._known.get(key)
        waiting = known[2]() if known is not None and known[0]() is storage and known[1] == version else None
        if waiting is None:
            waiting = _Waiting(tensor.device, storage)
            self._known[key] = (weakref.ref(storage), version, weakref.ref(waiting))
            self._change(waiting.num_bytes)
            weakref.finalize(waiting, self._change, -waiting.num_bytes)
        return waiting

    def _change(self, num_bytes: int) -> None:
        self._waiting_bytes += num_bytes
        self.host_bytes = max(self.host_bytes, self._waiting_bytes)
        if not self._waiting_bytes:
            self._known.clear()


class _Waiting:
    """One storage in host memory.

    Args:
        device: where it comes from.
        storage: what to copy.
    """

    def __init__(self, device: torch.device, storage: Any) -> None:
        self.num_bytes = storage.nbytes()
        self.device = device
        self._back: weakref.ref[Any] | None = None
        self._host: torch.Tensor | None = None
        if device.type != "meta":
            on_cuda = device.type == "cuda"
            self._host = torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=on_cuda)
            self._host.copy_(torch.empty(0, dtype=torch.uint8, device=device).set_(storage), non_blocking=on_cuda)

    def storage(self) -> Any:
        """The storage, back on its device."""
        known = self._back() if self._back is not None else None
        if known is not None:
            return known
        made = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        if self._host is not None:
            made.copy_(self._host, non_blocking=self.device.type == "cuda")
        storage = made.untyped_storage()
        self._back = weakref.ref(storage)
        return storage


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor whose storage waits; `place` is its offset, shape and strides."""

    waiting: _Waiting
    dtype: torch.dtype
    place: tuple[int, tuple[int, ...], tuple[int, ...]]


def _unpack(saved: "torch.Tensor | _View") -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    with torch._C.DisableTorchFunction(), torch.no_grad():
        empty = torch.empty(0, dtype=saved.dtype, device=saved.waiting.device)
        return empty.set_(saved.waiting.storage(), *saved.place)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
