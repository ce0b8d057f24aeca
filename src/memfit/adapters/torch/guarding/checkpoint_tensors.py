"""Files of tensors in the safetensors format, written and read piece by piece.

A checkpoint is written when memory is short, so a tensor on its way to or from a file is never copied as a whole: a few
megabytes at a time go through a buffer, whatever the tensor's device and layout. Nor is a file mapped, for private
mappings count against a limit on data (RLIMIT_DATA). The format is eight bytes with the length of a header, the header
as JSON, and the values, row by row: https://github.com/huggingface/safetensors
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from memfit.core.guarding import BadCheckpoint
from memfit.core.plain_files import open_plain

CHUNK_BYTES = 8 * 2**20
MAX_HEADER_BYTES = 100 * 10**6  # the format's own limit

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes dense tensors into one file; a type that the format lacks is written as bytes, in one more dimension."""
    # Wide types first: so every tensor begins at a multiple of its own element's size, as readers expect.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        tensor = tensors[name]
        size_bytes = tensor.numel() * tensor.element_size()
        is_known = tensor.dtype in _NAMES
        header[name] = {
            "dtype": _NAMES.get(tensor.dtype, "U8"),
            "shape": [*tensor.shape] if is_known else [*tensor.shape, tensor.element_size()],
            "data_offsets": [offset, offset + size_bytes],
        }
        offset += size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            for piece in _pieces(tensors[name].detach()):
                file.write(_as_bytes(piece.to("cpu").contiguous()).numpy().data)


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor is in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size_bytes: int


class TensorFile:
    """A file of tensors, from which they can be read one at a time.

    Args:
        path: the file.

    Raises:
        BadCheckpoint: it isn't one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_plain(path) as file:
                self._stored = _read_header(file, os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise BadCheckpoint(f"{path} can't be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
            raise BadCheckpoint(f"{path} is no safetensors file, or is damaged: {error}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def names(self) -> list[str]:
        """Of all tensors in the file."""
        return list(self._stored)

    def dtype(self, name: str) -> torch.dtype:
        """As the file says; bytes for a type that the format lacks."""
        return self._stored[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """As the file says; one more dimension for a type that the format lacks."""
        return self._stored[name].shape

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        """Gives a tensor of the same shape and type the values in the file; its device and layout stay.

        Raises:
            BadCheckpoint: the file ends too early.
        """
        stored = self._stored[name]
        buffer = bytearray()
        with torch.no_grad(), open_plain(self.path) as file:
            file.seek(stored.start)
            for piece in _pieces(target.detach()):
                size_bytes = piece.numel() * piece.element_size()
                if len(buffer) < size_bytes:
                    buffer = bytearray(size_bytes)
                if file.readinto(memoryview(buffer)[:size_bytes]) != size_bytes:
                    raise BadCheckpoint(f"{self.path} ends in the middle of {name!r}")
                values = torch.frombuffer(buffer, dtype=torch.uint8, count=size_bytes)
                piece.copy_(values.view(piece.dtype).view(piece.shape))


def _read_header(file: BinaryIO, size_bytes: int) -> dict[str, _Stored]:
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(MAX_HEADER_BYTES, size_bytes - 8):
        raise ValueError("its header has no sensible length")
    header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    begin = 8 + length
    stored = {}
    for name, entry in header.items():
        dtype = _DTYPES[entry["dtype"]]
        shape = tuple(entry["shape"])
        start, end = entry["data_offsets"]
        if type(entry["shape"]) is not list or any(type(n) is not int for n in (*shape, start, end)):
            raise ValueError(f"{name!r} has a shape or a place that is no number")
        if not 0 <= start <= end <= size_bytes - begin or any(n < 0 for n in shape):
            raise ValueError(f"{name!r} lies outside of the file")
        if end - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name!r} has a size that doesn't go with its shape")
        stored[name] = _Stored(dtype, shape, begin + start, end - start)
    return stored


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of a tensor that have its elements in order, each of at most CHUNK_BYTES where that is possible."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        yield from flat.split(max(1, CHUNK_BYTES // tensor.element_size()))
        return
    row_bytes = tensor.element_size() * tensor.numel() // len(tensor)
    if row_bytes > CHUNK_BYTES and tensor.dim() > 1:
        for row in tensor:
            yield from _pieces(row)
        return
    yield from tensor.split(max(1, CHUNK_BYTES // row_bytes))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Conjugated and negated views are resolved by a copy; their flags would stop the change of type. A single element
    # counts as contiguous whatever its stride, which would stop it too.
    plain = tensor.resolve_conj().resolve_neg()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
