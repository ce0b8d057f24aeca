"""Sparse gradients, as embeddings make them, without data.

Shape-only sparse tensors forget how many elements they hold as soon as they are copied or added. The rules here keep
the count: an uncoalesced sum holds the elements of both, and coalescing can leave as many as there were.
"""

from math import prod
from typing import Any

import torch

from memfit.adapters.torch.shapes import META, Operator


def _is_sparse(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo


def _like(tensor: torch.Tensor, num_elements: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A sparse tensor of `num_elements` elements with the shape of `tensor`."""
    indices, values = tensor._indices(), tensor._values()
    return torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default(  # type: ignore[no-any-return]
        tensor.sparse_dim(),
        tensor.dense_dim(),
        tensor.shape,
        torch.empty((indices.shape[0], num_elements), dtype=indices.dtype, device=META),
        torch.empty((num_elements, *values.shape[1:]), dtype=dtype or values.dtype, device=META),
        dtype=dtype or values.dtype,
        layout=torch.sparse_coo,
        device=META,
    )


def _copy(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Any) -> Any:
    return _like(args[0], args[0]._nnz()) if _is_sparse(args[0]) else NotImplemented


def _scale_in_place(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Any) -> Any:
    return args[0] if _is_sparse(args[0]) else NotImplemented


def _add_in_place(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Any) -> Any:
    """A sparse sum is appended: momentum of sparse gradients grows step by step. A dense one stays as it is."""
    target, other = args[:2]
    if not _is_sparse(other):
        return NotImplemented
    if _is_sparse(target):
        target.data = _like(target, target._nnz() + other._nnz())
    return target


def _add(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Any) -> Any:
    left, right = args[:2]
    if _is_sparse(left) and _is_sparse(right):
        return _like(left, left._nnz() + right._nnz())
    return NotImplemented


def _mask(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], report: Any) -> Any:
    return _like(args[1], args[1]._nnz(), args[0].dtype) if _is_sparse(args[1]) else NotImplemented


def _element_bytes(tensor: torch.Tensor) -> int:
    """Bytes of one element: its index and its values."""
    indices, values = tensor._indices(), tensor._values()
    return indices.shape[0] * indices.element_size() + prod(values.shape[1:]) * values.element_size()


def add_bytes(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
    """What the target of a sparse sum held before: freed after the sum is made (SparseTensorMath.cpp)."""
    if not _is_sparse(out):
        return []
    return [(out._nnz() - args[1]._nnz()) * _element_bytes(out)]


def scale_bytes(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[int]:
    """The product, before it is copied into the sparse target (SparseTensorMath.cpp)."""
    return [out._nnz() * _element_bytes(out)] if _is_sparse(out) else []


RULES = {
    "aten::clone": _copy,
    "aten::_coalesce": _copy,
    "aten::mul_": _scale_in_place,
    "aten::div_": _scale_in_place,
    "aten::add_": _add_in_place,
    "aten::add": _add,
    "aten::sparse_mask": _mask,
}

# Bytes taken inside, the same on all devices.
INTERNALS = {"aten::add_": add_bytes, "aten::mul_": scale_bytes, "aten::div_": scale_bytes}
