"""Bytes of a file of text, plain or packed by gzip, at offsets of the unpacked text.

What is packed can only be unpacked from its beginning. So a packed file remembers where it stands: reading on costs
what the bytes cost, and going back starts again at the first byte.
"""

import gzip
import io
import os
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from memfit.core.errors import BadFile
from memfit.data.files import ByteFile, SequentialReader, is_remote, open_file
from memfit.data.source import Array

_GZIP_MAGIC = b"\x1f\x8b"


class PlainBytes:
    """A file as it is stored.

    Args:
        file: to read.
        path: where it is, or its address, which may have secrets in it that its name hasn't.
    """

    is_packed = False

    def __init__(self, file: ByteFile, path: str) -> None:
        self._file = file
        self.path = path

    @property
    def name(self) -> str:
        """Its path, as the user gave it."""
        return self._file.name

    def chunks(self, size: int) -> Iterator[bytes]:
        """The whole file, `size` bytes at a time."""
        for start in range(0, self._file.size, size):
            length = min(size, self._file.size - start)
            self._file.will_need(start + length, size)
            found = bytearray(length)
            self._file.read_into(start, found)
            self._file.drop(start, length)
            yield bytes(found)

    def read(self, start: int, stop: int) -> Array:
        """Bytes `start` to `stop`."""
        found = np.empty(stop - start, np.uint8)
        self._file.read_into(start, found)
        return found

    def drop(self, start: int, stop: int) -> None:
        """These bytes aren't read again soon: a hint."""
        self._file.drop(start, stop - start)

    def close(self) -> None:
        """Closes what this process has open of it; a later read opens it again."""
        self._file.close()


class PackedBytes:
    """A file packed by gzip, unpacked on the way.

    Args:
        file: to read.
        path: where it is, or its address, which may have secrets in it that its name hasn't.
    """

    is_packed = True

    def __init__(self, file: ByteFile, path: str) -> None:
        self._file = file
        self.path = path
        self._start_anew()

    def _start_anew(self) -> None:
        self._lock = threading.Lock()
        self._unpacked: gzip.GzipFile | None = None
        self._process = os.getpid()

    @property
    def name(self) -> str:
        """Its path, as the user gave it."""
        return self._file.name

    def chunks(self, size: int) -> Iterator[bytes]:
        """The whole text, `size` bytes at a time."""
        unpacked = self._open()
        while found := self._take(unpacked, size):
            yield found

    def read(self, start: int, stop: int) -> Array:
        """Bytes `start` to `stop` of the text."""
        if self._process != os.getpid():
            # The parent's lock may have been held by another thread when this process was forked.
            self._start_anew()
        with self._lock:
            unpacked = self._unpacked = self._unpacked or self._open()
            try:
                unpacked.seek(start)
            except (OSError, EOFError, zlib.error) as error:
                raise self._damaged(error) from error
            found = self._take(unpacked, stop - start)
        if len(found) < stop - start:
            raise BadFile(f"{self.name!r} ends too early: it has become shorter since it was opened.")
        return np.frombuffer(found, np.uint8)

    def drop(self, start: int, stop: int) -> None:
        """Does nothing: pages are given back as reading goes on."""

    def close(self) -> None:
        """Closes what this process has open of it; a later read opens it again."""
        if self._process == os.getpid():
            with self._lock:
                self._unpacked = None
        self._file.close()

    def _open(self) -> gzip.GzipFile:
        return gzip.GzipFile(fileobj=io.BufferedReader(SequentialReader(self._file)), mode="rb")

    def _take(self, unpacked: gzip.GzipFile, size: int) -> bytes:
        try:
            return unpacked.read(size)
        except (OSError, EOFError, zlib.error) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> BadFile:
        return BadFile(
            f"{self.name!r} can't be unpacked: {str(error).rstrip('.')}. It is truncated or damaged; copy or make it "
            "again."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"_file": self._file, "path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._file, self.path = state["_file"], state["path"]
        self._start_anew()


def open_bytes(path: str | os.PathLike[str]) -> PlainBytes | PackedBytes:
    """The bytes of a file; whether they are packed is told by the first two, whatever its name.

    Raises:
        BadFile: it can't be read.
    """
    file = open_file(path)
    name = os.fspath(path)
    # Workers may run in another folder than the one in which a relative path was given.
    place = name if is_remote(name) else os.path.abspath(os.path.expanduser(name))
    magic = bytearray(min(2, file.size))
    file.read_into(0, magic)
    return PackedBytes(file, place) if magic == _GZIP_MAGIC else PlainBytes(file, place)
