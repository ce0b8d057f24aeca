"""Sums of gradients that the autograd engine makes in place.

Where several gradients meet, the engine adds into the first one if it holds the last reference to it
(`input_buffer.cpp`), but never while a dispatch mode is active: a trace sees a new tensor where the real run has none.
This module recognises those sums by the same rule the engine uses, the number of references.
"""

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Accumulation:
    """Tells the engine's sums from all others."""

    def __init__(self) -> None:
        self._sole = _references_of_sole_owner()

    def in_place(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether `add(*args, **kwargs)` is a sum that the engine would make in place."""
        if self._sole is None or kwargs or torch.is_grad_enabled() or torch._C._current_autograd_node() is None:
            return False
        old, new = args
        return (
            isinstance(old, torch.Tensor)
            and isinstance(new, torch.Tensor)
            and old.layout is torch.strided
            and old.shape == new.shape
            and old.dtype is new.dtype
            and _references(old) == self._sole
            and torch.ops.aten.is_non_overlapping_and_dense.default(old)
        )


def _references(tensor: torch.Tensor) -> tuple[int, int] | None:
    """(references to the tensor, to its storage), as seen from a dispatch mode; None where PyTorch can't tell."""
    count = getattr(tensor, "_use_count", None)
    storage_count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None or storage_count is None:
        return None
    return count(), storage_count(tensor.untyped_storage()._cdata)


@cache
def _references_of_sole_owner() -> tuple[int, int] | None:
    """What `_references` gives for a gradient that the engine alone holds: found out by making one."""
    seen: list[tuple[int, int] | None] = [None]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add.Tensor and torch._C._current_autograd_node() is not None:
                seen[0] = _references(args[0])
            return func(*args, **(kwargs or {}))

    leaf = torch.empty(2, device="meta", requires_grad=True)
    middle = leaf * 2
    total = (middle.sin() + middle.cos()).sum()
    with Watch(), torch.autograd.set_multithreading_enabled(False):  # type: ignore[no-untyped-call]
        total.backward()
    return seen[0]
