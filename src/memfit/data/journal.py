"""How far an unfinished file has come, so that a killed conversion goes on instead of beginning again.

The unfinished file lies hidden beside its destination, and beside it a journal that names the source, the options and
the number of samples that are safely on disk. The journal is replaced as a whole, and only after the samples that it
speaks of were forced to disk: whatever it says is true, whenever the process was killed. A lock, which the system
releases when its holder dies, keeps a second process from writing to the same place.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memfit.core.errors import BadFile

_POLL_SECONDS = 0.2
# From linux/fcntl.h and linux/fs.h.
_WORKING_FOLDER, _EXCHANGE = -100, 2


class Journal:
    """The unfinished file of one destination and what is known of it."""

    def __init__(self, destination: Path) -> None:
        self.destination = destination
        self.part, self.path, self._lock, self._aside = (
            destination.with_name(f".{destination.name}.memfit-{ending}")
            for ending in ("part", "part.json", "lock", "old")
        )

    def read(self) -> dict[str, Any] | None:
        """What was written last; None where there is nothing that can be used."""
        try:
            data = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return None
        return data if isinstance(data, dict) else None

    def write(self, data: dict[str, Any]) -> None:
        """Replaces what was written; the data that it speaks of must be on disk by now."""
        write_whole(self.path, json.dumps(data).encode())

    def discard(self) -> None:
        """Removes the unfinished file and the journal."""
        # A kill while the journal was replaced leaves the new one under its temporary name.
        for path in (self.path, _temporary(self.path), self.part):
            remove(path)

    def finish(self) -> None:
        """Puts the finished file, which must be on disk, in its place."""
        remove(self._aside)
        if self.destination.is_dir() and not self.destination.is_symlink():
            # A folder can't be replaced by another in one step, but change places with it on most file systems.
            self.part.rename(self._aside)
            if not _exchange(self._aside, self.destination):
                self._aside.rename(self.part)
                self.destination.rename(self._aside)
                os.replace(self.part, self.destination)
        else:
            os.replace(self.part, self.destination)
        sync_folder(self.destination.parent)
        remove(self._aside)
        self.discard()

    def recover(self) -> None:
        """Puts back a folder that a process set aside, to replace it, and was killed before it could."""
        if os.path.isdir(self._aside) and not os.path.lexists(self.destination):
            with self.locked(wait=False):
                if os.path.isdir(self._aside) and not os.path.lexists(self.destination):
                    self._aside.rename(self.destination)

    @contextmanager
    def locked(self, *, wait: bool) -> Iterator[None]:
        """Nobody else writes to this destination meanwhile."""
        descriptor = self._acquire(wait)
        try:
            yield
        finally:
            # Removed while it is still held: whoever waits for it finds that it is gone, and makes its own.
            remove(self._lock)
            os.close(descriptor)

    def _acquire(self, wait: bool) -> int:
        while True:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                if not wait:
                    raise BadFile(
                        f"another process is writing {str(self.destination)!r} now. Wait until it is done, or name "
                        "another destination."
                    ) from None
                time.sleep(_POLL_SECONDS)
                continue
            except OSError:
                # Some network file systems have no locks.
                return descriptor
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(self._lock), os.fstat(descriptor)):
                    return descriptor
            os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Writes a small file so that it is there entirely or not at all, also after a loss of power."""
    temporary = _temporary(path)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        remove(temporary)
        raise
    sync_folder(path.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Whether two folders could change places, at once; not every system and file system can."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and not rename(
        _WORKING_FOLDER, os.fsencode(one), _WORKING_FOLDER, os.fsencode(other), ctypes.c_uint(_EXCHANGE)
    )


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")


def sync_folder(path: Path) -> None:
    """Forces the names in a folder to disk, where the system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Removes a file or a folder; nothing happens where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()
