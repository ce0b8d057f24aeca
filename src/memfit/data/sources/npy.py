"""Arrays in .npy files, and wherever else bytes in that form are found.

The header is parsed by numpy; the rest is read here by blocks, straight into the caller's array where the dtype agrees,
else through a small scratch array. Nothing is unpickled: arrays of Python objects are refused. A file in Fortran order
keeps each sample scattered over the whole file, so it is read column by column and unpacked before it is streamed.
"""

import io
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from memfit.core.errors import BadFile, BadInput, reason_of
from memfit.data.files import ByteFile, fingerprint_of, is_remote, open_file, read_bytes
from memfit.data.source import Array, Field, Layout, Source, Storage
from memfit.data.sources.tables import Names, choose_names

MAGIC = b"\x93NUMPY"
_MAX_HEADER_BYTES = 64 << 10
_SCRATCH_BYTES = 256 << 10
# A request over a network takes as long as bringing about so many bytes.
_REMOTE_READ_BYTES = 1 << 20
_SCATTERED = (
    "is in Fortran order, which scatters each sample over the whole file; "
    "np.save(path, np.ascontiguousarray(x)) writes it in C order."
)
# Kinds of numpy's dtypes whose values are in the file itself.
_STREAMED_KINDS = "biufcmMSU"


class NpyArray:
    """An array in .npy form inside a file: in its bytes from `start` on, `length` of them or all up to its end.

    Its name is what to call it in messages.
    """

    def __init__(self, file: ByteFile, name: str, *, start: int = 0, length: int | None = None) -> None:
        self.file = file
        self.name = name
        length = file.size - start if length is None else length
        self.dtype, self.shape, is_fortran, header_bytes = _read_header(file, name, start, length)
        if not self.shape:
            raise BadFile(f"{name} holds a single value without axes; a first axis that counts samples is needed.")
        self.sample_bytes = self.dtype.itemsize * math.prod(self.shape[1:])
        self.is_scattered = is_fortran and math.prod(self.shape[1:]) > 1
        self._data_start = start + header_bytes
        needed = header_bytes + self.shape[0] * self.sample_bytes
        if needed > length:
            present = max(0, length - header_bytes)
            where = "" if self.is_scattered else f", so it ends in sample {present // self.sample_bytes}"
            raise BadFile(
                f"{self.name} is cut short: its header declares {self.shape[0]} samples of {self.dtype} "
                f"{self.shape[1:]}, {needed} bytes in all, and {length} bytes are there{where}. Copy or save it again."
            )

    def read(self, start: int, stop: int, out: Array) -> None:
        """Fills a C-contiguous array with the samples `start` to `stop`, converted to its dtype as by `astype`."""
        if stop <= start or not self.sample_bytes:
            return
        if self.is_scattered:
            # Columns are taken in the order in which they lie, so that a file that only goes forwards is read once.
            for column in range(math.prod(self.shape[1:])):
                inside: tuple[Any, ...] = np.unravel_index(column, self.shape[1:], order="F")
                offset = self._data_start + (column * self.shape[0] + start) * self.dtype.itemsize
                self._read_run(offset, out[(slice(None), *inside)])
        else:
            self._read_run(self._data_start + start * self.sample_bytes, out.reshape(-1))

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Offset and length of the bytes of these samples; of the whole array where they are scattered."""
        if self.is_scattered:
            return self._data_start, self.shape[0] * self.sample_bytes
        return self._data_start + start * self.sample_bytes, (stop - start) * self.sample_bytes

    def _read_run(self, offset: int, out: Array) -> None:
        """Fills a flat array with the values that lie one after the other from `offset` on."""
        stored = self.dtype
        if out.dtype.newbyteorder("=") == stored.newbyteorder("=") and out.flags.c_contiguous:
            self.file.read_into(offset, out.view(np.uint8))
            if out.dtype != stored:
                out.byteswap(inplace=True)
            return
        piece = max(1, _SCRATCH_BYTES // stored.itemsize)
        scratch: Array = np.empty(min(piece, out.size), stored)
        for first in range(0, out.size, piece):
            values = scratch[: min(piece, out.size - first)]
            self.file.read_into(offset + first * stored.itemsize, values.view(np.uint8))
            out[first : first + len(values)] = values


class NpyArrays(Source):
    """Samples in arrays of .npy form that are read together: the entries of their first axes."""

    def __init__(self, path: str, arrays: Sequence[tuple[NpyArray, tuple[Field, ...]]], name: str) -> None:
        self._path = path
        self._arrays = [array for array, _ in arrays]
        self.name = name
        self.fields = tuple(field for _, fields in arrays for field in fields)
        self.num_samples = self._arrays[0].shape[0]
        is_remote_file = any(is_remote(array.file.name) for array in self._arrays)
        records = [array for array in self._arrays if array.dtype.fields is not None]
        scattered = [array.name for array in self._arrays if array.is_scattered]
        self.layout = Layout(
            scratch_bytes=max(_SCRATCH_BYTES, sum(max(_SCRATCH_BYTES, array.sample_bytes) for array in records)),
            read_bytes=_REMOTE_READ_BYTES if is_remote_file else 0,
            is_sequential=bool(scattered),
            reason=f"{scattered[0]} {_SCATTERED}" if scattered else "",
        )

    def fingerprint(self) -> str:
        return fingerprint_of([self._path], self.fields)

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        for array, target in zip(self._arrays, out, strict=True):
            array.read(start, stop, target)

    def drop(self, start: int, stop: int) -> None:
        for array in self._arrays:
            array.file.drop(*array.span(start, stop))

    def close(self) -> None:
        for array in self._arrays:
            array.file.close()

    def storage(self) -> Storage:
        if self.layout.is_sequential:
            return Storage((".npy: in Fortran order, each sample scattered over the file",))
        return Storage((".npy: samples one after the other, without compression",))


class NpySource(NpyArrays):
    """Samples in one .npy file: the entries of its first axis.

    Its field is called `name`; a structured array has fields of its own, which can be chosen.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, name: str = "x", columns: Names = None, labels: str | None = None
    ) -> None:
        file = open_file(path)
        array = NpyArray(file, repr(file.name))
        fields = _fields_of(array, name, columns, labels)
        super().__init__(os.fspath(path), [(array, fields)], file.name)

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        array = self._arrays[0]
        if array.dtype.fields is None:
            super().read(start, stop, out)
            return
        step = max(1, _SCRATCH_BYTES // max(1, array.sample_bytes))
        records: Array = np.empty((min(step, stop - start), *array.shape[1:]), array.dtype)
        for first in range(start, stop, step):
            part = records[: min(step, stop - first)]
            array.read(first, first + len(part), part)
            for field, target in zip(self.fields, out, strict=True):
                target[first - start : first - start + len(part)] = part[field.name]


def _fields_of(array: NpyArray, name: str, columns: Names, labels: str | None) -> tuple[Field, ...]:
    """The fields of an array: one called `name`, or those of its dtype where that is structured."""
    if array.dtype.fields is None:
        if columns is not None or labels is not None:
            asked = [*(columns or ()), *([labels] if labels is not None else [])]
            raise BadInput(
                f"{array.name} has no columns, and {', '.join(map(repr, asked))} was asked for. Leave `columns` out; "
                "as `labels` give the path of a file with as many labels."
            )
        return (Field(name, array.dtype.newbyteorder("="), array.shape[1:]),)
    features, targets = choose_names(array.dtype.names or (), columns, labels, kind="column", source=array.name)
    fields = []
    for column in (*features, *targets):
        dtype = array.dtype.fields[column][0]
        shape = array.shape[1:] + dtype.shape
        fields.append(Field(column, dtype.base.newbyteorder("="), shape, column in targets))
    return tuple(fields)


def _read_header(
    file: ByteFile, name: str, start: int, length: int
) -> tuple[np.dtype[Any], tuple[int, ...], bool, int]:
    """Type and shape of an array, whether its first axis changes fastest, and the bytes of the header."""
    if length <= 0:
        raise BadFile(f"{name} is empty: 0 bytes, and an .npy header was expected.")
    head = io.BytesIO(read_bytes(file, start, min(length, _MAX_HEADER_BYTES)))
    try:
        version = np.lib.format.read_magic(head)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"it is in version {version[0]}.{version[1]} of the format, and 1.0 to 3.0 can be read")
        parse = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = parse(head, max_header_size=_MAX_HEADER_BYTES)
    # numpy evaluates the header as a Python literal; a damaged one raises whatever the parser or the dtype does.
    except Exception as error:
        raise BadFile(
            f"{name} isn't in .npy form, or is damaged: {reason_of(error)}. Copy or save it again."
        ) from error
    if any(length < 0 for length in shape):
        raise BadFile(f"the header of {name} is damaged: it declares the shape {shape}. Copy or save it again.")
    if version == (3, 0) and dtype.names:
        # It differs from 2.0, as which it was parsed, in the encoding of the fields' names alone.
        names = [name.encode("latin1", "replace").decode("utf-8", "replace") for name in dtype.names]
        dtype = np.dtype(dtype)
        dtype.names = tuple(names)
    _check_dtype(dtype, name)
    return dtype, tuple(int(length) for length in shape), bool(is_fortran), head.tell()


def _check_dtype(dtype: np.dtype[Any], name: str) -> None:
    if dtype.hasobject:
        raise BadFile(
            f"{name} holds Python objects, stored as a pickle; loading a pickle can run any code, so it isn't read. "
            "Save a plain array of numbers instead: np.save(path, np.stack(x)), all samples in one shape."
        )
    for column in dtype.names or ():
        inner = dtype[column]
        if inner.base.fields is not None:
            raise BadFile(f"column {column!r} of {name} is structured itself; save its parts as columns of their own.")
        _check_dtype(inner.base, f"column {column!r} of {name}")
    if dtype.fields is not None:
        return
    if dtype.kind == "V" and dtype.itemsize <= 2:
        raise BadFile(
            f"{name} has the dtype {dtype.str}, raw bytes: so numpy stores bfloat16 and other types that it doesn't "
            "know. Save it as float32 or float16, or as the integers that have the same bits: x.view('uint16')."
        )
    if dtype.kind not in _STREAMED_KINDS or not dtype.itemsize:
        raise BadFile(f"{name} has the dtype {dtype}, which can't be streamed; save numbers, booleans or text.")
