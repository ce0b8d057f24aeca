"""Arrays in .npy files, and wherever else bytes in that form are found.

The header is parsed by numpy; the rest is read here by blocks, straight into the caller's array where the dtype agrees,
else through a small scratch array. Nothing is unpickled: arrays of Python objects are refused. A file in Fortran order
keeps each sample scattered over the whole file, so it is read column by column and unpacked before it is streamed.
"""

import io
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.core.errors import BadFile, BadInput
from memfit.data.files import ByteFile, fingerprint_of, is_remote, open_file
from memfit.data.source import Array, Field, Layout

MAGIC = b"\x93NUMPY"
_MAX_HEADER_BYTES = 64 << 10
_SCRATCH_BYTES = 256 << 10
# A request over a network takes as long as bringing about so many bytes.
_REMOTE_READ_BYTES = 1 << 20
_STREAMED_KINDS = "biufcmMSU"
"""Kinds of numpy's dtypes whose values are in the file itself."""


@dataclass(frozen=True, slots=True)
class Header:
    """What the beginning of an .npy file says.

    Attributes:
        dtype: as stored, byte order included.
        shape: of the whole array.
        is_fortran: whether the first axis changes fastest.
        num_bytes: its own length, after which the values begin.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    num_bytes: int


class NpyArray:
    """An array in .npy form inside a file.

    Args:
        file: the file.
        name: what to call the array in messages.
        start: offset of its first byte.
        length: bytes that it may take; None for all up to the end of the file.

    Raises:
        BadFile: it isn't one, is cut short, or holds what can't be read without unpickling.
    """

    def __init__(self, file: ByteFile, name: str, *, start: int = 0, length: int | None = None) -> None:
        self.file = file
        self.name = name
        length = file.size - start if length is None else length
        header = _read_header(file, name, start, length)
        if not header.shape:
            raise BadFile(f"{name} holds a single value without axes; a first axis that counts samples is needed.")
        self.dtype = header.dtype
        self.shape = header.shape
        self.sample_bytes = header.dtype.itemsize * _product(header.shape[1:])
        self.is_scattered = header.is_fortran and len(header.shape) > 1 and _product(header.shape[1:]) > 1
        self._data_start = start + header.num_bytes
        self._check_length(header, length)

    def read(self, start: int, stop: int, out: Array) -> None:
        """Fills a C-contiguous array with the samples `start` to `stop`, converted to its dtype as by `astype`."""
        if stop <= start or not self.sample_bytes:
            return
        if self.is_scattered:
            self._read_scattered(start, stop, out)
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

    def _read_scattered(self, start: int, stop: int, out: Array) -> None:
        # Columns are taken in the order in which they lie, so that a file that only goes forwards is read once.
        for column in range(_product(self.shape[1:])):
            inside: tuple[Any, ...] = np.unravel_index(column, self.shape[1:], order="F")
            offset = self._data_start + (column * self.shape[0] + start) * self.dtype.itemsize
            self._read_run(offset, out[(slice(None), *inside)])

    def _check_length(self, header: Header, length: int) -> None:
        needed = header.num_bytes + self.shape[0] * self.sample_bytes
        if needed <= length:
            return
        present = max(0, length - header.num_bytes)
        where = "" if self.is_scattered else f", so it ends in sample {present // self.sample_bytes}"
        raise BadFile(
            f"{self.name} is cut short: its header tells of {self.shape[0]} samples of {self.dtype} "
            f"{self.shape[1:]}, {needed} bytes in all, and {length} bytes are there{where}. Copy or save it again."
        )


class NpySource:
    """Samples in one .npy file: the entries of its first axis.

    Args:
        path: the file, or its address.
        name: what its field is called; a structured array has fields of its own.
        is_label: whether they are labels.
        columns: fields of a structured array to use, in this order; all if not given.
        labels: the field of a structured array that is the label.
        classes: names that its numbers stand for.

    Raises:
        BadFile: it can't be read as such a file.
        BadInput: an unknown field.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        name: str = "x",
        is_label: bool = False,
        columns: Sequence[str] | None = None,
        labels: str | None = None,
        classes: tuple[str, ...] = (),
    ) -> None:
        self._path = os.fspath(path)
        self._classes = classes
        self._file = open_file(path)
        self._array = NpyArray(self._file, repr(self._file.name))
        self._fields = fields_of(self._array, name, is_label=is_label, columns=columns, labels=labels)

    @property
    def name(self) -> str:
        """The path."""
        return self._file.name

    @property
    def fields(self) -> tuple[Field, ...]:
        """One field, or those of a structured array."""
        return self._fields

    @property
    def num_samples(self) -> int:
        """Length of the first axis."""
        return self._array.shape[0]

    @property
    def layout(self) -> Layout:
        """Any run of samples at the cost of its bytes, unless the file is in Fortran order."""
        return layout_of([self._array])

    @property
    def classes(self) -> tuple[str, ...]:
        """As given: the file has no place for them."""
        return self._classes

    def fingerprint(self) -> str:
        """From the file's name, size and time of change."""
        return fingerprint_of([self._path], self._fields)

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        """Fills one array a field with samples `start` to `stop`."""
        read_fields(self._array, self._fields, start, stop, out)

    def drop(self, start: int, stop: int) -> None:
        """Gives the pages of these samples back."""
        self._file.drop(*self._array.span(start, stop))

    def close(self) -> None:
        """Closes the file in this process."""
        self._file.close()

    def __repr__(self) -> str:
        return f"NpySource({self.name!r})"


def fields_of(
    array: NpyArray,
    name: str,
    *,
    is_label: bool = False,
    columns: Sequence[str] | None = None,
    labels: str | None = None,
) -> tuple[Field, ...]:
    """The fields of an array: one called `name`, or those of its dtype where that is structured.

    Raises:
        BadInput: a column that isn't there, or columns of an array that has none.
    """
    if array.dtype.fields is None:
        if columns is not None or labels is not None:
            asked = [*(columns or ()), *([labels] if labels is not None else [])]
            raise BadInput(
                f"{array.name} has no columns, and {', '.join(map(repr, asked))} was asked for. Leave `columns` away; "
                "as `labels` give the path of a file with as many labels."
            )
        return (Field(name, _native(array.dtype), array.shape[1:], is_label),)
    present = array.dtype.names or ()
    chosen = list(present if columns is None else columns)
    if labels is not None and labels not in chosen:
        chosen.append(labels)
    for column in chosen:
        if column not in present:
            raise BadInput(f"{array.name} has no column {column!r}; it has {', '.join(map(repr, present))}.")
    found = []
    for column in chosen:
        dtype = array.dtype.fields[column][0]
        shape = array.shape[1:] + dtype.shape
        found.append(Field(column, _native(dtype.base), shape, is_label or column == labels))
    return tuple(sorted(found, key=lambda field: field.is_label))


def layout_of(arrays: Sequence[NpyArray]) -> Layout:
    """How arrays that are read together can be read."""
    scattered = [array.name for array in arrays if array.is_scattered]
    records = sum(_records_bytes(array) for array in arrays if array.dtype.fields is not None)
    return Layout(
        scratch_bytes=max(_SCRATCH_BYTES, records) if arrays else 0,
        read_bytes=_REMOTE_READ_BYTES if any(is_remote(array.file.name) for array in arrays) else 0,
        is_sequential=bool(scattered),
        reason=(
            f"{scattered[0]} is in Fortran order, which scatters each sample over the whole file; "
            "np.save(path, np.ascontiguousarray(x)) writes it in C order."
        )
        if scattered
        else "",
    )


def read_fields(array: NpyArray, fields: Sequence[Field], start: int, stop: int, out: Sequence[Array]) -> None:
    """Fills one array a field with samples `start` to `stop` of one array, structured or plain."""
    if array.dtype.fields is None:
        array.read(start, stop, out[0])
        return
    step = max(1, _SCRATCH_BYTES // max(1, array.sample_bytes))
    records: Array = np.empty((min(step, stop - start), *array.shape[1:]), array.dtype)
    for first in range(start, stop, step):
        part = records[: min(step, stop - first)]
        array.read(first, first + len(part), part)
        for field, target in zip(fields, out, strict=True):
            target[first - start : first - start + len(part)] = part[field.name]


def _records_bytes(array: NpyArray) -> int:
    return max(_SCRATCH_BYTES, array.sample_bytes)


def _read_header(file: ByteFile, name: str, start: int, length: int) -> Header:
    head = _read_at_most(file, start, min(12, length))
    if not head:
        raise BadFile(f"{name} is empty: 0 bytes, and an .npy header was expected.")
    if len(head) < 12 or not head.startswith(MAGIC):
        raise BadFile(
            f"{name} isn't in .npy form: it begins with {head[:8]!r}, and {MAGIC!r} was expected. "
            "Save it again with np.save."
        )
    version = (head[6], head[7])
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise BadFile(f"{name} is in version {version[0]}.{version[1]} of the .npy format; 1.0 to 3.0 can be read.")
    size = struct.unpack("<H", head[8:10])[0] + 10 if version == (1, 0) else struct.unpack("<I", head[8:12])[0] + 12
    if size > _MAX_HEADER_BYTES or size > length:
        raise BadFile(
            f"{name} is damaged or cut short: its header should take {size} bytes, and {length} are there "
            f"(headers of up to {_MAX_HEADER_BYTES} bytes can be read). Copy or save it again."
        )
    text = io.BytesIO(_read_at_most(file, start, size))
    text.seek(8)
    parse = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, is_fortran, dtype = parse(text, max_header_size=_MAX_HEADER_BYTES)
    # numpy evaluates the header as a Python literal; a damaged one raises whatever the parser or the dtype does.
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadFile(f"the header of {name} can't be understood: {reason}. Copy or save it again.") from error
    if any(length < 0 for length in shape):
        raise BadFile(f"the header of {name} is damaged: it tells of the shape {shape}. Copy or save it again.")
    if version == (3, 0):
        dtype = _with_names_decoded(dtype)
    _check_dtype(dtype, name)
    return Header(dtype, tuple(int(length) for length in shape), bool(is_fortran), size)


def _read_at_most(file: ByteFile, start: int, length: int) -> bytes:
    buffer = bytearray(length)
    file.read_into(start, buffer)
    return bytes(buffer)


def _with_names_decoded(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Version 3.0 differs from 2.0, as which it was parsed, in the encoding of the fields' names alone."""
    if dtype.names is None:
        return dtype
    names = [name.encode("latin1", "replace").decode("utf-8", "replace") for name in dtype.names]
    renamed = np.dtype(dtype)
    renamed.names = tuple(names)
    return renamed


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


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("=")


def _product(lengths: Sequence[int]) -> int:
    product = 1
    for length in lengths:
        product *= length
    return product
