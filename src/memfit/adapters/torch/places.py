"""Where shape-only tensors are said to be.

PyTorch has one meta device, and a simulation uses it for three things: tensors on the simulated device, which is the
rule; tensors that the user's own code wanted on the meta device (models are often built there first, and Keras infers
shapes there); and tensors on another device than the first. The exceptions are remembered by storage, so that views
are where their base is.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

BARE = torch.device("meta")


class Places:
    """Remembers which shape-only storages are not on the simulated device.

    Args:
        device: the simulated device, as the user's code names it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marked: dict[int, tuple[torch.device, weakref.ref[Any]]] = {}
        self.requested: torch.device | None = None
        """While an operator is called for a place that isn't the simulated device: that place."""

    def __bool__(self) -> bool:
        return bool(self._marked) or self.requested is not None

    def mark(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Says that a shape-only tensor is on `device`."""
        storage = _storage(tensor)
        if storage is None:
            return
        key = storage._cdata
        if device == self.device:
            self._marked.pop(key, None)
            return

        def forget(reference: Any) -> None:
            known = self._marked.get(key)
            if known is not None and known[1] is reference:
                del self._marked[key]

        self._marked[key] = (device, weakref.ref(storage, forget))

    def of(self, tensor: torch.Tensor) -> torch.device:
        """Where a shape-only tensor is."""
        if not self._marked:
            return self.device
        storage = _storage(tensor)
        known = None if storage is None else self._marked.get(storage._cdata)
        return self.device if known is None else known[0]

    def is_simulated(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on a simulated device."""
        with torch._C.DisableTorchFunction():
            return tensor.is_meta and self.of(tensor).type == "cuda"

    def has(self, storage: Any) -> bool:
        """Whether a shape-only storage is not on the simulated device."""
        return storage._cdata in self._marked

    @contextmanager
    def requesting(self, device: torch.device | None) -> Iterator[None]:
        """New shape-only tensors made while this lasts are on `device`; None: on the simulated one."""
        before, self.requested = self.requested, device
        try:
            yield
        finally:
            self.requested = before


def _storage(tensor: Any) -> Any:
    """The storage of a tensor, or of the first tensor a wrapper is made of; None where there is none."""
    while hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        if not names:
            return None
        tensor = getattr(tensor, names[0])
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        # Sparse tensors have none of their own.
        return None
