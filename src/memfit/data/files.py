"""Bytes of files, read where they are asked for and nowhere else.

A mapped file is read by the kernel, page by page and with as much read ahead as it thinks fit, and all of it counts as
this process's memory until somebody takes it away. So nothing is mapped here: a run of bytes is read into memory that
the caller owns (preadv), and pages that were used are given back (posix_fadvise).

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
from typing import Any, NamedTuple

from memfit.core.errors import BadFile, reason_of
from memfit.data import direct_reads

_MAX_OPEN = 64
# Linux reads at most 2 GiB - 4 KiB at once, macOS less than 2 GiB.
_MAX_READ_BYTES = 1 << 30
_PAGE_BYTES = mmap.PAGESIZE
_DROP_EVERY_BYTES = 16 << 20
_BLOCK_BYTES = 256 << 10
# Of a remote file: several requests at once.
_REMOTE_BLOCK_BYTES = 8 << 20


class ByteFile:
    """A file of which any run of bytes can be read, by several threads at once, after a fork, and as a pickled copy.

    Attributes:
        name: its path, as the user gave it; of an address, without passwords and signatures.
        size: its bytes.
    """

    name: str
    size: int

    def read_into(self, offset: int, buffer: Any) -> None:
        """Fills a writable, contiguous buffer of bytes with those from `offset` on."""
        view = memoryview(buffer)
        if view.nbytes:
            self._fill(offset, view.cast("B"))

    def _fill(self, offset: int, view: memoryview) -> None:
        raise NotImplementedError

    def drop(self, offset: int, length: int) -> None:
        """Tells that these bytes aren't read again soon."""

    def drop_now_and_then(self, num_bytes: int) -> None:
        """Tells that others have read so many bytes of it, somewhere."""

    def close(self) -> None:
        """Closes what this process has open of it; a later read opens it again."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def open_file(path: str | os.PathLike[str]) -> ByteFile:
    """The file at a path or, where it has a "://" in it, at an address."""
    name = os.fspath(path)
    if is_remote(name):
        from memfit.data.remote_files import RemoteFile

        return RemoteFile(name)
    return LocalFile(name)


def read_bytes(file: ByteFile, offset: int, length: int) -> bytes:
    """A run of bytes of a file, as far as it goes."""
    buffer = bytearray(max(0, min(length, file.size - offset)))
    file.read_into(offset, buffer)
    return bytes(buffer)


def stat_of(path: str | os.PathLike[str]) -> tuple[int, float]:
    """Size in bytes and time of the last change of a file, by which a changed one is recognised."""
    name = os.fspath(path)
    if is_remote(name):
        from memfit.data.remote_files import stat_remote

        return stat_remote(name)
    try:
        status = os.stat(os.path.expanduser(name))
    except (OSError, ValueError) as error:
        raise BadFile(f"{name!r} can't be read: {reason_of(error)}.") from error
    return status.st_size, status.st_mtime


def is_remote(name: str) -> bool:
    """Whether a path is an address of another file system, such as s3://bucket/x.npy."""
    return "://" in name


def absolute(name: str) -> str:
    """A path that means the same in workers that run in another folder; an address as it is."""
    return name if is_remote(name) else os.path.abspath(os.path.expanduser(name))


class FolderEntry(NamedTuple):
    """Something in a folder."""

    name: str
    is_folder: bool
    size: int = 0  # bytes of a file, where the folder is remote and its server says it


def list_folder(folder: str) -> list[FolderEntry]:
    """What isn't hidden in a folder, or behind the address of one, sorted by name."""
    if is_remote(folder):
        from memfit.data.remote_files import list_remote

        entries = list_remote(folder.rstrip("/"))
    else:
        try:
            with os.scandir(os.path.expanduser(folder)) as scanned:
                entries = [FolderEntry(each.name, _leads_to_folder(each)) for each in scanned]
        except OSError as error:
            raise BadFile(f"{folder!r} can't be looked into: {reason_of(error)}.") from error
    return sorted(entry for entry in entries if not entry.name.startswith("."))


def _leads_to_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:
        # A link that leads in a circle.
        return False


def is_folder(path: str) -> bool:
    """Whether there is a folder at a path or an address; False where there is nothing."""
    if is_remote(path):
        from memfit.data.remote_files import is_remote_folder

        return is_remote_folder(path)
    return os.path.isdir(os.path.expanduser(path))


def join(folder: str, name: str) -> str:
    """Path or address of something in a folder."""
    return f"{folder.rstrip('/')}/{name}" if is_remote(folder) else os.path.join(folder, name)


def drop_pages(descriptor: int, offset: int = 0, length: int = 0) -> None:
    """Has the kernel forget what it has cached of a file, all of it by default, where it can be told."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


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
    """
    names = pattern.split("/")
    if "**" not in names:
        paths = glob.glob(pattern)
    else:
        place = names.index("**")
        head, rest = "/".join(names[:place]), "/".join(names[place + 1 :])
        if place and pattern.startswith("/"):
            head = head or "/"
        folders = [each for base in glob.glob(head or os.curdir) for each in _folders_in(base, follow_links)]
        prefix = os.path.join(os.curdir, "")
        paths = [
            path if head else path.removeprefix(prefix)
            for folder in folders
            for path in matches(os.path.join(glob.escape(folder), rest or "*"), follow_links=follow_links)
        ]

    def real_folder(path: str) -> str:
        return os.path.realpath(os.path.dirname(path))

    # The way without links comes first, where there are several to one file.
    ways = sorted(paths, key=lambda path: (real_folder(path) != os.path.dirname(os.path.abspath(path)), path))
    first = {(real_folder(path), os.path.basename(path)): path for path in reversed(ways)}
    return sorted(first.values())


def _folders_in(base: str, follow_links: bool) -> Iterator[str]:
    """A folder and those in it that aren't hidden, each once."""
    seen: set[tuple[int, int]] = set()
    for folder, names, _ in os.walk(base, followlinks=follow_links):
        with contextlib.suppress(OSError):
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in seen:
                names.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
        names[:] = sorted(name for name in names if not name.startswith("."))
        yield folder


class _Descriptor:
    """An open file of this process, closed when neither the pool below nor a reader has it any more.

    A number that was closed while a thread reads from it might be another file's by then.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.number)


_tokens = itertools.count()
_opened: "OrderedDict[tuple[int, bool], _Descriptor]" = OrderedDict()
# May be entered again by the same thread: collecting garbage inside it can end the life of a LocalFile.
_lock = threading.RLock()


def _start_anew() -> None:
    """For a forked child: its parent's descriptors are closed here, and stay open there."""
    global _lock
    # Another thread of the parent may have held it.
    _lock = threading.RLock()
    _opened.clear()


os.register_at_fork(after_in_child=_start_anew)


class LocalFile(ByteFile):
    """A file of this machine."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        self._path = absolute(self.name)
        self.size = int(stat_of(self._path)[0])
        if os.path.isdir(self._path):
            raise BadFile(f"{self.name!r} is a folder, and a file is needed here.")
        self._begin()

    def _begin(self) -> None:
        self._token = next(_tokens)
        self._lacks_direct = False
        self._undropped_bytes = 0

    def _fill(self, offset: int, view: memoryview) -> None:
        if direct_reads.is_worth_it(len(view)) and self._read_direct(offset, view):
            return
        done, opened = 0, self._descriptor()
        while done < len(view):
            try:
                count = os.preadv(opened.number, [view[done : done + _MAX_READ_BYTES]], offset + done)
            except OSError as error:
                raise BadFile(f"{self.name!r} can't be read at offset {offset + done}: {reason_of(error)}.") from error
            if count == 0:
                raise BadFile(
                    f"{self.name!r} ends too early: of {len(view)} bytes at offset {offset} the last "
                    f"{len(view) - done} are missing. It had {self.size} bytes when it was opened; if it isn't "
                    "being written at this moment, copy or make it again."
                )
            done += count

    def drop(self, offset: int, length: int) -> None:
        """Gives the kernel's pages of these bytes back.

        Pages that are only partly in the run go too: the kernel itself would keep them, and as runs are read in
        scattered order these would add up to a good part of the file.
        """
        if length > 0:
            # Even where such a run is read past the cache: it may have been read in pieces, some of them short.
            start = offset // _PAGE_BYTES * _PAGE_BYTES
            stop = -(-(offset + length) // _PAGE_BYTES) * _PAGE_BYTES
            drop_pages(self._descriptor().number, start, stop - start)

    def drop_now_and_then(self, num_bytes: int) -> None:
        """Gives the pages of the whole file back, whenever others have read so much of it.

        Not just those that were read: the kernel reads ahead in pieces of up to some MiB, and a piece that is only
        partly given back stays whole. Dropped by chunks or row groups, a third to 95% of a file stayed in memory.
        """
        self._undropped_bytes += num_bytes
        if self._undropped_bytes >= _DROP_EVERY_BYTES:
            self.drop(0, self.size)
            self._undropped_bytes = 0

    def close(self) -> None:
        """Closes what this process has open of it; a later read opens it again."""
        with _lock:
            for is_direct in (False, True):
                _opened.pop((self._token, is_direct), None)

    def _descriptor(self, *, is_direct: bool = False) -> _Descriptor:
        key = (self._token, is_direct)
        with _lock:
            opened = _opened.get(key)
            if opened is None:
                number = direct_reads.open_direct(self._path) if is_direct else self._open()
                opened = _opened[key] = _Descriptor(number)
                while len(_opened) > _MAX_OPEN:
                    _opened.popitem(last=False)
            _opened.move_to_end(key)
            return opened

    def _read_direct(self, offset: int, view: memoryview) -> bool:
        if self._lacks_direct:
            return False
        try:
            opened = self._descriptor(is_direct=True)
        except OSError:
            self._lacks_direct = True
            return False
        return direct_reads.read_direct(opened.number, view, offset)

    def _open(self) -> int:
        try:
            number = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise BadFile(f"{self.name!r} can't be opened: {reason_of(error)}.") from error
        size = os.fstat(number).st_size
        if size < self.size:
            os.close(number)
            raise BadFile(
                f"{self.name!r} has become shorter: it had {self.size} bytes and now has {size}. Leave the file as "
                "it is while it is read, or start again."
            )
        if hasattr(os, "posix_fadvise") and self._lacks_direct:
            # Reads are scattered: no more than what is asked for is fetched.
            with contextlib.suppress(OSError):
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_RANDOM)
        return number

    def __getstate__(self) -> tuple[str, str, int]:
        return self.name, self._path, self.size

    def __setstate__(self, state: tuple[str, str, int]) -> None:
        self.name, self._path, self.size = state
        self._begin()

    def __del__(self) -> None:
        # Missing where the constructor raised; the pool is missing when the interpreter ends.
        if _opened is not None and hasattr(self, "_token"):
            self.close()


class BlockReader(io.RawIOBase):
    """A ByteFile as an ordinary binary file object that can seek, for libraries that want one.

    Short reads are served from the few blocks that were used last, long ones go to the file as they are. The default
    size of a block suits a file that is read from its beginning to its end.
    """

    def __init__(self, file: ByteFile, block_bytes: int | None = None, num_blocks: int = 1) -> None:
        super().__init__()
        self._file = file
        self._block_bytes = block_bytes or (_REMOTE_BLOCK_BYTES if is_remote(file.name) else _BLOCK_BYTES)
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[int, bytearray] = OrderedDict()
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

    def readinto(self, buffer: Any, /) -> int:
        """Fills the buffer as far as the file goes."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._file.size - self._position))
        if count >= self._block_bytes:
            self._read(self._position, view[:count])
        else:
            done = 0
            while done < count:
                number, inside = divmod(self._position + done, self._block_bytes)
                piece = memoryview(self._block(number))[inside : inside + count - done]
                view[done : done + len(piece)] = piece
                done += len(piece)
        self._position += count
        return count

    def close(self) -> None:
        """Lets go of the blocks."""
        self._blocks.clear()
        super().close()

    def _block(self, number: int) -> bytearray:
        block = self._blocks.pop(number, None)
        if block is None:
            if len(self._blocks) >= self._num_blocks:
                self._blocks.popitem(last=False)
            start = number * self._block_bytes
            block = bytearray(min(self._block_bytes, self._file.size - start))
            self._read(start, block)
        self._blocks[number] = block
        return block

    def _read(self, offset: int, view: Any) -> None:
        self._file.read_into(offset, view)
        self._file.drop(offset, len(view))
