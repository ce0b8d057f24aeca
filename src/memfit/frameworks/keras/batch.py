"""Batches as Keras takes them, as shapes: x, (x, y) or (x, y, sample_weight), each any nesting of arrays.

Only shapes and kinds of numbers are needed, so that a batch may be made of arrays and tensors of any library, of
`keras.KerasTensor` or `jax.ShapeDtypeStruct`. Models are traced at other batch sizes by changing the first dimension.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from memfit.core.errors import BadBatch

_DEFAULT_BATCH_SIZE = 8
_PLACES = ("x", "y", "sample_weight")


@dataclass(frozen=True, slots=True)
class Spec:
    """The shape of an array and the kind of its numbers, by Keras's name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * item_bytes(self.dtype)


def item_bytes(dtype: str) -> int:
    """Bytes of one number.

    >>> item_bytes("bfloat16")
    2
    """
    if dtype == "bool" or dtype.startswith("float8"):
        return 1
    digits = "".join(filter(str.isdigit, dtype))
    return max(1, int(digits or 32) // 8)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as shapes."""

    data: Any  # the nesting that `train_step` gets, with a `Spec` for each array
    batch_size: int | None  # the first dimension that all arrays share
    make: Callable[[int], Any] | None = None  # gives the batch of another size
    any_form: bool = False  # what `make` gives may be any nesting, see `read`

    @property
    def x(self) -> Any:
        """The inputs of the model."""
        return self.data[0] if isinstance(self.data, tuple) else self.data

    @property
    def size_bytes(self) -> int:
        """Memory of all arrays."""
        return sum(spec.size_bytes for spec in self.specs())

    def specs(self) -> list[Spec]:
        """The shapes of all arrays, in order."""
        return leaves(self.data)

    def resized(self, batch_size: int | None) -> "Batch":
        """The batch with another first dimension; None leaves it as it is."""
        if batch_size is None or batch_size == self.batch_size:
            return self
        if self.make is not None:
            made = read(self.make(batch_size), any_form=self.any_form)
            return replace(made, batch_size=batch_size, make=self.make, any_form=self.any_form)
        if self.batch_size is None:
            raise BadBatch(
                "the batch's arrays share no first dimension, so no batch size can be set. Give arrays whose first "
                "dimension is the batch, or a function that makes a batch of a given size."
            )

        def change(spec: Spec) -> Spec:
            is_sized = bool(spec.shape) and spec.shape[0] == self.batch_size
            return Spec((batch_size, *spec.shape[1:]), spec.dtype) if is_sized else spec

        return Batch(mapped(change, self.data), batch_size)


def open_batch(batch: Any, batch_size: int | None = None, *, any_form: bool = False) -> Batch:
    """A batch that a user gave, or a function of its size that makes one, checked, at its own size or the given one."""
    if batch_size is not None and batch_size < 1:
        raise BadBatch(f"a batch size must be at least 1, but {batch_size} was given.")
    if callable(batch) and not hasattr(batch, "shape"):
        size = batch_size or _DEFAULT_BATCH_SIZE
        return replace(read(batch(size), any_form=any_form), batch_size=size, make=batch, any_form=any_form)
    return read(batch, batch_size or _DEFAULT_BATCH_SIZE, any_form=any_form).resized(batch_size)


def read(batch: Any, unknown: int = _DEFAULT_BATCH_SIZE, *, any_form: bool = False) -> Batch:
    """The shapes of a batch; `unknown` stands for a first dimension that is None, as that of `keras.Input` is.

    With `any_form`, it is any nesting, whose arrays may have different numbers of samples: a training step of the
    model's own takes what it likes.
    """
    if batch is None:
        raise BadBatch(
            "a batch is missing: give what one step works on, memfit.estimate(model, batch=(x, y)). Shapes are enough, "
            "as keras.KerasTensor((32, 28, 28, 1)) has one."
        )
    if isinstance(batch, list | tuple) and any_form:
        data: Any = tuple(_specs(part, "a part", unknown) for part in batch)
    elif isinstance(batch, list | tuple):
        if not 1 <= len(batch) <= len(_PLACES):
            raise BadBatch(
                f"a batch is x, (x, y) or (x, y, sample_weight), but {len(batch)} values were given. "
                "Put several inputs into one list or dictionary: ([a, b], y)."
            )
        data = tuple(_specs(part, name, unknown) for part, name in zip(batch, _PLACES, strict=False))
    else:
        data = _specs(batch, "x", unknown)
    specs = leaves(data)
    if not specs:
        raise BadBatch(f"the batch holds no array ({type(batch).__name__} was given). Give arrays or shapes: (x, y).")
    empty = next((spec for spec in specs if spec.shape and spec.shape[0] == 0), None)
    if empty is not None:
        raise BadBatch(f"the batch holds an empty array of shape {empty.shape}; a batch needs at least 1 sample.")
    sizes = {spec.shape[0] for spec in specs if spec.shape}
    if len(sizes) > 1 and any_form:
        return Batch(data, None)
    if len(sizes) > 1:
        shapes = ", ".join(str(spec.shape) for spec in specs)
        raise BadBatch(f"the batch's arrays disagree in their number of samples: their shapes are {shapes}.")
    return Batch(data, sizes.pop() if sizes else None)


def _specs(value: Any, place: str, unknown: int) -> Any:
    """The shapes in one part of a batch."""

    def spec(leaf: Any) -> Spec:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise BadBatch(
                f"{place} of the batch holds {leaf!r}, a {type(leaf).__name__}, where arrays, tensors or shapes are "
                "expected. Make lists of numbers into arrays with numpy.asarray; of a generator or a data set, give "
                "one batch: next(iter(data))."
            )
        shape = [None if size is None else int(size) for size in leaf.shape]
        if shape and shape[0] is None:
            shape[0] = unknown
        if None in shape:
            raise BadBatch(
                f"{place} of the batch has the shape {tuple(leaf.shape)}, whose None could be any size. "
                "Only the first dimension, that of samples, may be left open: say how large the others are."
            )
        dtype = str(keras.backend.standardize_dtype(leaf.dtype))
        if isinstance(leaf, np.ndarray) and dtype.startswith("float"):
            # Model.fit makes arrays of NumPy into the numbers that Keras computes with.
            dtype = str(keras.backend.floatx())
        return Spec(tuple(size for size in shape if size is not None), dtype)

    return mapped(spec, value)


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """A nesting with each leaf but None replaced by `change(leaf)`."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else change(leaf), value)


def leaves(value: Any) -> list[Any]:
    """The leaves of a nesting but None."""
    return [leaf for leaf in keras.tree.flatten(value) if leaf is not None]
