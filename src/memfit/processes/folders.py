"""Temporary folders that don't stay, not even where memfit was ended by SIGKILL: then a later run removes them.

Each holds a file that its owner keeps locked. The kernel lets go of the lock when the owner ends, however that is.
"""

import contextlib
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Iterator

_PREFIX, _OWNER = "memfit-", ".memfit-owner"


@contextlib.contextmanager
def temporary_folder(parent: str | None = None) -> Iterator[str]:
    """A folder for as long as the block lasts; what dead runs of this user left beside it is removed first."""
    parent = parent or tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent, ignore_cleanup_errors=True) as folder:
        # Locked before it has its name, so that nobody takes it for a dead run's.
        lock = _locked(os.path.join(folder, "new"), os.O_RDWR | os.O_CREAT)
        try:
            if lock is not None:
                os.write(lock, _signature(folder))
                os.rename(os.path.join(folder, "new"), os.path.join(folder, _OWNER))
                _remove_left_behind(parent)
            yield os.path.realpath(folder)
        finally:
            if lock is not None:
                os.close(lock)


def _signature(folder: str) -> bytes:
    """What the owner's file says: a copy of the folder, or one of another machine, is not the owner's."""
    return f"{platform.node()} {os.path.basename(folder)}".encode()


def _locked(path: str, flags: int) -> int | None:
    """A descriptor by which this process alone holds a file of this user; None where that can't be."""
    try:
        import fcntl

        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except (ImportError, OSError):
        return None
    try:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _remove_left_behind(parent: str) -> None:
    for entry in os.scandir(parent):
        with contextlib.suppress(OSError):
            is_ours = entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False)
            if not is_ours or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            lock = _locked(os.path.join(entry.path, _OWNER), os.O_RDWR)
            if lock is None:
                continue
            try:
                # On a network's file system the lock of another machine's process may not be seen here.
                if os.read(lock, 1024) == _signature(entry.path):
                    _remove(entry.path)
            finally:
                os.close(lock)


def _remove(folder: str) -> None:
    for current, names, _ in os.walk(folder):
        for name in names:
            # The kernel lets nobody look into the working folder of an overlay.
            if not os.path.islink(os.path.join(current, name)):
                with contextlib.suppress(OSError):
                    os.chmod(os.path.join(current, name), 0o700)
    shutil.rmtree(folder, ignore_errors=True)
