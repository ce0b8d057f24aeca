"""Reading files that others may have put in the place of one's own.

A FIFO under the name of a file would be waited for without end, a device may do anything when it is opened, and a
symbolic link leads out of the folder that was asked for. What was written as a plain file is read only as one.
"""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

_FLAGS = os.O_RDONLY
for _name in ("O_BINARY", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY"):
    _FLAGS |= getattr(os, _name, 0)
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}


class NotPlain(OSError):
    """There is something else under the name of a file; `strerror` says what."""

    def __init__(self, mode: int) -> None:
        kind = _KINDS.get(stat.S_IFMT(mode), "no plain file")
        super().__init__(errno.EINVAL, f"it is {kind}, and a plain file was expected")


def plain_size(path: Path) -> int:
    """The size of a plain file in bytes.

    Raises:
        NotPlain: it is something else.
        OSError: it can't be looked at, or there is nothing.
    """
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise NotPlain(status.st_mode)
    return status.st_size


def open_plain(path: Path) -> BufferedReader:
    """Opens a plain file for reading, and never waits for that; raises what `plain_size` does."""
    plain_size(path)
    try:
        handle = os.open(path, _FLAGS)
    except OSError as error:
        # A link that has come into its place in the meantime.
        raise NotPlain(stat.S_IFLNK) if error.errno == errno.ELOOP else error from None
    file = os.fdopen(handle, "rb")
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        raise NotPlain(mode)
    return file


def read_plain(path: Path, most_bytes: int | None = None) -> bytes:
    """What is in a plain file, or the first `most_bytes` of it; raises what `plain_size` does."""
    with open_plain(path) as file:
        return file.read() if most_bytes is None else file.read(most_bytes)
