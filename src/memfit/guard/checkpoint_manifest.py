"""The list of what a checkpoint holds, by which a damaged or half-written one is told from a whole one.

It is written last, and names every file with its size and SHA-256. It carries a checksum of itself, and must be, byte
for byte, what it would be written as again; so no bit of a checkpoint can change without being noticed.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

NAME = "manifest.json"
FORMAT = "memfit.checkpoint"
VERSION = 1
# Thousands of files need less; what is longer wasn't written here and isn't worth reading into memory.
MAX_BYTES = 64 * 2**20


class Damaged(Exception):
    """A checkpoint that can't be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a checkpoint."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds.

    Args:
        number: counts the checkpoints of a folder in the order in which they were written.
        step: updates of the parameters that had been made.
        created: when, as an ISO 8601 time in UTC.
        files: by path below the checkpoint, with forward slashes.
        info: whatever the writer wanted to say, as JSON.
    """

    number: int
    step: int
    created: str
    files: Mapping[str, Entry]
    info: dict[str, Any] = field(default_factory=dict)

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
        """Reads the content of manifest.json.

        Raises:
            Damaged: it isn't one, is of a later version, or has changed since it was written.
        """
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            raise Damaged(f"{NAME} is no JSON") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise Damaged(f"{NAME} is no manifest of a checkpoint")
        if content.get("version") != VERSION:
            raise Damaged(f"{NAME} has version {content.get('version')!r}, and this memfit reads version {VERSION}")
        try:
            manifest = cls(
                number=_whole(content["number"]),
                step=_whole(content["step"]),
                created=str(content["created"]),
                files={
                    _inside(name): Entry(_whole(entry["bytes"]), str(entry["sha256"]))
                    for name, entry in content["files"].items()
                },
                info=dict(content["info"]),
            )
            unchanged = manifest.to_bytes() == data
        except (KeyError, TypeError, ValueError, AttributeError):
            raise Damaged(f"{NAME} lacks something or holds something else in its place") from None
        if not unchanged:
            raise Damaged(f"{NAME} has changed since it was written")
        return manifest


def describe(directory: Path) -> dict[str, Entry]:
    """All files below a directory, as a manifest lists them."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != NAME:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                found[path.relative_to(directory).as_posix()] = Entry(file.tell(), digest)
    return found


def read(directory: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        Damaged: there is none that can be read.
    """
    path = directory / NAME
    try:
        if path.stat().st_size > MAX_BYTES:
            raise Damaged(f"{NAME} is longer than any manifest")
        return Manifest.from_bytes(path.read_bytes())
    except FileNotFoundError:
        raise Damaged(f"it has no {NAME}: it was never finished") from None
    except OSError as error:
        raise Damaged(f"{NAME} can't be read: {error.strerror or error}") from None


def check(directory: Path, manifest: Manifest, *, checksums: bool) -> None:
    """Compares the files with the manifest: their sizes, and with `checksums` every byte.

    Raises:
        Damaged: one is missing or differs.
    """
    for name, entry in manifest.files.items():
        try:
            size_bytes = (directory / name).stat().st_size
        except OSError as error:
            raise Damaged(f"{name} can't be read: {error.strerror or error}") from None
        if size_bytes != entry.size_bytes:
            difference = abs(size_bytes - entry.size_bytes)
            way = "shorter" if size_bytes < entry.size_bytes else "longer"
            unit = "byte" if difference == 1 else "bytes"
            raise Damaged(f"{name} is {difference} {unit} {way} than its manifest says")
    if not checksums:
        return
    for name, entry in manifest.files.items():
        try:
            with (directory / name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise Damaged(f"{name} can't be read: {error.strerror or error}") from None
        if digest != entry.sha256:
            raise Damaged(f"{name} has changed since it was written: its SHA-256 isn't what its manifest says")


def _dump(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


def _inside(name: str) -> str:
    """A path that stays below the checkpoint."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name:
        raise ValueError(name)
    return name
