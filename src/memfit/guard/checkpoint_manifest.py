"""The list of what a checkpoint holds, by which a damaged or half-written one is told from a whole one.

It is written last, and names every file with its size and SHA-256. It carries a checksum of itself, and must be, byte
for byte, what it would be written as again; so no bit of a checkpoint can change without being noticed.

It is also the only proof that a directory is a checkpoint at all: what no valid manifest claims is never removed. A
file that can't be read is neither whole nor damaged: `OSError` is left to the caller, who may try again.
"""

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from memfit.core.guarding import BadCheckpoint
from memfit.core.plain_files import NotPlain, open_plain, plain_size, read_plain

NAME = "manifest.json"
UNFINISHED = ".unfinished"
"""A file in a directory that is yet to become a checkpoint, by which a later run knows it for one."""
FORMAT = "memfit.checkpoint"
VERSION = 1
# Thousands of files need less; what is longer wasn't written here and isn't worth reading into memory.
MAX_BYTES = 64 * 2**20


class Damaged(Exception):
    """A checkpoint that can't be used; the text says why."""


class NotOurs(Damaged):
    """A directory that no valid manifest claims, whatever its name: it is passed over and never removed."""


class OtherVersion(BadCheckpoint):
    """A checkpoint of another version of the format, most likely a later one, that this memfit can't judge."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The list of a checkpoint's files, with step and metadata."""

    number: int  # counts the checkpoints of a folder in the order in which they were written
    step: int  # updates of the parameters that had been made
    created: str  # when, as an ISO 8601 time in UTC
    files: Mapping[str, FileEntry]  # by path below the checkpoint, with forward slashes
    info: dict[str, Any] = field(default_factory=dict)  # whatever the writer wanted to say, as JSON

    def to_bytes(self) -> bytes:
        """The content of manifest.json."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "number": self.number,
            "step": self.step,
            "created": self.created,
            "files": {name: {"bytes": entry.size_bytes, "sha256": entry.sha256} for name, entry in self.files.items()},
            "info": self.info,
        }
        return _dump({**content, "checksum": hashlib.sha256(_dump(content)).hexdigest()})

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Reads the content of manifest.json; refuses what isn't one, has changed, or is of another version."""
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            raise NotOurs(f"{NAME} is no JSON") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise NotOurs(f"{NAME} is not the manifest of a checkpoint")
        version = content.get("version")
        if type(version) is not int or version != VERSION:
            raise OtherVersion(f"{NAME} has version {str(version)[:20]}, and this memfit reads version {VERSION}")
        try:
            manifest = cls(
                number=_whole(content["number"]),
                step=_whole(content["step"]),
                created=str(content["created"]),
                files={
                    _inside(name): FileEntry(_whole(entry["bytes"]), str(entry["sha256"]))
                    for name, entry in content["files"].items()
                },
                info=dict(content["info"]),
            )
            unchanged = manifest.to_bytes() == data
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            raise NotOurs(f"{NAME} is incomplete or malformed") from None
        if not unchanged:
            raise NotOurs(f"{NAME} has changed since it was written")
        return manifest


def describe(directory: Path) -> dict[str, FileEntry]:
    """All files below a directory, as a manifest lists them."""
    files = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name not in (NAME, UNFINISHED):
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                files[path.relative_to(directory).as_posix()] = FileEntry(file.tell(), digest)
    return files


def read(directory: Path) -> Manifest:
    """The manifest of a checkpoint; NotOurs, OtherVersion, or OSError where it can't be read."""
    if directory.is_symlink():
        raise NotOurs("it is a symbolic link, which is not followed")
    try:
        data = read_plain(directory / NAME, MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise NotOurs(f"it has no {NAME}: it was never finished, or memfit didn't write it") from None
    except NotPlain as error:
        raise NotOurs(f"{NAME} can't be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise NotOurs(f"{NAME} is longer than any manifest")
    return Manifest.from_bytes(data)


def check(directory: Path, manifest: Manifest, *, checksums: bool) -> None:
    """Compares the sizes of files with the manifest, and with `checksums` every byte; Damaged, or OSError."""
    for name, entry in manifest.files.items():
        with _damage(name):
            size_bytes = _own_size(directory, name)
        if size_bytes != entry.size_bytes:
            difference = abs(size_bytes - entry.size_bytes)
            way = "shorter" if size_bytes < entry.size_bytes else "longer"
            unit = "byte" if difference == 1 else "bytes"
            raise Damaged(f"{name} is {difference} {unit} {way} than its manifest says")
    for name, entry in manifest.files.items() if checksums else ():
        with _damage(name), open_plain(directory / name) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != entry.sha256:
            raise Damaged(f"{name} has changed since it was written: its SHA-256 isn't what its manifest says")


def discard(directory: Path, manifest: Manifest) -> list[str]:
    """Removes the files that a manifest claims, it among them, and the directory; names of what is someone else's.

    The manifest goes last, so that another run can finish this. What isn't in the manifest stays, and so does the
    directory then.
    """
    folders = set()
    for name in manifest.files:
        with contextlib.suppress(OSError):
            _own_size(directory, name)
            (directory / name).unlink()
        folders |= {directory / parent for parent in list(PurePosixPath(name).parents)[:-1]}
    for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()
    entries = set()
    for current, inner, names in os.walk(directory):
        links = [name for name in inner if os.path.islink(os.path.join(current, name))]
        # A folder without anything in it is an entry, too.
        kept = [*names, *links] or ([] if inner else [""])
        entries |= {Path(current, name).relative_to(directory).as_posix() for name in kept}
    entries -= {NAME, "."}
    # What couldn't be removed just now, and names that NFS gives to files which someone still has open.
    ours = {name for name in entries if name in manifest.files or PurePosixPath(name).name.startswith(".nfs")}
    if not ours:
        (directory / NAME).unlink()
        with contextlib.suppress(OSError):
            directory.rmdir()
    return sorted({PurePosixPath(name).parts[0] for name in entries - ours})


@contextlib.contextmanager
def _damage(name: str) -> Iterator[None]:
    """That a file isn't there, or is something else than a file, is damage; any other error is none."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, NotPlain) as error:
        raise Damaged(f"{name} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise Damaged(f"{name!r} is not a file name: {error}") from None


def _own_size(directory: Path, name: str) -> int:
    """The size of a file that really is in the directory, not where a link leads."""
    for parent in list((directory / name).relative_to(directory).parents)[:-1]:
        mode = os.lstat(directory / parent).st_mode
        if not stat.S_ISDIR(mode):
            raise NotPlain(mode)
    return plain_size(directory / name)


def _dump(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


def _inside(name: str) -> str:
    """A path that stays below the checkpoint."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name or "\0" in name:
        raise ValueError(name)
    return name
