"""An array in a file that is indexed like one in memory, of which only the rows asked for are read.

`np.load(path, mmap_mode="r")` promises the same, but leaves the pages of all that was touched in memory until the
kernel wants them back, ignores the mode for .npz, and knows neither HDF5 nor remote files. Here rows are read by blocks
into a new array and their pages are given back. Rows that lie close together are read in one go.
"""

import operator
import os
from collections.abc import Iterator
from itertools import pairwise
from types import EllipsisType
from typing import Any

import numpy as np

from memfit.core.errors import BadFile, BadInput
from memfit.data.files import is_remote, open_file
from memfit.data.source import Array, Source
from memfit.data.sources.npz import list_members
from memfit.data.sources.opening import OPENERS, kind_of, missing

_BLOCK_BYTES = 4 << 20
"""Bytes read at once where not all of them are kept."""
_GAP_BYTES = 32 << 10
"""Unwanted bytes between two rows that cost less to read than a second call."""


class ArrayFile:
    """An array in a file, read where it is indexed.

    The first index may be a number, a slice, a list or array of numbers, or a mask; further indices apply to the rows
    that were read. All give what numpy gives for the whole array. `np.asarray` of it loads it all.

    Args:
        source: with a single field.

    Attributes:
        name: its path.
        dtype: as stored, in this machine's byte order.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._field = source.fields[0]
        self.name = source.name
        self.dtype = self._field.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of its axes."""
        return (len(self), *self._field.shape)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of values."""
        return self.nbytes // self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes that it would take in memory."""
        return self._source.num_samples * self._field.sample_bytes

    def __len__(self) -> int:
        return self._source.num_samples

    def __getitem__(self, index: Any) -> Any:
        first, rest = _split(index, self.shape)
        if isinstance(first, slice):
            return self._slice(range(len(self))[first], rest)
        if isinstance(first, int):
            if not -len(self) <= first < len(self):
                raise IndexError(f"index {first} is out of bounds: {self.name} has {len(self)} rows")
            row = first % len(self)
            return self._run(row, row + 1)[(0, *rest)]
        wanted = np.where(first < 0, first + len(self), first)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < len(self)):
            bad = int(first[(wanted < 0) | (wanted >= len(self))].flat[0])
            raise IndexError(f"index {bad} is out of bounds: {self.name} has {len(self)} rows")
        rows, places = np.unique(wanted, return_inverse=True)
        return self._gather(rows)[(places.reshape(wanted.shape), *rest)]

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), self._block_rows):
            yield from self._run(start, min(start + self._block_rows, len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError(f"{self.name} is in a file: an array of it is always a copy")
        whole = self._run(0, len(self))
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def close(self) -> None:
        """Closes the file; indexing opens it again."""
        self._source.close()

    def __enter__(self) -> "ArrayFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ArrayFile({self.name!r}, shape={self.shape}, dtype={self.dtype})"

    @property
    def _block_rows(self) -> int:
        return max(1, _BLOCK_BYTES // max(1, self._field.sample_bytes))

    def _slice(self, rows: range, rest: tuple[Any, ...]) -> Array:
        if not rest:
            return self._range(rows)
        index = (slice(None), *rest)
        if not all(part is None or isinstance(part, slice | int) for part in rest):
            whole: Array = self._range(rows)[index]
            return whole
        # Where the first axis stays the first one, all that is cut away needn't be in memory at once.
        step = self._block_rows
        starts = range(0, max(1, len(rows)), step)
        return np.concatenate([self._range(rows[start : start + step])[index] for start in starts])

    def _range(self, rows: range) -> Array:
        if not rows:
            return self._run(0, 0)
        if rows.step < 0:
            return self._range(rows[::-1])[::-1].copy()
        if rows.step == 1:
            return self._run(rows.start, rows.stop)
        return self._gather(np.arange(rows.start, rows.stop, rows.step))

    def _run(self, start: int, stop: int, out: Array | None = None) -> Array:
        """Rows from `start` on, read block by block, each of which gives its pages back."""
        if out is None:
            out = np.empty((stop - start, *self.shape[1:]), self.dtype)
        for first in range(start, stop, self._block_rows):
            last = min(first + self._block_rows, stop)
            self._source.read(first, last, [out[first - start : last - start]])
            self._source.drop(first, last)
        return out

    def _gather(self, rows: Array) -> Array:
        """Rows in ascending order; those that lie close together are read at once, a block at most."""
        out: Array = np.empty((len(rows), *self.shape[1:]), self.dtype)
        gaps = np.flatnonzero((np.diff(rows) - 1) * max(1, self._field.sample_bytes) > _GAP_BYTES) + 1
        for low, high in pairwise([0, *gaps.tolist(), len(rows)]):
            done = low
            while done < high:
                start = int(rows[done])
                end = done + int(np.searchsorted(rows[done:high], start + self._block_rows))
                stop = int(rows[end - 1]) + 1
                if stop - start == end - done:
                    self._run(start, stop, out[done:end])
                else:
                    out[done:end] = self._run(start, stop)[rows[done:end] - start]
                done = end
        return out


def open_array(path: str | os.PathLike[str], *, key: str | None = None) -> ArrayFile:
    """An array in a file, to be indexed without loading it.

    Any run of rows of a .npy file, or of an .npz or HDF5 file that isn't compressed, costs no more than its bytes. A
    compressed .npz is unpacked from its beginning for each read that goes back.

    Args:
        path: a .npy, .npz or HDF5 file, or the address of one.
        key: which array of an .npz file, dataset of an HDF5 file or column of a structured array; needed where there
            are several.

    Raises:
        BadFile: it can't be read as such a file.
        BadInput: no such key, or several arrays and no key.
    """
    if not isinstance(path, str | os.PathLike):
        raise BadInput(f"the path of a .npy, .npz or HDF5 file is needed, and {path!r} was given")
    name = os.fspath(path)
    if not is_remote(name) and not os.path.exists(os.path.expanduser(name)):
        raise BadFile(missing(name))
    kind, columns = kind_of(name), None if key is None else [key]
    if kind not in ("npy", "npz", "hdf5"):
        raise BadInput(
            f"{name!r} is a {kind} file, whose rows can't be read one by one; those of .npy, .npz and HDF5 files can. "
            "memfit.stream gives it batch by batch."
        )
    if kind == "npz" and columns is None:
        columns = list(list_members(open_file(name)))
        if len(columns) > 1:
            raise BadInput(f"{name!r} has several arrays: {', '.join(map(repr, columns))}. Choose one with key=...")
    source = OPENERS[kind](name, columns=columns, labels=None)
    if len(source.fields) != 1:
        names = ", ".join(repr(field.name) for field in source.fields)
        raise BadInput(f"{source.name} has several arrays: {names}. Choose one with key=...")
    return ArrayFile(source)


def _split(index: Any, shape: tuple[int, ...]) -> tuple[int | slice | Array, tuple[Any, ...]]:
    """The index of the first axis, as a number, slice or array of numbers, and those of the others."""
    parts = list(index) if isinstance(index, tuple) else [index]
    parts = [part if part is None or isinstance(part, slice | EllipsisType) else _numbers(part) for part in parts]
    used = sum(part.ndim if _is_mask(part) else part is not None and part is not Ellipsis for part in parts)
    if used > len(shape):
        raise IndexError(f"{used} axes are indexed, and there are {len(shape)}")
    places = [place for place, part in enumerate(parts) if part is Ellipsis]
    if len(places) > 1:
        raise IndexError("an index can have a single ellipsis ('...')")
    for place in places:
        parts[place : place + 1] = [slice(None)] * (len(shape) - used)
    if not parts:
        parts = [slice(None)]
    if parts[0] is None:
        raise IndexError("a new axis can't come before the rows of a file; add it to what was read")
    if _is_mask(parts[0]) and parts[0].shape != shape[: parts[0].ndim]:
        raise IndexError(f"a mask of the shape {parts[0].shape} was given, and the array has the shape {shape}")
    masks = [np.nonzero(part) if _is_mask(part) else (part,) for part in parts]
    first, *rest = (part for mask in masks for part in mask)
    return first, tuple(rest)


def _is_mask(part: Any) -> bool:
    return isinstance(part, np.ndarray) and part.dtype == bool


def _numbers(part: Any) -> int | Array:
    """A number, an array of numbers or a mask."""
    try:
        if not isinstance(part, bool | np.bool_):
            return operator.index(part)
    except TypeError:
        pass
    array = np.asarray(part)
    if array.size == 0 and not isinstance(part, np.ndarray):
        array = array.astype(np.intp)
    if array.ndim == 0 or array.dtype.kind not in "iub":
        raise IndexError(f"an index is a number, a slice, a list or array of numbers, or a mask; {part!r} is none")
    return array if array.dtype == bool else array.astype(np.int64)
