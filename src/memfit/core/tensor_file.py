"""Files of tensors in the safetensors format, written and read piece by piece.

A checkpoint is written when memory is short, so nothing on its way to or from a file is copied as a whole: who writes
hands over pieces of a few megabytes, who reads buffers to be filled. Nor is a file mapped: mappings that PyTorch makes
of one count against a limit on data (RLIMIT_DATA). The library of the format takes all tensors at once and opens files
by their names, so it can do neither. The format is eight bytes with the length of a header, the header as JSON, and
the values, row by row: https://github.com/huggingface/safetensors
"""

import contextlib
import importlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from memfit.core.errors import reason_of
from memfit.core.guarding import BadCheckpoint
from memfit.core.plain_files import open_plain

CHUNK_BYTES = 8 * 2**20
MAX_HEADER_BYTES = 100 * 10**6  # the format's own limit

# By the names that numpy, PyTorch and Keras have in common: (name in the format, bytes of an element).
FORMAT = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "uint16": ("U16", 2),
    "uint32": ("U32", 4),
    "uint64": ("U64", 8),
    "complex64": ("C64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
}
_NAMES = {short: (name, item_bytes) for name, (short, item_bytes) in FORMAT.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor to be written."""

    name: str  # in the file
    dtype: str  # "float32", "bfloat16". One that the format lacks is written as bytes, in one more dimension
    shape: tuple[int, ...]  # its own
    item_bytes: int  # of an element
    pieces: Callable[[], Iterable[Any]]  # gives its values as bytes, row by row, when it is its turn


def array_entry(name: str, array: Any) -> TensorEntry:
    """A numpy array to be written."""
    return TensorEntry(name, array.dtype.name, array.shape, array.dtype.itemsize, lambda: array_pieces(array))


def array_pieces(array: Any) -> Iterator[memoryview]:
    """The bytes of an array's values, row by row, in this machine's order."""
    native = numpy.ascontiguousarray(array, array.dtype.newbyteorder("="))
    flat = native.reshape(-1).view(numpy.uint8)
    for start in range(0, len(flat), CHUNK_BYTES):
        yield flat[start : start + CHUNK_BYTES].data


def type_name(dtype: Any) -> str | None:
    """A name of a type of arrays, by which `numpy_dtype` finds it; None: it is no type of numbers."""
    if dtype.isbuiltin == 2:
        # Of numpy's extension.
        return str(dtype.name) if dtype.name in FORMAT else None
    return str(dtype.str) if dtype.kind in "biufc" else None


def numpy_dtype(name: str) -> Any:
    """The type of arrays with this name; bfloat16 and the like are those of numpy's extension."""
    with contextlib.suppress(TypeError, ImportError, AttributeError):
        extension = name in FORMAT and name.startswith(("bfloat", "float8"))
        dtype = numpy.dtype(getattr(importlib.import_module("ml_dtypes"), name) if extension else name)
        if dtype.kind in "biufc" or extension:
            return dtype
    raise BadCheckpoint(f"{name!r} is not a dtype that a checkpoint can hold.")


def write(path: Path, entries: Iterable[TensorEntry], metadata: dict[str, str] | None = None) -> None:
    """Writes tensors into one file."""
    # Wide types first: so every tensor begins at a multiple of its own element's size, as readers expect.
    entries = sorted(entries, key=lambda entry: (-entry.item_bytes, entry.name))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for entry in entries:
        short, _ = FORMAT.get(entry.dtype, ("U8", 1))
        shape = [*entry.shape] if entry.dtype in FORMAT else [*entry.shape, entry.item_bytes]
        end = offset + math.prod(entry.shape) * entry.item_bytes
        header[entry.name] = {"dtype": short, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for entry in entries:
            written = sum(file.write(piece) for piece in entry.pieces())
            if written != math.prod(entry.shape) * entry.item_bytes:
                raise BadCheckpoint(f"{entry.name} has {written} bytes, and not those of {entry.dtype}{entry.shape}.")


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor is in a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int


class TensorFile:
    """A file of tensors, from which they can be read one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_plain(path) as file:
                self._stored, self.metadata = _read_header(file, os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise BadCheckpoint(f"{path} can't be read: {reason_of(error)}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise BadCheckpoint(f"{path} is no safetensors file, or is damaged: {error}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def names(self) -> list[str]:
        """Of all tensors in the file."""
        return list(self._stored)

    def dtype(self, name: str) -> str:
        """The dtype of a tensor in the file; that of bytes for a dtype that the format lacks."""
        return self._stored[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor in the file; with one more dimension for a dtype that the format lacks."""
        return self._stored[name].shape

    def shape_as(self, name: str, dtype: str, item_bytes: int) -> tuple[int, ...]:
        """The shape of a tensor of this type."""
        if name not in self:
            raise BadCheckpoint(f"{self.path} lacks {name!r}")
        stored, shape = self.dtype(name), self.shape(name)
        if stored == dtype:
            return shape
        if dtype in FORMAT or stored != "uint8" or shape[-1:] != (item_bytes,):
            raise BadCheckpoint(f"{self.path} holds {name!r} as {stored}, and {dtype} was expected")
        return shape[:-1]

    def read_into(self, name: str, buffers: Iterable[Any]) -> None:
        """Fills buffers with the bytes of a tensor, one after the other; each before the next is asked for."""
        with open_plain(self.path) as file:
            file.seek(self._stored[name].start)
            for buffer in buffers:
                if file.readinto(buffer) != memoryview(buffer).nbytes:
                    raise BadCheckpoint(f"{self.path} ends in the middle of {name!r}")

    def read(self, name: str, dtype: Any = None) -> Any:
        """A tensor as an array."""
        dtype = numpy_dtype(self.dtype(name)) if dtype is None else dtype
        array = numpy.empty(self.shape_as(name, dtype.name, dtype.itemsize), dtype.newbyteorder("="))
        flat = array.reshape(-1).view(numpy.uint8)
        self.read_into(name, (flat[start : start + CHUNK_BYTES] for start in range(0, len(flat), CHUNK_BYTES)))
        return array.astype(dtype, copy=False)


def _read_header(file: Any, size_bytes: int) -> tuple[dict[str, _Stored], dict[str, str]]:
    """(where the tensors are, what else the file says)."""
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(MAX_HEADER_BYTES, size_bytes - 8):
        raise ValueError("its header has an invalid length")
    header = json.loads(file.read(length))
    metadata = header.pop("__metadata__", None) or {}
    begin = 8 + length
    stored = {}
    for name, entry in header.items():
        dtype, item_bytes = _NAMES[entry["dtype"]]
        shape = tuple(entry["shape"])
        start, end = entry["data_offsets"]
        if type(entry["shape"]) is not list or any(type(n) is not int for n in (*shape, start, end)):
            raise ValueError(f"{name!r} has a shape or an offset that is not a number")
        if not 0 <= start <= end <= size_bytes - begin or any(n < 0 for n in shape):
            raise ValueError(f"{name!r} lies outside of the file")
        if end - start != math.prod(shape) * item_bytes:
            raise ValueError(f"{name!r} has a size that doesn't match its shape")
        stored[name] = _Stored(dtype, shape, begin + start)
    return stored, {str(name): str(text) for name, text in metadata.items()}
