"""Sparse gradients, as embeddings make them, without data.

Shape-only sparse tensors forget how many elements they hold as soon as they are copied or added. The rules here keep
the count: an uncoalesced sum holds the elements of both, and coalescing can leave as many as there were.
"""

from math import prod
from typing import Any

import torch

from memfit.frameworks.torch import internals
from memfit.frameworks.torch.shapes.shapes import META, Arguments, Operator, Options


def _is_sparse(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo


def _empty(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=META)


def _like(tensor: torch.Tensor, num_elements: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A sparse tensor of `num_elements` elements with the shape of `tensor`."""
    indices, values = internals.sparse_parts(tensor)
    return torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default(  # type: ignore[no-any-return]
        tensor.sparse_dim(),
        tensor.dense_dim(),
        tensor.shape,
        _empty(indices.shape[0], num_elements, dtype=indices.dtype),
        _empty(num_elements, *values.shape[1:], dtype=dtype or values.dtype),
        dtype=dtype or values.dtype,
        layout=torch.sparse_coo,
        device=META,
    )


def to_device(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A sparse tensor of the host as one of shapes, of as many elements."""
    if tensor.layout is torch.sparse_coo:
        return internals.set_coalesced(_like(tensor, internals.num_sparse(tensor), dtype), tensor.is_coalesced())
    outer, inner, values = (_empty(*part.shape, dtype=part.dtype) for part in parts(tensor))
    held = _empty(*values.shape, dtype=dtype or values.dtype)
    return torch.sparse_compressed_tensor(
        outer, inner, held, tensor.shape, layout=tensor.layout, device=META, check_invariants=False
    )


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a sparse one is made of."""
    if tensor.layout is torch.sparse_coo:
        return list(internals.sparse_parts(tensor))
    if tensor.layout is torch.sparse_csr:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout is torch.sparse_csc:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def _to_dense(func: Operator, args: Arguments, kwargs: Options, report: Any) -> Any:
    dtype = kwargs.get("dtype") or (args[1] if len(args) > 1 else None) or args[0].dtype
    return _empty(*args[0].shape, dtype=dtype)


def _to_sparse(func: Operator, args: Arguments, kwargs: Options, report: Any) -> Any:
    """A dense tensor made sparse: as many elements as it has, for want of their values."""
    dense = args[0]
    if dense.layout is not torch.strided or kwargs.get("layout") not in (None, torch.sparse_coo):
        return NotImplemented
    report("data-dependent-shape", "to_sparse: its size depends on data; upper bound used")
    indices, values = _empty(dense.dim(), dense.numel()), _empty(dense.numel(), dtype=dense.dtype)
    return torch.sparse_coo_tensor(indices, values, dense.shape, check_invariants=False, is_coalesced=True)


def _to_csr(func: Operator, args: Arguments, kwargs: Options, report: Any) -> Any:
    """A sparse matrix with its rows compressed: of as many elements."""
    given = args[0]
    if not _is_sparse(given) or given.dim() != 2:
        return NotImplemented
    rows, columns = _empty(given.shape[0] + 1), _empty(internals.num_sparse(given))
    values = _empty(internals.num_sparse(given), dtype=given.dtype)
    return torch.sparse_csr_tensor(rows, columns, values, given.shape, check_invariants=False)


def _copy(func: Operator, args: Arguments, kwargs: Options, report: Any) -> Any:
    if not _is_sparse(args[0]):
        return NotImplemented
    made = _like(args[0], internals.num_sparse(args[0]))
    is_coalesced = internals.name_of(func) == "aten::_coalesce" or args[0].is_coalesced()
    return internals.set_coalesced(made, is_coalesced)


def _scale_in_place(func: Operator, args: Arguments, kwargs: Options, report: Any) -> Any:
    return args[0] if _is_sparse(args[0]) else NotImplemented


def _add_in_place(func: Operator, args: Arguments, kwargs: Options, report: Any) -> Any:
    """A sparse sum is appended: momentum of sparse gradients grows step by step. A dense one stays as it is."""
    target, other = args[:2]
    if not _is_sparse(other):
        return NotImplemented
    if _is_sparse(target):
        target.data = _like(target, internals.num_sparse(target) + internals.num_sparse(other))
    return target


def _add(func: Operator, args: Arguments, kwargs: Options, report: Any) -> Any:
    left, right = args[:2]
    both = _is_sparse(left) and _is_sparse(right)
    return _like(left, internals.num_sparse(left) + internals.num_sparse(right)) if both else NotImplemented


def _mask(func: Operator, args: Arguments, kwargs: Options, report: Any) -> Any:
    return _like(args[1], internals.num_sparse(args[1]), args[0].dtype) if _is_sparse(args[1]) else NotImplemented


def _element_bytes(tensor: torch.Tensor) -> int:
    """Bytes of one element: its index and its values."""
    indices, values = internals.sparse_parts(tensor)
    return indices.shape[0] * indices.element_size() + prod(values.shape[1:]) * values.element_size()


def add_bytes(args: Arguments, out: Any) -> list[int]:
    """What the target of a sparse sum held before: freed after the sum is made (SparseTensorMath.cpp)."""
    if not _is_sparse(out):
        return []
    return [(internals.num_sparse(out) - internals.num_sparse(args[1])) * _element_bytes(out)]


def scale_bytes(args: Arguments, out: Any) -> list[int]:
    """The product, before it is copied into the sparse target (SparseTensorMath.cpp)."""
    return [internals.num_sparse(out) * _element_bytes(out)] if _is_sparse(out) else []


RULES = {
    "aten::clone": _copy,
    "aten::_coalesce": _copy,
    "aten::mul_": _scale_in_place,
    "aten::div_": _scale_in_place,
    "aten::add_": _add_in_place,
    "aten::add": _add,
    "aten::sparse_mask": _mask,
    "aten::_to_dense": _to_dense,
    "aten::_to_sparse_csr": _to_csr,
    "aten::_to_sparse": _to_sparse,
}

# Bytes taken inside, the same on all devices.
INTERNALS = {"aten::add_": add_bytes, "aten::mul_": scale_bytes, "aten::div_": scale_bytes}
