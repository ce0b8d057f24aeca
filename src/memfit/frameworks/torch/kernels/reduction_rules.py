"""Which operators reduce with the kernel of `reductions`, along which dimensions, and what they carry along.

Sources, under aten/src/ATen/native: ReduceOps.cpp and ReduceOpsUtils.h (dtypes), cuda/ReduceSumProdKernel.cu,
ReduceMomentKernel.cu, ReduceMaxValuesKernel.cu, ReduceMinValuesKernel.cu, ReduceArgMaxKernel.cu, ReduceLogicKernel.cu,
ReduceNormKernel.cu and SharedReduceOps.h (what is carried).
"""

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import torch

from memfit.core.device import Device
from memfit.frameworks.torch.kernels.reductions import Elements, Multiprocessors, buffers, layout, multiprocessors
from memfit.frameworks.torch.shapes.shapes import HALVES, Arguments

# A value and where it was found: a number of up to eight bytes and an int64.
_PAIR_BYTES = 16
# Sums, means and the like by the place of their dimensions among the arguments.
_SUMS = {"sum": 1, "mean": 1, "nansum": 1, "prod": 1, "linalg_vector_norm": 2, "norm": 2}
_EXTREMA = ("amax", "amin", "max", "min", "any", "all")
# 256 values for each of 512 threads: less is never shared out among blocks.
_SMALLEST = 256 * 512
_MOMENTS = ("var", "std", "var_mean", "std_mean")


class Reductions:
    """Buffers of the reductions of one device; none where the number of its multiprocessors is unknown."""

    def __init__(self, device: Device) -> None:
        self._multiprocessors = multiprocessors(device)

    def table(self) -> dict[str, Callable[[Arguments, Any], list[int]]]:
        """Bytes taken inside, by operator name."""
        if self._multiprocessors is None:
            return {}
        return {
            **{f"aten::{name}": self._sum(place) for name, place in _SUMS.items()},
            **dict.fromkeys([f"aten::{name}" for name in _EXTREMA], self._extremum),
            **dict.fromkeys([f"aten::{name}" for name in _MOMENTS], self._moment),
            **dict.fromkeys(("aten::argmax", "aten::argmin"), self._position),
        }

    def sum_over(self, tensor: torch.Tensor, dims: tuple[int, ...]) -> list[int]:
        """What the sum of `tensor` over some of its dimensions takes, in its own dtype."""
        return self.buffers(
            tensor, dims, Elements(tensor.element_size(), tensor.element_size(), _carried(tensor.dtype))
        )

    def buffers(self, tensor: torch.Tensor, dims: Any, elements: Elements) -> list[int]:
        """What reducing `tensor` along `dims` takes; all of them where none is named."""
        if self._multiprocessors is None or not tensor.numel():
            return []
        named = [dims] if isinstance(dims, int) else dims or range(tensor.dim())
        reduced = frozenset(dim % tensor.dim() for dim in named) if tensor.dim() else frozenset()
        offset = tensor.storage_offset()
        return list(_buffers(tensor.shape, tensor.stride(), reduced, offset, elements, self._multiprocessors))

    def _sum(self, place: int) -> Callable[[Arguments, Any], list[int]]:
        def internals(args: Arguments, out: torch.Tensor) -> list[int]:
            tensor = args[0]
            dtype = out.dtype
            if tensor.dtype in HALVES and dtype is torch.float32:
                # Read as it is and summed up in float32.
                dtype = tensor.dtype
            elements = Elements(dtype.itemsize, out.element_size(), _carried(dtype), dtype not in HALVES)
            dims = args[place] if len(args) > place else None
            inside = self.buffers(tensor, dims, elements)
            # Numbers of another dtype, such as flags that are counted, are first copied to that of the result.
            copied = [tensor.numel() * dtype.itemsize] if tensor.dtype is not dtype else []
            return copied + ([size if size >= 0 else size - len(copied) for size in inside])

        return internals

    def _extremum(self, args: Arguments, out: Any) -> list[int]:
        tensor = args[0]
        dims = args[1] if len(args) > 1 else None
        size = tensor.element_size()
        if isinstance(out, tuple):
            return self.buffers(tensor, dims, Elements(size, size, _PAIR_BYTES, accumulates=False))
        return self.buffers(tensor, dims, Elements(size, out.element_size(), size))

    def _position(self, args: Arguments, out: torch.Tensor) -> list[int]:
        dims = args[1] if len(args) > 1 else None
        return self.buffers(args[0], dims, Elements(args[0].element_size(), 8, _PAIR_BYTES, accumulates=False))

    def _moment(self, args: Arguments, out: Any) -> list[int]:
        """Mean, sum of squared differences and two counts, of which one has four bytes (Welford)."""
        size = args[0].element_size()
        carried = 32 if args[0].dtype is torch.float64 else 16
        dims = args[1] if len(args) > 1 else None
        return self.buffers(args[0], dims, Elements(size, size, carried, accumulates=False))


def _carried(dtype: torch.dtype) -> int:
    """Bytes of the type in which numbers of `dtype` are summed up (AccumulateType.h)."""
    return 4 if dtype in HALVES else dtype.itemsize


@cache
def _buffers(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    reduced: frozenset[int],
    offset: int,
    elements: Elements,
    device: Multiprocessors,
) -> tuple[int, ...]:
    if prod(shape) < _SMALLEST:
        return ()
    given = layout(shape, strides, reduced, offset)
    return tuple(buffers(given, elements, device))
