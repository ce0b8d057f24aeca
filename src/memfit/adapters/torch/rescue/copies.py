"""The elements of a storage, away from the memory that ran out.

From a device they go to host memory, page-locked where that can be had. From host memory they go to a file that no
name leads to, which is mapped: the mapping is not private data, so that RLIMIT_DATA doesn't count it, and in a control
group it is page cache, which the kernel writes back when it needs the room. The mapped file is used in place of the
storage: nothing has to be copied back, so that the backward pass needs no memory for it. The file is written with
plain writes, not through the mapping: a full disk is then an error, not a bus error.

Where the address space itself is limited (RLIMIT_AS), a mapping would be counted: the file is read back instead.
"""

import contextlib
import ctypes
import functools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

# M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of mallopt(3), and the size that the library itself goes up to.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_MAPPED_BYTES, _MOST_MAPPED_BYTES = 1024**2, 32 * 1024**2


class Copy(Protocol):
    """The elements of a storage, somewhere else."""

    def storage(self) -> torch.UntypedStorage:
        """The elements on their own device; may need memory there."""


class MappedFile:
    """Elements of host memory in a mapped file.

    Args:
        storage: what to copy.
        folder: of the file.
    """

    def __init__(self, storage: torch.UntypedStorage, folder: Path) -> None:
        num_bytes = storage.nbytes()
        with _unnamed_file(folder) as (file, path):
            _write(file, storage)
            self._mapping: Any = torch.UntypedStorage.from_file(path, True, num_bytes)

    def storage(self) -> torch.UntypedStorage:
        """The mapping."""
        mapping: torch.UntypedStorage = self._mapping
        return mapping


class ReadFile:
    """Elements of host memory in a file that is read when they are needed.

    Args:
        storage: what to copy.
        folder: of the file.
    """

    def __init__(self, storage: torch.UntypedStorage, folder: Path) -> None:
        self._num_bytes = storage.nbytes()
        self._back: StorageWeakRef | None = None
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (open as long as the object is)
        try:
            _write(self._file, storage)
        except BaseException:
            self._file.close()
            raise

    def storage(self) -> torch.UntypedStorage:
        """The elements, read again unless somebody still has them."""
        known = _still_there(self._back)
        if known is not None:
            return known
        made = torch.empty(self._num_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
        view = _bytes_of(made)
        self._file.seek(0)
        done = 0
        while done < self._num_bytes:
            count = self._file.readinto(view[done:])
            if not count:
                raise OSError("the file of a saved activation has become shorter than what was written to it")
            done += count
        self._back = StorageWeakRef(made)
        return made

    def __del__(self) -> None:
        self._file.close()


class HostCopy:
    """Elements of a device's memory in host memory.

    Args:
        storage: what to copy.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._device = storage.device
        self._back: StorageWeakRef | None = None
        there = _as_bytes(storage)
        self._host = _host_bytes(storage.nbytes(), storage.device)
        # The copy must have been made before the memory is handed out again: not asynchronous.
        self._host.copy_(there)

    def storage(self) -> torch.UntypedStorage:
        """The elements, copied again unless somebody still has them."""
        known = _still_there(self._back)
        if known is not None:
            return known
        made = torch.empty(self._host.numel(), dtype=torch.uint8, device=self._device)
        made.copy_(self._host, non_blocking=self._host.is_pinned())
        self._back = StorageWeakRef(made.untyped_storage())
        return made.untyped_storage()


def _still_there(reference: StorageWeakRef | None) -> torch.UntypedStorage | None:
    if reference is None or reference.expired():
        return None
    # None where the last owner let go in between.
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return found


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return tensor.set_(storage, 0, (storage.nbytes(),), (1,))


def _host_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        # Page-locked memory is limited on some systems; copies from and to other memory are slower, but work.
        with contextlib.suppress(RuntimeError):
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """The memory of a storage itself, not a copy."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _write(file: IO[bytes], storage: torch.UntypedStorage) -> None:
    view = _bytes_of(storage)
    done = 0
    # One call writes 2 GiB at most.
    while done < len(view):
        done += file.write(view[done:])


@contextlib.contextmanager
def _unnamed_file(folder: Path) -> Iterator[tuple[IO[bytes], str]]:
    """(file, path that leads to it while it is open); its space is free again when the last mapping is gone."""
    if sys.platform.startswith("linux") and os.path.isdir("/proc/self/fd"):
        # Never has a name, so that not even a kill leaves it behind.
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            yield file, f"/proc/self/fd/{file.fileno()}"
        return
    number, path = tempfile.mkstemp(prefix="memfit-rescue-", dir=folder)
    try:
        with open(number, "wb", buffering=0) as file:
            yield file, path
    finally:
        # Windows keeps a mapped file: it stays in the folder for temporary files.
        with contextlib.suppress(OSError):
            os.unlink(path)


@functools.cache
def _c_library() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None


def map_large_blocks(wanted: bool) -> None:
    """Whether the GNU C library is to map every block of a mebibyte and more by itself, so that freed ones go at once.

    By default it raises that size, up to 32 MiB, whenever such a block is freed. Blocks below it are cut from a heap,
    which is faster, but free space in the middle of a heap stays counted as data of the process.
    """
    library = _c_library()
    if library is not None:
        size = _MAPPED_BYTES if wanted else _MOST_MAPPED_BYTES
        library.mallopt(_MMAP_THRESHOLD, size)
        library.mallopt(_TRIM_THRESHOLD, 2 * size)


def give_back() -> None:
    """Returns to the system what was freed."""
    library = _c_library()
    if library is not None:
        library.malloc_trim(0)
