"""Files behind an address, such as s3://bucket/x.npy: read by ranges of bytes, through fsspec.

A remote read is slow to begin and may fail for a moment. So runs that are announced are fetched ahead by a few threads,
within a limit of bytes for the whole process; a failed read is tried again a few times; and what can't be mended (no
such bucket, no right to read, no network) is said in one sentence, without the secrets that an address or an error may
hold. Nothing else is kept: fsspec's own caches grow with what is read, and are not used.
"""

import contextlib
import io
import itertools
import os
import random
import re
import threading
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from memfit.core.errors import BadFile, MissingDependency
from memfit.data.files import SeekableReader

# Requests to one server at a time, and bytes that may wait to be read or are on their way.
_NUM_REQUESTS = 4
_AHEAD_BYTES = 8 << 20
_MAX_ANNOUNCED = 256
# A long read is made of several requests at once, each of which takes its bytes once more while it is under way.
_PIECE_BYTES = 2 << 20
_NUM_TRIES = 4
_FIRST_PAUSE_SECONDS = 0.2
# Small reads of `as_file` come from the blocks used last: headers, indexes, the tree of an HDF5 file.
_BLOCK_BYTES = 256 << 10
_NUM_BLOCKS = 8

_PACKAGE_OF = {"s3": "s3fs", "s3a": "s3fs"}
_MAX_REASON = 200


@dataclass(frozen=True, slots=True)
class Entry:
    """Something in a remote folder.

    Attributes:
        path: its address.
        is_folder: whether it holds others.
        size: bytes of a file; None where the server doesn't say.
    """

    path: str
    is_folder: bool
    size: int | None


def open_remote(path: str) -> "RemoteFile":
    """The file at an address.

    Raises:
        BadFile: there is none, or it can't be read; says which of both, and why.
        MissingDependency: fsspec, or what it needs for such addresses, isn't installed.
    """
    return RemoteFile(path)


def stat_remote(path: str) -> tuple[int, float]:
    """Size in bytes, and a number that changes with the contents: of the ETag, or the time of the last change."""
    info = _call(path, lambda system, inside: system.info(inside))
    if info.get("type") == "directory":
        raise BadFile(f"{shown(path)!r} is a folder, and a file is needed here.")
    size = info.get("size")
    if size is None:
        raise BadFile(f"{shown(path)!r} can't be read in parts: its server doesn't say how large it is. Download it.")
    return int(size), _mark_of(info)


def as_file(path: str) -> io.RawIOBase:
    """A binary file object that can seek, for libraries that want one; it keeps at most 2 MiB."""
    return RemoteReader(open_remote(path))


def is_folder(path: str) -> bool:
    """Whether there is a folder at an address; False where there is nothing."""
    return bool(_call(path, lambda system, inside: system.isdir(inside)))


def list_folder(path: str) -> list[Entry]:
    """What is directly in a folder, sorted by address.

    Raises:
        BadFile: there is no such folder, or it can't be looked into.
    """

    def listed(system: Any, inside: str) -> list[Entry]:
        prefix = _prefix(system, path, inside)
        # Where folders are no more than a part of names, one may be listed in itself.
        found = [info for info in system.ls(inside, detail=True) if _plain(info["name"]) != _plain(inside)]
        system.invalidate_cache()
        return [_entry(prefix, info) for info in found]

    return sorted(_call(path, listed), key=lambda entry: entry.path)


def glob_remote(pattern: str) -> list[str]:
    """Addresses of the files that a pattern with *, ? or ** stands for, sorted; none where nothing fits."""

    def found(system: Any, inside: str) -> list[str]:
        fixed = re.split(r"[*?\[]", inside, maxsplit=1)[0]
        prefix = _prefix(system, pattern[: len(pattern) - (len(inside) - len(fixed))], fixed)
        names = system.glob(inside, detail=True)
        system.invalidate_cache()
        return [prefix + name for name, info in names.items() if info.get("type") != "directory"]

    return sorted(_call(pattern, found))


class RemoteFile:
    """A file behind an address, of which any run of bytes can be read.

    It can be pickled and read after a fork, and several threads may read at once.

    Args:
        path: its address, with a "://" in it.

    Raises:
        BadFile: there is none, or it can't be read.
        MissingDependency: fsspec, or what it needs for such addresses, isn't installed.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._size, self._mark = stat_remote(path)
        self._token = next(_tokens)

    @property
    def name(self) -> str:
        """Its address, without passwords and signatures."""
        return shown(self._path)

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
        missing = offset + len(view) - self._size
        if missing > 0:
            raise BadFile(
                f"{self.name!r} ends too early: of {len(view)} bytes at offset {offset} the last "
                f"{min(missing, len(view))} are missing. It has {self._size} bytes; copy or make it again."
            )
        if _fetcher.take(self, offset, view):
            return
        starts = range(0, len(view), _PIECE_BYTES)
        if len(starts) == 1:
            view[:] = self.fetch(offset, len(view))
            return

        def fill(start: int) -> None:
            piece = view[start : start + _PIECE_BYTES]
            piece[:] = self.fetch(offset + start, len(piece))

        _fetcher.all_at_once(fill, starts)

    def will_need(self, offset: int, length: int) -> None:
        """Fetches these bytes ahead, when there is room."""
        length = min(length, self._size - offset)
        if 0 < length <= _AHEAD_BYTES // 2:
            _fetcher.announce(self, offset, length)

    def drop(self, offset: int, length: int) -> None:
        """Forgets what was fetched of these bytes and not read."""
        _fetcher.forget(self._token, offset, length)

    def close(self) -> None:
        """Forgets what was fetched and not read; the threads end where no other file needs them."""
        _fetcher.forget(self._token, 0, self._size)
        _fetcher.rest()

    @property
    def token(self) -> int:
        """A number that no other file of this process has."""
        return self._token

    def fetch(self, offset: int, length: int) -> bytes:
        """Bytes of one request; used by the threads that read ahead."""
        data: bytes = _call(self._path, lambda system, inside: _cat(system, inside, offset, length))
        if len(data) != length:
            _, mark = stat_remote(self._path)
            changed = "It was changed meanwhile." if mark != self._mark else "Its server may not give parts of files."
            raise BadFile(
                f"{self.name!r} gave {len(data)} bytes at offset {offset}, and {length} were asked for. {changed}"
            )
        return data

    def __getstate__(self) -> tuple[str, int, float]:
        return self._path, self._size, self._mark

    def __setstate__(self, state: tuple[str, int, float]) -> None:
        self._path, self._size, self._mark = state
        self._token = next(_tokens)

    def __del__(self) -> None:
        # Both are missing when the constructor raised or the interpreter ends.
        if getattr(self, "_token", None) is not None and _fetcher is not None:
            self.close()

    def __repr__(self) -> str:
        return f"RemoteFile({self.name!r})"


class RemoteReader(SeekableReader):
    """A remote file as an ordinary binary file object.

    Short reads are served from a few blocks that are kept, long ones go to the server as they are.

    Args:
        file: to read.
    """

    def __init__(self, file: RemoteFile) -> None:
        super().__init__(file)
        self._blocks: OrderedDict[int, bytearray] = OrderedDict()

    @property
    def name(self) -> str:
        """Its address."""
        return self._file.name

    def readinto(self, buffer: Any, /) -> int:
        """Fills the buffer as far as the file goes."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._file.size - self._position))
        if count >= _BLOCK_BYTES:
            self._file.read_into(self._position, view[:count])
        else:
            done = 0
            while done < count:
                number, inside = divmod(self._position + done, _BLOCK_BYTES)
                piece = memoryview(self._block(number))[inside : inside + count - done]
                view[done : done + len(piece)] = piece
                done += len(piece)
        self._position += count
        return count

    def _block(self, number: int) -> bytearray:
        block = self._blocks.get(number)
        if block is None:
            start = number * _BLOCK_BYTES
            block = bytearray(min(_BLOCK_BYTES, self._file.size - start))
            self._file.read_into(start, block)
            self._blocks[number] = block
            if len(self._blocks) > _NUM_BLOCKS:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end(number)
        return block

    def close(self) -> None:
        """Lets go of the blocks."""
        self._blocks.clear()
        super().close()


_Run = tuple[int, int, int]
"""Token of a file, offset and length."""


class _Fetcher:
    """Runs of bytes that were announced, fetched ahead by a few threads; one for each process."""

    def __init__(self) -> None:
        # May be entered again by the same thread: collecting garbage inside it can end the life of a RemoteFile.
        self._lock = threading.RLock()
        self._pool: ThreadPoolExecutor | None = None
        self._announced: deque[tuple[_Run, RemoteFile]] = deque(maxlen=_MAX_ANNOUNCED)
        self._fetched: OrderedDict[_Run, Future[bytes]] = OrderedDict()
        self._num_bytes = 0

    def announce(self, file: RemoteFile, offset: int, length: int) -> None:
        with self._lock:
            run = (file.token, offset, length)
            if run not in self._fetched:
                self._announced.append((run, file))
            self._fill()

    def take(self, file: RemoteFile, offset: int, view: memoryview) -> bool:
        """Copies a run that was fetched ahead; False where it wasn't."""
        run = self._holding(file.token, offset, len(view))
        if run is None:
            return False
        with self._lock:
            future = self._fetched.get(run)
        if future is None:
            return False
        start = offset - run[1]
        try:
            view[:] = memoryview(future.result())[start : start + len(view)]
        except CancelledError:
            return False
        finally:
            # Two fields of a sample may lie in one run: it goes when its last byte was read.
            if start + len(view) == run[2]:
                self.forget(*run)
        return True

    def forget(self, token: int, offset: int, length: int) -> None:
        with self._lock:
            kept = [entry for entry in self._announced if not _overlaps(entry[0], token, offset, length)]
            if len(kept) < len(self._announced):
                self._announced = deque(kept, maxlen=_MAX_ANNOUNCED)
            for run in [run for run in self._fetched if _overlaps(run, token, offset, length)]:
                self._evict(run)
            self._fill()

    def rest(self) -> None:
        """Ends the threads, unless there is something to fetch; the next announcement starts them again."""
        with self._lock:
            if self._pool is not None and not self._fetched and not self._announced:
                self._pool.shutdown(wait=False)
                self._pool = None

    def all_at_once(self, action: Callable[[int], None], items: range) -> None:
        """Calls `action` with each item, several at a time."""
        with self._lock:
            waiting = [self._started().submit(action, item) for item in items]
        try:
            for future in waiting:
                future.result()
        finally:
            # The buffer is the caller's again once this returns: nothing may still write to it.
            for future in waiting:
                if not future.cancel():
                    with contextlib.suppress(BaseException):
                        future.result()

    def start_anew(self) -> None:
        """For a forked child, which has its parent's memory but none of its threads."""
        self.__init__()  # type: ignore[misc]

    def _holding(self, token: int, offset: int, length: int) -> _Run | None:
        with self._lock:
            for run in self._fetched:
                if run[0] == token and run[1] <= offset and offset + length <= run[1] + run[2]:
                    return run
            if any(_overlaps(entry[0], token, offset, length) for entry in self._announced):
                # It waits for room behind runs that nobody has come for.
                self._announced = deque(
                    (entry for entry in self._announced if not _overlaps(entry[0], token, offset, length)),
                    maxlen=_MAX_ANNOUNCED,
                )
                if self._fetched:
                    self._evict(next(iter(self._fetched)))
            return None

    def _fill(self) -> None:
        while self._announced and self._num_bytes + self._announced[0][0][2] <= _AHEAD_BYTES:
            run, file = self._announced.popleft()
            if run not in self._fetched:
                self._fetched[run] = self._started().submit(file.fetch, *run[1:])
                self._num_bytes += run[2]

    def _evict(self, run: _Run) -> None:
        self._fetched.pop(run).cancel()
        self._num_bytes -= run[2]

    def _started(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_NUM_REQUESTS, thread_name_prefix="memfit-remote")
        return self._pool


def _overlaps(run: _Run, token: int, offset: int, length: int) -> bool:
    return run[0] == token and run[1] < offset + length and offset < run[1] + run[2]


_tokens = itertools.count()
_fetcher = _Fetcher()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fetcher.start_anew)


# What goes wrong, in words.


def shown(path: str) -> str:
    """An address as it may be shown to anybody: without passwords and signatures.

    >>> shown("ftp://ada:secret@host/x.npy")
    'ftp://ada:***@host/x.npy'
    >>> shown("https://host/x.npy?X-Amz-Signature=abc")
    'https://host/x.npy?...'
    """
    path = re.sub(r"(://[^/@:\s]*):[^/@\s]*@", r"\1:***@", path)
    return re.sub(r"(https?://[^\s?]*)\?\S*", r"\1?...", path)


def _system(path: str) -> tuple[Any, str]:
    """File system of an address and the path in it; fsspec keeps one a process and thread."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise MissingDependency(
            f"{shown(path)!r} is read through fsspec, which isn't installed. Install it with "
            "`pip install fsspec`, or give a path of this machine."
        ) from None
    protocol = path.partition("://")[0]
    try:
        system, inside = url_to_fs(path)
    except ImportError as error:
        package = _PACKAGE_OF.get(protocol)
        advice = f"Install it with `pip install {package}`." if package else _reason(error, path)
        raise MissingDependency(
            f"{shown(path)!r} needs a package for {protocol}:// addresses that isn't installed. {advice}"
        ) from None
    except ValueError as error:
        raise BadFile(f"{shown(path)!r} can't be read: {_reason(error, path)}.") from None
    return system, inside


def _call(path: str, action: Callable[[Any, str], Any]) -> Any:
    """What `action` returns for a file system and the path in it, tried again where that may help.

    Raises:
        BadFile: it failed for good.
    """
    system, inside = _system(path)
    for number in itertools.count(1):
        try:
            return action(system, inside)
        except (BadFile, MissingDependency):
            raise
        except Exception as error:
            if number == _NUM_TRIES or not _is_passing(error):
                raise BadFile(_describe(error, path, number)) from None
            # Workers that failed together shouldn't come back together.
            time.sleep(_FIRST_PAUSE_SECONDS * 3 ** (number - 1) * random.uniform(0.5, 1))
    raise AssertionError("the loop above ends by itself")


def _names(error: BaseException) -> Iterator[str]:
    """Names of an error's types and of those that it came from, by which errors of optional packages are known."""
    seen: BaseException | None = error
    while seen is not None:
        yield from (kind.__name__ for kind in type(seen).__mro__)
        seen = seen.__cause__ or seen.__context__


_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"}
_NO_CONNECTION = {"EndpointConnectionError", "ConnectTimeoutError", "ClientConnectorError", "gaierror"}


def _is_passing(error: Exception) -> bool:
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError):
        return False
    names = set(_names(error))
    if names & (_NO_CREDENTIALS | _NO_CONNECTION):
        # The libraries below have tried a connection several times already.
        return False
    return "HTTPClientError" in names or isinstance(error, OSError | TimeoutError | EOFError)


def _describe(error: Exception, path: str, num_tries: int) -> str:
    name, protocol = repr(shown(path)), path.partition("://")[0]
    names = set(_names(error))
    is_s3 = protocol in _PACKAGE_OF
    if names & _NO_CREDENTIALS:
        return (
            f"{name} can't be read: no credentials were found. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, choose "
            "a profile with AWS_PROFILE, or set FSSPEC_S3_ANON=true for a public bucket."
        )
    if names & _NO_CONNECTION:
        where = "AWS_ENDPOINT_URL" if is_s3 else "the address"
        return f"{name} can't be read: its server can't be reached. Check the network and {where}."
    if isinstance(error, PermissionError):
        advice = "Check the credentials and what they allow" + (" (s3:GetObject, s3:ListBucket)." if is_s3 else ".")
        return f"{name} can't be read: the server refused it. {advice}"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        if is_s3 and "bucket" in str(error).lower():
            return f"{name} can't be read: there is no such bucket. Check its name and region."
        return f"{name} doesn't exist. Check the address, upper and lower case included."
    tries = f" (tried {num_tries} times)" if num_tries > 1 else ""
    return f"{name} can't be read{tries}: {_reason(error, path)}."


def _reason(error: Exception, path: str) -> str:
    """The first line of an error's text without the secrets that may be in it."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    hidden = [os.environ.get(name, "") for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")]
    hidden += re.findall(r"://[^/@:]*:([^/@]*)@", path)
    for secret in filter(None, hidden):
        text = text.replace(secret, "***")
    return shown(text)[:_MAX_REASON].rstrip(".")


# What file systems answer, made alike.


def _cat(system: Any, inside: str, offset: int, length: int) -> bytes:
    data: bytes = system.cat_file(inside, start=offset, end=offset + length)
    if len(data) < length:
        raise EOFError(f"{length - len(data)} of {length} bytes at offset {offset} are missing")
    return data


def _mark_of(info: dict[str, Any]) -> float:
    for key in ("ETag", "etag", "md5Hash", "checksum"):
        if info.get(key):
            return float(zlib.crc32(str(info[key]).encode()))
    for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = info.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            return float(zlib.crc32(value.encode()))
    return 0.0


def _plain(name: str) -> str:
    return name.strip("/")


def _prefix(system: Any, path: str, inside: str) -> str:
    """What has to be put before paths of a file system to make them addresses like the one that the user gave."""
    for candidate in (path, path.rstrip("/")):
        if inside and candidate.endswith(inside):
            return candidate[: len(candidate) - len(inside)]
    full: str = system.unstrip_protocol(inside)
    return full[: len(full) - len(inside)]


def _entry(prefix: str, info: dict[str, Any]) -> Entry:
    is_folder_there = info.get("type") == "directory"
    size = info.get("size")
    return Entry(prefix + info["name"].rstrip("/"), is_folder_there, None if is_folder_there or size is None else size)
