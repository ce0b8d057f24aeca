"""The operators of a step as columns of numbers: what the time model computes with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from memfit.core.profile import ConvolutionSizes, MovingSizes, ProductSizes, Work
from memfit.core.timeline import Phase

Numbers = NDArray[np.float64]
_NUM_SIZES = len(ConvolutionSizes._fields)


class Kind(IntEnum):
    """What decides how long an operator takes."""

    ELEMENTWISE = 0
    PRODUCT = 1
    CONVOLUTION = 2
    ATTENTION = 3
    ATTENTION_BACKWARD = 4
    COPY = 5
    REDUCTION = 6
    NORM = 7
    NORM_BACKWARD = 8
    BATCH_NORM = 9
    BATCH_NORM_BACKWARD = 10
    SOFTMAX = 11
    WINDOW = 12
    """Pooling, resampling and padding."""
    INDEXING = 13
    UPDATE = 14
    """Of many tensors in one kernel: foreach and fused optimizers."""
    RECURRENT = 15


# The first part of a name that fits decides.
_KINDS = (
    ("convolution_backward", Kind.CONVOLUTION),
    ("convolution", Kind.CONVOLUTION),
    ("attention", Kind.ATTENTION),
    ("_rnn", Kind.RECURRENT),
    ("batch_norm_backward", Kind.BATCH_NORM_BACKWARD),
    ("batch_norm", Kind.BATCH_NORM),
    ("layer_norm_backward", Kind.NORM_BACKWARD),
    ("group_norm_backward", Kind.NORM_BACKWARD),
    ("rms_norm_backward", Kind.NORM_BACKWARD),
    ("layer_norm", Kind.NORM),
    ("group_norm", Kind.NORM),
    ("rms_norm", Kind.NORM),
    ("softmax", Kind.SOFTMAX),
    ("_pool", Kind.WINDOW),
    ("pad", Kind.WINDOW),
    ("upsample", Kind.WINDOW),
    ("grid_sampler", Kind.WINDOW),
    ("im2col", Kind.WINDOW),
    ("col2im", Kind.WINDOW),
    ("_foreach", Kind.UPDATE),
    ("_fused_", Kind.UPDATE),
    ("embedding", Kind.INDEXING),
    ("index", Kind.INDEXING),
    ("gather", Kind.INDEXING),
    ("scatter", Kind.INDEXING),
    ("clone", Kind.COPY),
    ("copy", Kind.COPY),
    ("cat", Kind.COPY),
    ("aten.sum", Kind.REDUCTION),
    ("aten.mean", Kind.REDUCTION),
    ("aten.var", Kind.REDUCTION),
    ("norm", Kind.REDUCTION),
    ("amax", Kind.REDUCTION),
)
_PRODUCTS = {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.addbmm", "aten.linear"}
DTYPES = ("", "float32", "float16", "bfloat16", "float64")


def kind_of(op: str) -> Kind:
    """The kind of an operator, by its name."""
    if op in _PRODUCTS:
        return Kind.PRODUCT
    kind = next((kind for part, kind in _KINDS if part in op), Kind.ELEMENTWISE)
    return Kind.ATTENTION_BACKWARD if kind is Kind.ATTENTION and "backward" in op else kind


@dataclass(frozen=True, slots=True)
class Table:
    """Operators in order; `sizes` as `core.profile.Work` has them, one row each, filled up with zeros."""

    kind: NDArray[np.int64]
    phase: NDArray[np.int64]
    dtype: NDArray[np.int64]
    flops: NDArray[np.float64]
    moved: NDArray[np.float64]
    sizes: NDArray[np.float64]
    compiled: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def product_sizes(self) -> ProductSizes[Numbers]:
        """Columns of `sizes`, where operators are matrix products."""
        return ProductSizes(*self.sizes.T[: len(ProductSizes._fields)])

    @property
    def convolution_sizes(self) -> ConvolutionSizes[Numbers]:
        """Columns of `sizes`, where operators are convolutions."""
        return ConvolutionSizes(*self.sizes.T)

    @property
    def moving_sizes(self) -> MovingSizes[Numbers]:
        """Columns of `sizes`, where operators are neither."""
        return MovingSizes(*self.sizes.T[: len(MovingSizes._fields)])

    def part(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> "Table":
        """Some of the operators."""
        return Table(*(getattr(self, name)[chosen] for name in Table.__slots__))


PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


def table_of(work: Sequence[Work]) -> Table:
    """Columns of some operators."""
    kinds = {op: kind_of(op) for op in {one.op for one in work}}
    sizes = np.zeros((len(work), _NUM_SIZES))
    for row, one in enumerate(work):
        sizes[row, : len(one.sizes)] = one.sizes
    return Table(
        np.array([kinds[one.op] for one in work], dtype=np.int64),
        np.array([PHASES.index(one.phase) if one.phase in PHASES else 0 for one in work], dtype=np.int64),
        np.array([DTYPES.index(one.dtype) if one.dtype in DTYPES else 0 for one in work], dtype=np.int64),
        np.array([one.flops for one in work], dtype=np.float64),
        np.array([one.moved_bytes for one in work], dtype=np.float64),
        sizes,
        np.array([one.is_compiled for one in work], dtype=bool),
    )


def between(first: tuple[int, Table], second: tuple[int, Table] | None, batch_size: int | None) -> Table:
    """The table at any batch size, from those at two: every figure grows evenly."""
    (n, table) = first
    if second is None or batch_size is None or batch_size == n or len(second[1]) != len(table) or second[0] == n:
        return table
    (m, other) = second
    share = (batch_size - n) / (m - n)

    def at(name: str) -> NDArray[np.float64]:
        low, high = getattr(table, name), getattr(other, name)
        grown: NDArray[np.float64] = np.maximum(0.0, low + (high - low) * share)
        return grown

    return replace(table, flops=at("flops"), moved=at("moved"), sizes=at("sizes"))
