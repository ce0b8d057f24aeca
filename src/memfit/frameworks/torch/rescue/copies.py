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
import os
import tempfile
from pathlib import Path
from typing import IO, Any

import psutil
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memfit.core.errors import BadFile
from memfit.frameworks.torch import internals

# /dev/shm always is memory, and /tmp on many systems: a file there takes what the rescue wants to free.
_MEMORY_TYPES = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})


class Copy:
    """The elements of a storage, somewhere else."""

    def __init__(self) -> None:
        self._back: StorageWeakRef | None = None

    def storage(self) -> torch.UntypedStorage:
        """The elements on their own device, made again unless somebody still has them; may need memory there."""
        if self._back is not None and not self._back.expired():
            # None where the last owner let go in between.
            known: torch.UntypedStorage | None = internals.storage_of_weak_reference(self._back.cdata)
            if known is not None:
                return known
        storage = self._made_again()
        self._back = StorageWeakRef(storage)
        return storage

    def _made_again(self) -> torch.UntypedStorage:
        raise NotImplementedError


class MappedFile(Copy):
    """Elements of host memory in a mapped file in a folder."""

    def __init__(self, storage: torch.UntypedStorage, folder: Path) -> None:
        # Never has a name, so that not even a kill leaves it behind; its space is free when the mapping is gone.
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            _write(file, storage)
            path = f"/proc/self/fd/{file.fileno()}"
            self._mapping: Any = torch.UntypedStorage.from_file(path, True, storage.nbytes())

    def storage(self) -> torch.UntypedStorage:
        """The mapping."""
        mapping: torch.UntypedStorage = self._mapping
        return mapping


class ReadFile(Copy):
    """Elements of host memory in a file in a folder, which is read when they are needed."""

    def __init__(self, storage: torch.UntypedStorage, folder: Path) -> None:
        super().__init__()
        self._num_bytes = storage.nbytes()
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (open as long as the object is)
        try:
            _write(self._file, storage)
        except BaseException:
            self._file.close()
            raise

    def _made_again(self) -> torch.UntypedStorage:
        storage = torch.empty(self._num_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
        view = _bytes_of(storage)
        self._file.seek(0)
        done = 0
        while done < self._num_bytes:
            count = self._file.readinto(view[done:])
            if not count:
                raise OSError("the file of a saved activation has become shorter than what was written to it")
            done += count
        return storage

    def __del__(self) -> None:
        self._file.close()


class HostCopy(Copy):
    """Elements of a device's memory in host memory."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        super().__init__()
        self._device, num_bytes = storage.device, storage.nbytes()
        there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (num_bytes,), (1,))
        self._host: torch.Tensor | None = None
        if storage.device.type == "cuda":
            # Page-locked memory is limited on some systems; copies from and to other memory are slower, but work.
            with contextlib.suppress(RuntimeError):
                self._host = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        if self._host is None:
            self._host = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        # The copy must have been made before the memory is handed out again: not asynchronous.
        self._host.copy_(there)

    def _made_again(self) -> torch.UntypedStorage:
        assert self._host is not None
        elements = torch.empty(self._host.numel(), dtype=torch.uint8, device=self._device)
        elements.copy_(self._host, non_blocking=self._host.is_pinned())
        return elements.untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """The memory of a storage itself, not a copy."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _write(file: IO[bytes], storage: torch.UntypedStorage) -> None:
    view = _bytes_of(storage)
    done = 0
    # One call writes 2 GiB at most.
    while done < len(view):
        done += file.write(view[done:])


def choose_folder(folder: str | None = None) -> Path:
    """A folder on a real disk that can be written to: the one given, else that for temporary files, else this one."""
    candidates = [folder] if folder is not None else [tempfile.gettempdir(), os.getcwd()]
    problems = []
    for candidate in dict.fromkeys(candidates):
        path = Path(candidate).absolute()
        if not path.is_dir():
            problems.append(f"{path} is no folder")
        elif (kind := file_system(path)) in _MEMORY_TYPES:
            problems.append(f"{path} is memory ({kind})")
        else:
            try:
                with tempfile.TemporaryFile(dir=path):
                    return path
            except OSError as error:
                problems.append(f"{path} can't be written to ({error.strerror or error})")
    raise BadFile(
        f"activations can't wait on disk: {'; '.join(problems)}. "
        "Give a folder on a disk that can be written to, or set TMPDIR to one."
    )


def file_system(path: Path) -> str | None:
    """Type of the file system that holds `path`, such as "ext4"; None where the system doesn't tell."""
    real = path.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if real.is_relative_to(mount.mountpoint)]
    # Of mounts on top of each other the last one counts.
    deepest = max(reversed(mounts), key=lambda mount: len(Path(mount.mountpoint).parts), default=None)
    return None if deepest is None else deepest.fstype
