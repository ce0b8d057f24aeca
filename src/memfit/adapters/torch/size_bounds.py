"""Which tensors are as large as they can be, because their size depends on data.

Where the number of selected elements is unknown, the largest is taken. What is computed from such a tensor has that
size too where one of its dimensions is that number. Their blocks are marked: they count for what a step may need, and
not for what it needs at least.
"""

import weakref
from typing import Any

import torch

from memfit.adapters.torch.shapes import tensors

_Sizes = frozenset[int]
_NONE: _Sizes = frozenset()


class SizeBounds:
    """Follows the sizes that are upper bounds from operator to operator."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[weakref.ref[Any], _Sizes]] = {}

    def made_by_data(self, out: Any, args: tuple[Any, ...]) -> None:
        """Notes that the size of `out` depends on data."""
        given = {1} | {size for tensor in tensors(args) for size in tensor.shape}
        for tensor in tensors(out if isinstance(out, list | tuple) else (out,)):
            if tensor.is_meta and tensor.dim():
                self._note(tensor, frozenset(set(tensor.shape) - given or {tensor.shape[0]}))

    def among(self, args: tuple[Any, ...]) -> _Sizes:
        """The sizes of the arguments that are upper bounds."""
        if not self._sizes:
            return _NONE
        found: set[int] = set()
        for tensor in tensors(args):
            known = self._of(tensor)
            if known and known.isdisjoint(tensor.shape):
                # A view that joins dimensions, or one of the first elements.
                joined = {n for n in tensor.shape if n and any(n % size == 0 for size in known)}
                known = frozenset(joined or tensor.shape[:1])
            found |= known
        return frozenset(found)

    def follow(self, out: Any, sizes: _Sizes) -> bool:
        """Whether `out`, made of tensors with these bounds, has one of them; notes it."""
        bounded = False
        for tensor in tensors(out if isinstance(out, list | tuple) else (out,)):
            kept = sizes & frozenset(tensor.shape)
            if kept and tensor.is_meta and tensor.layout is torch.strided:
                self._note(tensor, kept | self._of(tensor))
                bounded = True
        return bounded

    def _of(self, tensor: torch.Tensor) -> _Sizes:
        if tensor.layout is not torch.strided or not tensor.is_meta:
            return _NONE
        known = self._sizes.get(tensor.untyped_storage()._cdata)
        return _NONE if known is None else known[1]

    def _note(self, tensor: torch.Tensor, sizes: _Sizes) -> None:
        # A single element, or none, is no bound to speak of, and every tensor has dimensions of that size.
        sizes = frozenset(size for size in sizes if size > 1)
        if not sizes or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._sizes[key] = (weakref.ref(storage, lambda _: self._sizes.pop(key, None)), sizes)
