"""Addresses of tensors: unique ones for tensors without memory, and host tensors that are said to be pinned.

Programs compare addresses to find tensors that share memory; all tensors on PyTorch's meta device have address 0. They
pin host tensors for faster copies, which needs CUDA; here a tensor stays where it is and is only known as pinned.
"""

import weakref
from typing import Any

import torch

from memfit.adapters.torch.replacement import Replacement

# The objects behind storages lie close together; spread apart, addresses inside of two tensors can't meet easily.
_SPREAD_BITS = 16


class Pinned:
    """The storages on the host that are said to be pinned."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Any]] = {}

    def add(self, storage: Any) -> None:
        """Notes that a storage is pinned, for as long as it lives."""
        key = storage._cdata

        def forget(reference: Any) -> None:
            if self._references.get(key) is reference:
                del self._references[key]

        self._references[key] = weakref.ref(storage, forget)

    def __contains__(self, storage: Any) -> bool:
        return storage._cdata in self._references


def address_replacements() -> list[Replacement]:
    """Methods of tensors and storages, for any thread."""
    tensor: Any = torch.Tensor
    storage: Any = torch.UntypedStorage
    plain_tensor_address, plain_storage_address = tensor.data_ptr, storage.data_ptr
    pinned = Pinned()

    def storage_address(self: Any) -> int:
        with torch._C.DisableTorchFunction():
            if self.device.type == "meta" and self.nbytes():
                return int(self._cdata) << _SPREAD_BITS
            return int(plain_storage_address(self))

    def tensor_address(self: Any) -> int:
        with torch._C.DisableTorchFunction():
            if self.is_meta and self.layout is torch.strided and self.numel():
                offset: int = self.storage_offset() * self.element_size()
                return storage_address(self.untyped_storage()) + offset
            return int(plain_tensor_address(self))

    def pin_memory(self: Any, device: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            on_host = self.device.type == "cpu"
            if on_host and self.layout is torch.strided:
                pinned.add(self.untyped_storage())
        if not on_host:
            raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
        return self

    def is_pinned(self: Any, device: Any = None) -> bool:
        with torch._C.DisableTorchFunction():
            return self.device.type == "cpu" and self.layout is torch.strided and self.untyped_storage() in pinned

    def pin_storage(self: Any, device: Any = "cuda") -> Any:
        pinned.add(self)
        return self

    return [
        Replacement(tensor, "data_ptr", tensor_address),
        Replacement(tensor, "pin_memory", pin_memory),
        Replacement(tensor, "is_pinned", is_pinned),
        Replacement(storage, "data_ptr", storage_address),
        Replacement(storage, "pin_memory", pin_storage),
        Replacement(storage, "is_pinned", lambda self, device="cuda": self in pinned),
    ]
