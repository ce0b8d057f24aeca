"""Arrays in a file of the safetensors format, one at a time, and plain data as JSON with arrays beside it.

A checkpoint is written when memory is short, so that one variable at a time becomes an array, and nothing is pickled:
pickle runs code from the file that it reads. The format is eight bytes with the length of a header, the header as JSON,
and the values: https://github.com/huggingface/safetensors
"""

import base64
import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from memfit.core.guarding import BadCheckpoint
from memfit.core.plain_files import open_plain

_MAX_HEADER_BYTES = 64 * 2**20
_CHUNK_BYTES = 16 * 2**20
_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_ITEM_BYTES = {"BF16": 2, "BOOL": 1} | {
    name: numpy.dtype(plain).itemsize for plain, name in _NAMES.items() if plain not in ("bfloat16", "bool")
}
# numpy has no bfloat16 of its own; the bits travel as these.
_READ_AS = {name: numpy.dtype(plain) for plain, name in _NAMES.items() if plain != "bfloat16"} | {
    "BF16": numpy.dtype("uint16")
}


@dataclass(frozen=True, slots=True)
class Entry:
    """An array to be written.

    Args:
        name: in the file.
        shape: its own.
        dtype: name of its type, as numpy or Keras says it.
        value: gives the array, when it is its turn.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    value: Callable[[], Any]


def write_arrays(path: Path, entries: Iterable[Entry]) -> None:
    """Writes arrays, each made only when it is its turn."""
    entries = list(entries)
    header: dict[str, Any] = {}
    offset = 0
    for entry in entries:
        if entry.dtype not in _NAMES:
            raise BadCheckpoint(f"{entry.name} is of type {entry.dtype}, which a checkpoint can't hold.")
        name = _NAMES[entry.dtype]
        size = math.prod(entry.shape) * _ITEM_BYTES[name]
        header[entry.name] = {"dtype": name, "shape": [*entry.shape], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for entry in entries:
            array = numpy.ascontiguousarray(entry.value())
            flat = array.reshape(-1).view(numpy.uint8)
            begin, end = header[entry.name]["data_offsets"]
            if len(flat) != end - begin:
                raise BadCheckpoint(f"{entry.name} has another size than it says: {array.dtype}{array.shape}.")
            for start in range(0, len(flat), _CHUNK_BYTES):
                file.write(flat[start : start + _CHUNK_BYTES].data)


class ArrayFile:
    """The arrays of a file, each read when it is asked for.

    Raises:
        BadCheckpoint: it is none that `write_arrays` wrote.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_plain(path) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if not 0 < length <= min(_MAX_HEADER_BYTES, size_bytes - 8):
                    raise ValueError("its header has no sensible length")
                self._header: dict[str, Any] = json.loads(file.read(length))
            for name, entry in self._header.items():
                _check(name, entry, size_bytes - 8 - length)
        except OSError as error:
            raise BadCheckpoint(f"{path} can't be read: {error.strerror or error}") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise BadCheckpoint(f"{path} is no safetensors file, or is damaged: {error}") from None
        self._begin = 8 + length

    def __contains__(self, name: str) -> bool:
        return name in self._header

    def names(self) -> list[str]:
        """Of all arrays."""
        return list(self._header)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Type, as numpy and Keras name it, and shape."""
        entry = self._header[name]
        plain = next(plain for plain, short in _NAMES.items() if short == entry["dtype"])
        return plain, tuple(entry["shape"])

    def read(self, name: str) -> Any:
        """One array; bits of bfloat16 come in numpy's extension type where it is installed, as it is with JAX."""
        entry = self._header[name]
        start, end = entry["data_offsets"]
        values = numpy.fromfile(
            self.path,
            dtype=_READ_AS[entry["dtype"]],
            count=(end - start) // _ITEM_BYTES[entry["dtype"]],
            offset=self._begin + start,
        )
        if values.nbytes != end - start:
            raise BadCheckpoint(f"{self.path} ends in the middle of {name!r}")
        if entry["dtype"] == "BF16":
            import ml_dtypes

            values = values.view(ml_dtypes.bfloat16)
        return values.reshape(entry["shape"])


def _check(name: str, entry: dict[str, Any], size_bytes: int) -> None:
    shape, (start, end) = entry["shape"], entry["data_offsets"]
    if type(shape) is not list or any(type(n) is not int or n < 0 for n in (*shape, start, end)):
        raise ValueError(f"{name!r} has a shape or a place that is no number")
    if end > size_bytes or end - start != math.prod(shape) * _ITEM_BYTES[entry["dtype"]]:
        raise ValueError(f"{name!r} lies outside of the file, or its size doesn't go with its shape")


class Plain:
    """Turns plain data into what JSON can hold, and back; arrays are collected beside it."""

    def __init__(self, arrays: dict[str, Any] | None = None) -> None:
        self.arrays: dict[str, Any] = arrays or {}

    def encode(self, value: Any, path: str) -> Any:
        """The value as JSON can hold it.

        Raises:
            TypeError: it holds something else than numbers, text, lists, dictionaries and arrays.
        """
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"__float__": repr(value)}
        if type(value) in (list, tuple):
            parts = [self.encode(part, f"{path}.{index}") for index, part in enumerate(value)]
            return parts if type(value) is list else {"__tuple__": parts}
        if type(value) is dict and all(type(key) is str and not key.startswith("__") for key in value):
            return {key: self.encode(part, f"{path}.{key}") for key, part in value.items()}
        if type(value) is bytes:
            return {"__bytes__": base64.b64encode(value).decode()}
        if isinstance(value, numpy.generic) and value.dtype.kind in "biuf":
            return {"__scalar__": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
        if type(value) is numpy.ndarray and value.dtype.name in _NAMES:
            self.arrays[path] = value
            return {"__array__": path}
        raise TypeError(f"{path} is a {type(value).__name__}")

    def decode(self, value: Any) -> Any:
        """What `encode` was given."""
        if isinstance(value, list):
            return [self.decode(part) for part in value]
        if not isinstance(value, dict):
            return value
        match value:
            case {"__float__": text}:
                return float(text)
            case {"__tuple__": parts}:
                return tuple(self.decode(part) for part in parts)
            case {"__bytes__": text}:
                return base64.b64decode(text)
            case {"__scalar__": [kind, text]}:
                return numpy.frombuffer(base64.b64decode(text), numpy.dtype(kind))[0]
            case {"__array__": path}:
                return self.arrays[path]
        return {key: self.decode(part) for key, part in value.items()}
