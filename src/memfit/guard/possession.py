"""One writer to a folder at a time: among processes by a lock, and inside of one by a register.

The lock is of the kind that belongs to the process alone: workers of a loader that outlive a killed run for some
seconds must not keep the next one out. Such locks don't keep the process itself out, hence the register, by device and
inode. A forked process has what is in it from its parent, and none of that is its own.
"""

import contextlib
import errno
import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: two runs in one folder go unnoticed there
    fcntl = None  # type: ignore[assignment,unused-ignore]

_LOCK = ".lock"
# What file systems answer that can't do what was asked, though nothing is wrong.
UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EBADF, errno.EPERM}


class Possession:
    """The possession of a folder, for as long as its holder lives or until it is let go.

    The holder's `wait` finishes what it is writing, its `close` lets the folder go as well. Another holder for the same
    owner, such as an optimizer, takes over.
    """

    def __init__(self, path: Path, holder: Any, owner: object = None) -> None:
        self._path = path
        self._holder = weakref.ref(holder)
        self.owner = owner
        self._process = 0
        self._release: Callable[[], object] = bool
        self._handle: int | None = None
        self.is_locked = False  # whether no other process can have the folder now

    @property
    def is_held(self) -> bool:
        """Whether this process has taken the folder."""
        return self._process == os.getpid()

    def take(self) -> None:
        """Makes the folder and takes it; an OSError (EBUSY) where another process or guard has it."""
        self._path.mkdir(parents=True, exist_ok=True)
        if self.is_held:
            # Whoever in this process opens and closes the lock's file, as a copy of the folder does, undoes the lock.
            self._lock()
            return
        status = self._path.stat()
        key = status.st_dev, status.st_ino
        self._keep_out_others(key)
        self._handle = None
        if fcntl is not None:
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
            self._handle = os.open(self._path / _LOCK, flags, 0o644)
            try:
                self._lock()
            except OSError:
                os.close(self._handle)
                raise
        holder = self._holder()
        assert holder is not None
        self._process = os.getpid()
        _register[key] = weakref.ref(self)
        self._release = weakref.finalize(holder, _let_go, key, self._handle, os.getpid())

    def _lock(self) -> None:
        if self._handle is None:
            return
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_locked = True
        except OSError as error:
            self.is_locked = False
            if error.errno not in UNSUPPORTED:
                raise OSError(
                    errno.EBUSY, "it is in use by another run that is still alive; give each run its own folder"
                ) from None

    def let_go(self) -> None:
        """Anybody may take the folder."""
        self._release()
        self._release, self._process, self._handle, self.is_locked = bool, 0, None, False

    def _keep_out_others(self, key: tuple[int, int]) -> None:
        for _ in range(2):
            other = _living(key)
            if other is None:
                return
            possession, holder = other
            holder.wait()
            if self.owner is not None and possession.owner is self.owner:
                holder.close()
                return
            # A guard that is no longer used may be part of a cycle.
            del other, possession, holder
            gc.collect()
        if _living(key) is not None:
            raise OSError(
                errno.EBUSY,
                "it is in use by another guard of this process. Give each guard a folder of its own, such as "
                f"{str(self._path / 'first')!r} and {str(self._path / 'second')!r}, or close() the other guard before",
            )


_register: "dict[tuple[int, int], weakref.ref[Possession]]" = {}


def _living(key: tuple[int, int]) -> tuple[Possession, Any] | None:
    """Who has a folder in this process."""
    reference = _register.get(key)
    possession = None if reference is None else reference()
    holder = None if possession is None or not possession.is_held else possession._holder()
    return None if possession is None or holder is None else (possession, holder)


def _let_go(key: tuple[int, int], handle: int | None, process: int) -> None:
    if process != os.getpid():
        return
    _register.pop(key, None)
    if handle is not None:
        with contextlib.suppress(OSError):
            os.close(handle)
