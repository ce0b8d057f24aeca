"""Where shape-only tensors are said to be.

PyTorch has one meta device, and a simulation uses it for three things: tensors on the simulated device, which is the
rule; tensors that the user's own code wanted on the meta device (models are often built there first, and Keras infers
shapes there); and tensors on another device than the first. The exceptions are remembered by storage, so that views
are where their base is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.core.patching import Replacement
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.shapes.shapes import ByStorage

BARE = torch.device("meta")


class DeviceLabels:
    """Remembers which shape-only storages are not on the simulated device.

    Args:
        device: the simulated device, as the user's code names it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marked: ByStorage[torch.device] = ByStorage()
        self.requested: torch.device | None = None
        """While an operator is called for a place that isn't the simulated device: that place."""

    def __bool__(self) -> bool:
        return bool(self._marked) or self.requested is not None

    def mark(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Says that a shape-only tensor is on `device`."""
        storage = _storage(tensor)
        if storage is not None:
            if device == self.device:
                self._marked.drop(storage)
            else:
                self._marked.set(storage, device)

    def of(self, tensor: torch.Tensor) -> torch.device:
        """Where a shape-only tensor is."""
        if not self._marked:
            return self.device
        storage = _storage(tensor)
        return self.device if storage is None else self._marked.get(storage) or self.device

    def is_simulated(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on a simulated device."""
        with internals.disable_torch_function():
            return tensor.is_meta and self.of(tensor).type == "cuda"

    def has(self, storage: Any) -> bool:
        """Whether a shape-only storage is not on the simulated device."""
        return self._marked.get(storage) is not None

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


# The objects behind storages lie close together; spread apart, addresses inside of two tensors can't meet easily.
_SPREAD_BITS = 16


def address_replacements() -> list[Replacement]:
    """Methods of tensors and storages, for any thread."""
    tensor: Any = torch.Tensor
    storage: Any = torch.UntypedStorage
    plain_tensor_address, plain_storage_address = tensor.data_ptr, storage.data_ptr
    pinned: ByStorage[bool] = ByStorage()

    def storage_address(self: Any) -> int:
        with internals.disable_torch_function():
            if self.device.type == "meta" and self.nbytes():
                return int(self._cdata) << _SPREAD_BITS
            return int(plain_storage_address(self))

    def tensor_address(self: Any) -> int:
        with internals.disable_torch_function():
            if self.is_meta and self.layout is torch.strided and self.numel():
                offset: int = self.storage_offset() * self.element_size()
                return storage_address(self.untyped_storage()) + offset
            return int(plain_tensor_address(self))

    def pin_memory(self: Any, device: Any = None) -> Any:
        with internals.disable_torch_function():
            on_host = self.device.type == "cpu"
            if on_host and self.layout is torch.strided:
                pinned.set(self.untyped_storage(), True)
        if not on_host:
            raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
        return self

    def is_pinned(self: Any, device: Any = None) -> bool:
        with internals.disable_torch_function():
            is_dense = self.device.type == "cpu" and self.layout is torch.strided
            return is_dense and is_storage_pinned(self.untyped_storage())

    def pin_storage(self: Any, device: Any = "cuda") -> Any:
        pinned.set(self, True)
        return self

    def is_storage_pinned(self: Any, device: Any = "cuda") -> bool:
        return pinned.get(self) is not None

    return [
        Replacement(tensor, "data_ptr", tensor_address),
        Replacement(tensor, "pin_memory", pin_memory),
        Replacement(tensor, "is_pinned", is_pinned),
        Replacement(storage, "data_ptr", storage_address),
        Replacement(storage, "pin_memory", pin_storage),
        Replacement(storage, "is_pinned", is_storage_pinned),
    ]
