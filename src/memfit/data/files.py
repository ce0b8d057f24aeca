"""Bytes of files, read where they are asked for and nowhere else.

A mapped file is read by the kernel, page by page and with as much read ahead as it thinks fit, and all of it counts as
this process's memory until somebody takes it away. So nothing is mapped here: a run of bytes is read into memory that
the caller owns (preadv), the descriptor is told that reads are scattered so that no more than that is fetched, and
pages that were used are given back (posix_fadvise). Where a system lacks these calls the reads are the same and the
hints do nothing.

Data sets may have more files than a process may have open, and forked workers must not share what their parent has
open. Descriptors therefore belong to the process, not to the file objects: a few are kept, the one unused for longest
goes first, and a fork starts with none.
"""

import contextlib
import glob
import hashlib
import io
import itertools
import mmap
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from memfit.core.errors import BadFile
from memfit.data import direct_reads

_MAX_OPEN = 64
# Linux reads at most 2 GiB - 4 KiB at once, macOS less than 2 GiB.
_MAX_READ_BYTES = 1 << 30
# The kernel answers one WILLNEED with no more than its read-ahead, by default 128 KiB.
_HINT_BYTES = 128 << 10
_PAGE_BYTES = mmap.PAGESIZE


class ByteFile(Protocol):
    """A file of which any run of bytes can be read.

    It can be pickled and read after a fork, and several threads may read at once.
    """

    @property
    def name(self) -> str:
        """Its path, as the user gave it."""

    @property
    def size(self) -> int:
        """Its bytes."""

    def read_into(self, offset: int, buffer: Any) -> None:
        """Fills a writable, contiguous buffer of bytes with those from `offset` on.

        Raises:
            BadFile: they couldn't all be read; says at which offset, and how many bytes were missing.
        """

    def will_need(self, offset: int, length: int) -> None:
        """These bytes are read soon: a hint."""

    def drop(self, offset: int, length: int) -> None:
        """These bytes aren't read again soon: a hint."""

    def close(self) -> None:
        """Closes what this process has open of it; a later read opens it again."""


def open_file(path: str | os.PathLike[str]) -> ByteFile:
    """The file at a path or, where it has a "://" in it, at an address.

    Raises:
        BadFile: there is none, or it isn't a file, or it can't be read.
    """
    name = os.fspath(path)
    if is_remote(name):
        from memfit.data.remote_files import open_remote

        return open_remote(name)
    return LocalFile(name)


def stat_of(path: str | os.PathLike[str]) -> tuple[int, float]:
    """Size in bytes and time of the last change of a file, by which a changed one is recognised.

    Raises:
        BadFile: there is no such file, or it can't be looked at.
    """
    name = os.fspath(path)
    if is_remote(name):
        from memfit.data.remote_files import stat_remote

        return stat_remote(name)
    try:
        status = os.stat(os.path.expanduser(name))
    except (OSError, ValueError) as error:
        raise BadFile(f"{name!r} can't be read: {_reason(error)}.") from error
    return status.st_size, status.st_mtime


def is_remote(name: str) -> bool:
    """Whether a path is an address of another file system, such as s3://bucket/x.npy."""
    return "://" in name


def fingerprint_of(paths: Iterable[str], *parts: object) -> str:
    """Changes with the names, sizes and times of change of files, and with whatever else is given."""
    digest = hashlib.sha256()
    for path in paths:
        # Without the folder, as data may be moved between two runs, and without the signature of an address.
        base = re.sub(r"\?.*", "", path) if is_remote(path) else path
        base = base.replace(os.sep, "/").rstrip("/").rpartition("/")[2]
        digest.update(repr((base, *stat_of(path))).encode())
    digest.update(repr(parts).encode())
    return digest.hexdigest()[:32]


def matches(pattern: str, *, follow_links: bool = False) -> list[str]:
    """Paths that match a pattern of local files, each file once, whichever way leads to it.

    As by `glob`, except that "**" does not go through links to folders: one that leads upwards would make endless
    paths, and one to "/" would make the whole file system match.

    Args:
        pattern: in which "*", "?" and "[...]" stand for parts of a name, and "**" for any folders.
        follow_links: whether "**" goes through links to folders, into each folder once.
    """
    head, star, rest = _at_double_star(pattern)
    if not star:
        found = glob.glob(pattern)
    else:
        folders = [each for base in glob.glob(head or os.curdir) for each in _folders_in(base, follow_links)]
        prefix = os.path.join(os.curdir, "")
        found = [
            path if head else path.removeprefix(prefix)
            for folder in folders
            for path in matches(os.path.join(glob.escape(folder), rest or "*"), follow_links=follow_links)
        ]
    # The way without links comes first, where there are several to one file.
    ways = sorted(found, key=lambda path: (os.path.realpath(os.path.dirname(path)) != _folder_of(path), path))
    first = {(os.path.realpath(os.path.dirname(path)), os.path.basename(path)): path for path in reversed(ways)}
    return sorted(first.values())


def _folder_of(path: str) -> str:
    return os.path.dirname(os.path.abspath(path))


def _at_double_star(pattern: str) -> tuple[str, bool, str]:
    """What stands before and behind the first "**" of a pattern, and whether there is one."""
    parts = re.split(r"[/\\]" if os.sep != "/" else "/", pattern)
    if "**" not in parts:
        return pattern, False, ""
    place = parts.index("**")
    head = "/".join(parts[:place])
    return (head or "/") if place and pattern.startswith(("/", "\\")) else head, True, "/".join(parts[place + 1 :])


def _folders_in(base: str, follow_links: bool) -> Iterator[str]:
    """A folder and those in it that aren't hidden, each once."""
    seen: set[tuple[int, int]] = set()
    for folder, names, _ in os.walk(base, followlinks=follow_links):
        with contextlib.suppress(OSError):
            status = os.stat(folder)
            if status.st_ino and (status.st_dev, status.st_ino) in seen:
                names.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
        names[:] = sorted(name for name in names if not name.startswith("."))
        yield folder


class LocalFile:
    """A file of this machine.

    Args:
        path: where it is.

    Raises:
        BadFile: there is none, or it isn't a file.
    """

    _lacks_direct: bool
    """Whether it can be read past the kernel's cache; None as long as nobody has tried."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._name = os.fspath(path)
        # Workers may run in another folder than the one in which a relative path was given.
        self._path = os.path.abspath(os.path.expanduser(self._name))
        self._size = int(stat_of(self._path)[0])
        if os.path.isdir(self._path):
            raise BadFile(f"{self._name!r} is a folder, and a file is needed here.")
        self._begin()

    @property
    def name(self) -> str:
        """Its path, as the user gave it."""
        return self._name

    @property
    def size(self) -> int:
        """Its bytes."""
        return self._size

    def read_into(self, offset: int, buffer: Any) -> None:
        """Fills a writable, contiguous buffer of bytes with those from `offset` on.

        Raises:
            BadFile: they couldn't all be read; says at which offset, and how many bytes were missing.
        """
        view = memoryview(buffer)
        if view.nbytes == 0:
            return
        view = view.cast("B")
        if direct_reads.is_worth_it(len(view)) and self._read_direct(offset, view):
            return
        done = 0
        with self._descriptor() as descriptor:
            while done < len(view):
                piece = view[done : done + _MAX_READ_BYTES]
                try:
                    count = _read(descriptor, piece, offset + done)
                except OSError as error:
                    raise BadFile(
                        f"{self._name!r} can't be read at offset {offset + done}: {_reason(error)}."
                    ) from error
                if count == 0:
                    raise BadFile(
                        f"{self._name!r} ends too early: of {len(view)} bytes at offset {offset} the last "
                        f"{len(view) - done} are missing. It had {self._size} bytes when it was opened; if it isn't "
                        "being written at this moment, copy or make it again."
                    )
                done += count

    def will_need(self, offset: int, length: int) -> None:
        """Has the kernel fetch these bytes without waiting for them."""
        if not hasattr(os, "posix_fadvise") or self._is_past_cache(length):
            return
        stop = min(offset + length, self._size)
        with self._descriptor() as descriptor, contextlib.suppress(OSError):
            for start in range(offset, stop, _HINT_BYTES):
                os.posix_fadvise(descriptor, start, min(_HINT_BYTES, stop - start), os.POSIX_FADV_WILLNEED)

    def drop(self, offset: int, length: int) -> None:
        """Gives the kernel's pages of these bytes back.

        Pages that are only partly in the run go too: the kernel itself would keep them, and as runs are read in
        scattered order these would add up to a good part of the file.
        """
        if not hasattr(os, "posix_fadvise") or length <= 0:
            return
        # Even where such a run is read past the cache: it may have been read in pieces, some of them short.
        start = offset // _PAGE_BYTES * _PAGE_BYTES
        stop = -(-(offset + length) // _PAGE_BYTES) * _PAGE_BYTES
        with self._descriptor() as descriptor, contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Closes what this process has open of it; a later read opens it again."""
        for token in self._tokens:
            _descriptors.discard(token)

    @contextlib.contextmanager
    def _descriptor(self, *, direct: bool = False) -> Iterator[int]:
        opened = _descriptors.take(self._tokens[direct], self._open_direct if direct else self._open)
        try:
            yield opened.number
        finally:
            _descriptors.give_back(opened)

    def _read_direct(self, offset: int, view: memoryview) -> bool:
        if self._lacks_direct:
            return False
        try:
            with self._descriptor(direct=True) as descriptor:
                return direct_reads.read_direct(descriptor, view, offset)
        except _NoDirectReads:
            self._lacks_direct = True
            return False

    def _is_past_cache(self, length: int) -> bool:
        """Whether reads of so many bytes leave nothing in the kernel's cache."""
        return not self._lacks_direct and direct_reads.is_worth_it(length)

    def _open_direct(self) -> int:
        number = direct_reads.open_direct(self._path)
        if number is None:
            raise _NoDirectReads
        return number

    def _open(self) -> int:
        try:
            number = os.open(self._path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise BadFile(f"{self._name!r} can't be opened: {_reason(error)}.") from error
        size = os.fstat(number).st_size
        if size < self._size:
            os.close(number)
            raise BadFile(
                f"{self._name!r} has become shorter: it had {self._size} bytes and now has {size}. Leave the file as "
                "it is while it is read, or start again."
            )
        if hasattr(os, "posix_fadvise") and self._lacks_direct:
            with contextlib.suppress(OSError):
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_RANDOM)
        return number

    def __getstate__(self) -> tuple[str, str, int]:
        return self._name, self._path, self._size

    def __setstate__(self, state: tuple[str, str, int]) -> None:
        self._name, self._path, self._size = state
        self._begin()

    def _begin(self) -> None:
        self._tokens = next(_tokens), next(_tokens)
        self._lacks_direct = False

    def __del__(self) -> None:
        # Missing where the constructor raised; the pool is missing when the interpreter ends.
        if _descriptors is not None:
            for token in getattr(self, "_tokens", ()):
                _descriptors.discard(token)

    def __repr__(self) -> str:
        return f"LocalFile({self._name!r})"


class _NoDirectReads(Exception):
    """The file system has no reads past the cache."""


class SeekableReader(io.RawIOBase):
    """A ByteFile as an ordinary binary file object; subclasses say how it is read, from `_position` on.

    Args:
        file: what to read.
    """

    def __init__(self, file: ByteFile) -> None:
        super().__init__()
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Offset of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Goes to an offset, counted from the beginning, the present one or the end."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size}[whence]
        if base + offset < 0:
            raise OSError(f"offset {base + offset} is before the beginning of {self._file.name!r}")
        self._position = base + offset
        return self._position


class SequentialReader(SeekableReader):
    """A ByteFile from its beginning to its end, as an ordinary binary file object that can also seek.

    Args:
        file: what to read.
        block_bytes: how much is read at once; the pages of a block are given back when the next one is read.
    """

    def __init__(self, file: ByteFile, block_bytes: int = 256 << 10) -> None:
        super().__init__(file)
        self._block_bytes = block_bytes
        self._block = bytearray()
        self._block_start = 0

    def readinto(self, buffer: Any, /) -> int:
        """Reads at least one byte, at most the rest of a block; 0 at the end."""
        view = memoryview(buffer).cast("B")
        if not len(view) or self._position >= self._file.size:
            return 0
        if not self._block_start <= self._position < self._block_start + len(self._block):
            self._file.drop(self._block_start, len(self._block))
            self._block = bytearray(min(self._block_bytes, self._file.size - self._position))
            self._block_start = self._position
            self._file.read_into(self._position, self._block)
        inside = self._position - self._block_start
        count = min(len(view), len(self._block) - inside)
        view[:count] = memoryview(self._block)[inside : inside + count]
        self._position += count
        return count


class _Opened:
    """A descriptor of this process and how many readers use it now."""

    __slots__ = ("is_unwanted", "num_users", "number", "token")

    def __init__(self, token: int, number: int) -> None:
        self.token = token
        self.number = number
        self.num_users = 0
        self.is_unwanted = False


class _Descriptors:
    """Open files of this process, at most `max_open` that nobody reads at the moment."""

    def __init__(self, max_open: int = _MAX_OPEN) -> None:
        self._max_open = max_open
        # May be entered again by the same thread: collecting garbage inside it can end the life of a LocalFile.
        self._lock = threading.RLock()
        self._opened: OrderedDict[int, _Opened] = OrderedDict()

    def take(self, token: int, open_it: Callable[[], int]) -> _Opened:
        with self._lock:
            opened = self._opened.get(token)
            if opened is None:
                opened = self._opened[token] = _Opened(token, open_it())
                self._trim()
            else:
                self._opened.move_to_end(token)
            opened.num_users += 1
            return opened

    def give_back(self, opened: _Opened) -> None:
        with self._lock:
            opened.num_users -= 1
            if opened.is_unwanted and not opened.num_users:
                os.close(opened.number)

    def discard(self, token: int) -> None:
        with self._lock:
            opened = self._opened.pop(token, None)
            if opened is not None:
                self._let_go(opened)

    def start_anew(self) -> None:
        """For a forked child: its parent's descriptors are closed here; they stay open there."""
        opened, self._opened = self._opened, OrderedDict()
        # Another thread of the parent may have held it.
        self._lock = threading.RLock()
        for entry in opened.values():
            with contextlib.suppress(OSError):
                os.close(entry.number)

    def _trim(self) -> None:
        for token in list(itertools.islice(self._opened, max(0, len(self._opened) - self._max_open))):
            if not self._opened[token].num_users:
                self._let_go(self._opened.pop(token))

    @staticmethod
    def _let_go(opened: _Opened) -> None:
        # A number that is closed while a thread reads from it may be another file's by then.
        if opened.num_users:
            opened.is_unwanted = True
        else:
            os.close(opened.number)


_tokens = itertools.count()
_descriptors = _Descriptors()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_descriptors.start_anew)
_seek_lock = threading.Lock()


def _read(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Bytes read into the buffer, which may be fewer than it holds; 0 at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], offset)
    if hasattr(os, "pread"):
        found = os.pread(descriptor, len(buffer), offset)
        buffer[: len(found)] = found
        return len(found)
    # Windows has one position a descriptor, which all threads share.
    with _seek_lock:
        os.lseek(descriptor, offset, os.SEEK_SET)
        with io.FileIO(descriptor, closefd=False) as file:
            return file.readinto(buffer) or 0


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
