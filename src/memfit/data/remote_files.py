"""Files behind an address, such as s3://bucket/x.npy: read by ranges of bytes, through fsspec.

A remote read is slow to begin and may fail for a moment. So a long read is several requests at once, a failed one is
tried again a few times, and what can't be mended (no such bucket, no right to read, no network) is said in one
sentence, without the secrets that an address or an error may hold. Nothing is kept: fsspec's own caches grow with what
is read, and are not used.
"""

import io
import os
import random
import re
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import datetime
from typing import Any

from memfit.core.errors import BadFile, MissingDependency, how_to_install
from memfit.data.files import BlockReader, ByteFile, FolderEntry

# A long read is made of several requests at once, each of which takes its bytes once more while it is under way.
_NUM_REQUESTS = 4
_PIECE_BYTES = 2 << 20
_NUM_TRIES = 4
_FIRST_PAUSE_SECONDS = 0.2
# Small reads of `as_file` come from the blocks used last: headers, indexes, the tree of an HDF5 file.
_BLOCK_BYTES = 256 << 10
_NUM_BLOCKS = 8

_PACKAGE_OF = {"s3": "s3fs", "s3a": "s3fs"}
_MAX_REASON = 200
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"}
_NO_CONNECTION = {"EndpointConnectionError", "ConnectTimeoutError", "ClientConnectorError", "gaierror"}
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)

# fsspec has a connection of its own for each thread: the same threads make all requests.
_pool: ThreadPoolExecutor | None = None


def _forget_threads() -> None:
    """For a forked child, which has its parent's memory but none of its threads."""
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget_threads)


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
    return BlockReader(RemoteFile(path), _BLOCK_BYTES, _NUM_BLOCKS)


def is_remote_folder(path: str) -> bool:
    """Whether there is a folder at an address; False where there is nothing."""
    return bool(_call(path, lambda system, inside: system.isdir(inside)))


def list_remote(path: str) -> list[FolderEntry]:
    """What is directly in a folder."""

    def listed(system: Any, inside: str) -> list[FolderEntry]:
        # Where folders are no more than a part of names, one may be listed in itself.
        infos = [info for info in system.ls(inside, detail=True) if info["name"].strip("/") != inside.strip("/")]
        system.invalidate_cache()
        return [
            FolderEntry(
                info["name"].rstrip("/").rpartition("/")[2], info.get("type") == "directory", info.get("size") or 0
            )
            for info in infos
        ]

    entries: list[FolderEntry] = _call(path, listed)
    return entries


def glob_remote(pattern: str) -> list[str]:
    """Addresses of the files that a pattern with *, ? or ** stands for, sorted; none where nothing fits."""

    def found(system: Any, inside: str) -> list[str]:
        fixed = re.split(r"[*?\[]", inside, maxsplit=1)[0]
        prefix = _prefix(system, pattern[: len(pattern) - (len(inside) - len(fixed))], fixed)
        names = system.glob(inside, detail=True)
        system.invalidate_cache()
        return [prefix + name for name, info in names.items() if info.get("type") != "directory"]

    return sorted(_call(pattern, found))


class RemoteFile(ByteFile):
    """A file behind an address, with a "://" in it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.name = shown(path)
        self.size, self._mark = stat_remote(path)

    def _fill(self, offset: int, view: memoryview) -> None:
        missing = offset + len(view) - self.size
        if missing > 0:
            raise BadFile(
                f"{self.name!r} ends too early: of {len(view)} bytes at offset {offset} the last "
                f"{min(missing, len(view))} are missing. It has {self.size} bytes; copy or make it again."
            )

        def fetch(start: int) -> None:
            piece = view[start : start + _PIECE_BYTES]
            piece[:] = self._fetch(offset + start, len(piece))

        if len(view) <= _PIECE_BYTES:
            fetch(0)
            return
        global _pool
        _pool = _pool or ThreadPoolExecutor(_NUM_REQUESTS, thread_name_prefix="memfit-remote")
        requests = [_pool.submit(fetch, start) for start in range(0, len(view), _PIECE_BYTES)]
        try:
            for request in requests:
                request.result()
        finally:
            # The buffer is the caller's again once this returns: nothing may still write to it.
            for request in requests:
                request.cancel()
            wait(requests)

    def _fetch(self, offset: int, length: int) -> bytes:
        """Bytes of one request."""

        def cat(system: Any, inside: str) -> bytes:
            data: bytes = system.cat_file(inside, start=offset, end=offset + length)
            if len(data) < length:
                raise EOFError(f"{length - len(data)} of {length} bytes at offset {offset} are missing")
            return data

        data: bytes = _call(self._path, cat)
        if len(data) != length:
            is_changed = stat_remote(self._path)[1] != self._mark
            changed = "It was changed meanwhile." if is_changed else "Its server may not support range requests."
            raise BadFile(
                f"{self.name!r} gave {len(data)} bytes at offset {offset}, and {length} were asked for. {changed}"
            )
        return data


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
            f"{how_to_install('fsspec')}, or give a path of this machine."
        ) from None
    protocol = path.partition("://")[0]
    try:
        system, inside = url_to_fs(path)
    except ImportError as error:
        package = _PACKAGE_OF.get(protocol)
        advice = f"Install it with {how_to_install(package)}." if package else _reason(error, path)
        raise MissingDependency(
            f"{shown(path)!r} needs a package for {protocol}:// addresses that isn't installed. {advice}"
        ) from None
    except ValueError as error:
        raise BadFile(f"{shown(path)!r} can't be read: {_reason(error, path)}.") from None
    return system, inside


def _call(path: str, action: Callable[[Any, str], Any]) -> Any:
    """What `action` returns for a file system and the path in it, tried again where that may help."""
    system, inside = _system(path)
    number = 0
    while True:
        number += 1
        try:
            return action(system, inside)
        except (BadFile, MissingDependency):
            raise
        except Exception as error:
            if number == _NUM_TRIES or not _may_pass(error):
                raise BadFile(_describe(error, path, number)) from None
            # Workers that failed together shouldn't come back together.
            time.sleep(_FIRST_PAUSE_SECONDS * 3 ** (number - 1) * random.uniform(0.5, 1))


def _names(error: BaseException) -> set[str]:
    """Names of an error's types and of those that it came from, by which errors of optional packages are known."""
    names: set[str] = set()
    seen: BaseException | None = error
    while seen is not None:
        names |= {kind.__name__ for kind in type(seen).__mro__}
        seen = seen.__cause__ or seen.__context__
    return names


def _may_pass(error: Exception) -> bool:
    """Whether the same may work a moment later; the libraries below have tried a connection several times already."""
    names = _names(error)
    if isinstance(error, _LASTING) or names & (_NO_CREDENTIALS | _NO_CONNECTION):
        return False
    return "HTTPClientError" in names or isinstance(error, OSError | EOFError)


def _describe(error: Exception, path: str, num_tries: int) -> str:
    name, protocol = repr(shown(path)), path.partition("://")[0]
    names = _names(error)
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


def _prefix(system: Any, path: str, inside: str) -> str:
    """What has to be put before paths of a file system to make them addresses like the one that the user gave."""
    if inside and path.endswith(inside):
        return path[: len(path) - len(inside)]
    full: str = system.unstrip_protocol(inside)
    return full[: len(full) - len(inside)]
