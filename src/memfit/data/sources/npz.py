"""Arrays in .npz files, which are zip archives of .npy files.

numpy's own `mmap_mode` does nothing for them. But members that np.savez wrote lie in the archive as they are, so once
their offset is known they are read like any .npy file. Members that np.savez_compressed wrote can only be unpacked from
their beginning: they are read forwards, in bounded memory, and unpacked to a scratch file before they are streamed.
"""

import os
import re
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from memfit.core.errors import BadFile, reason_of
from memfit.data.files import BlockReader, ByteFile, open_file, read_bytes
from memfit.data.source import Field, PerThread, Storage
from memfit.data.sources.npy import NpyArray, NpyArrays
from memfit.data.sources.tables import choose_names

_LOCAL_HEADER_BYTES = 30
_SKIP_BYTES = 256 << 10
# The unpacker's window and its buffers, for one member.
_UNPACKING_BYTES = 1 << 20
_ENCRYPTED = 0x1
_FEATURES = r"x|images?|data|features?|inputs?"
_LABELS = r"y|labels?|targets?"
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError, ValueError)


class NpzSource(NpyArrays):
    """Samples in one .npz file: its keys are the fields, the entries of their first axes the samples.

    Keys that aren't chosen are told by their names where there are two such as "x" and "y"; else all are features.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, columns: Sequence[str] | None = None, labels: str | None = None
    ) -> None:
        file = open_file(path)
        members = list_members(file)
        keys, source = list(members), repr(file.name)
        pair = obvious_pair(keys) if columns is None else None
        own_labels: tuple[str, ...] = ()
        if pair is not None and labels in (None, pair[1]):
            keys, own_labels = list(pair), pair[1:]
        features, targets = choose_names(keys, columns, labels, kind="array", source=source, own_labels=own_labels)
        arrays = []
        for key in (*features, *targets):
            array = _open_member(file, members[key])
            if array.dtype.fields is not None:
                raise BadFile(f"{array.name} is a structured array; save its columns as arrays of their own.")
            field = Field(key, array.dtype.newbyteorder("="), array.shape[1:], key in targets)
            arrays.append((array, (field,)))
        super().__init__(os.fspath(path), arrays, file.name)
        lengths = {field.name: array.shape[0] for field, array in zip(self.fields, self._arrays, strict=True)}
        if len(set(lengths.values())) > 1:
            described = ", ".join(f"{key!r} has {length}" for key, length in lengths.items())
            raise BadFile(
                f"the arrays of {self.name!r} differ in their number of samples: {described}. Choose those that belong "
                "together with --columns (columns=) and --labels (labels=)."
            )
        compressed = [array for array in self._arrays if isinstance(array.file, _Unpacked)]
        if compressed:
            self.layout = replace(
                self.layout,
                scratch_bytes=self.layout.scratch_bytes + len(compressed) * _UNPACKING_BYTES,
                is_sequential=True,
                reason=(
                    f"{compressed[0].name} is compressed: a compressed .npz can't be mapped, nor read from its middle; "
                    "np.savez writes it uncompressed."
                ),
            )

    def storage(self) -> Storage:
        lines = []
        for field, array in zip(self.fields, self._arrays, strict=True):
            kind = "without compression, read in place"
            if isinstance(array.file, _Unpacked):
                kind = f"compressed to {array.file.share:.0%} of its size"
            lines.append(f"{field.name}: a member of the archive, {kind}")
        return Storage(tuple(lines))


def obvious_pair(names: Sequence[str], suffix: str = "") -> tuple[str, str] | None:
    """Which of two names are the features and which the labels, where nobody would doubt it.

    >>> obvious_pair(["y_train", "x_train"])
    ('x_train', 'y_train')
    >>> obvious_pair(["x", "weights"]) is None
    True
    """
    if len(names) != 2:
        return None
    for features, labels in (tuple(names), tuple(reversed(names))):
        if _around(features, _FEATURES, suffix) & _around(labels, _LABELS, suffix):
            return features, labels
    return None


def _around(name: str, stems: str, suffix: str) -> set[tuple[str, str]]:
    """What stands before and after each of the stems that is a word of the name."""
    if not name.endswith(suffix):
        return set()
    stem = name.removesuffix(suffix)
    words = re.finditer(rf"(?i)(?<![a-z])(?:{stems})(?![a-z])", stem)
    return {(stem[: word.start()], stem[word.end() :]) for word in words}


def list_members(file: ByteFile) -> dict[str, zipfile.ZipInfo]:
    """The arrays of an .npz file by their keys."""
    stream: Any = BlockReader(file)
    try:
        with zipfile.ZipFile(stream) as archive:
            listed = archive.infolist()
    except _DAMAGED as error:
        raise BadFile(
            f"{file.name!r} ({file.size} bytes) can't be read as an .npz file: {reason_of(error)}. It is damaged or "
            "cut short; copy or save it again."
        ) from error
    members = {info.filename.removesuffix(".npy"): info for info in listed if info.filename.endswith(".npy")}
    if not members:
        held = ", ".join(info.filename for info in listed[:3]) or "nothing"
        raise BadFile(f"{file.name!r} is a zip archive without arrays in it (it holds {held}); np.savez writes them.")
    return members


def _open_member(file: ByteFile, member: zipfile.ZipInfo) -> NpyArray:
    """One array of an .npz file, read in place if it is stored as it is."""
    name = f"{member.filename!r} in {file.name!r}"
    if member.flag_bits & _ENCRYPTED:
        raise BadFile(f"{name} is encrypted; save it again without a password.")
    if member.compress_type != zipfile.ZIP_STORED:
        return NpyArray(_Unpacked(file, member), name)
    head = read_bytes(file, member.header_offset, _LOCAL_HEADER_BYTES)
    if len(head) < _LOCAL_HEADER_BYTES or head[:4] != b"PK\x03\x04":
        raise BadFile(
            f"{name} is damaged: at offset {member.header_offset} {head[:4]!r} was found where its header was "
            "expected. Copy or save it again."
        )
    name_bytes, extra_bytes = struct.unpack("<HH", head[26:30])
    start = member.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    if start + member.file_size > file.size:
        raise BadFile(
            f"{name} is cut short: it should end at offset {start + member.file_size}, and the file has {file.size} "
            "bytes. Copy or save it again."
        )
    return NpyArray(file, name, start=start, length=member.file_size)


class _Unpacked(ByteFile):
    """The contents of a compressed member. Going back means to begin again; each thread has its own position."""

    def __init__(self, file: ByteFile, member: zipfile.ZipInfo) -> None:
        self.name = file.name
        self.size = member.file_size
        self.share = member.compress_size / max(1, member.file_size)
        self._file = file
        self._info = member
        self._streams: PerThread[Any] = PerThread()

    def _fill(self, offset: int, view: memoryview) -> None:
        done = 0
        try:
            stream = self._streams.get(self._open)
            stream.seek(offset)
            while done < len(view):
                count = stream.readinto(view[done:])
                if not count:
                    raise EOFError(f"{len(view) - done} bytes are missing")
                done += count
        except BadFile:
            self._streams.forget()
            raise
        except _DAMAGED as error:
            self._streams.forget()
            raise BadFile(
                f"{self._info.filename!r} in {self._file.name!r} is damaged: unpacking {len(view)} bytes at offset "
                f"{offset} of it failed: {reason_of(error)}. Copy or save it again."
            ) from error

    def close(self) -> None:
        self._streams.take_out()
        self._file.close()

    def _open(self) -> Any:
        packed: Any = BlockReader(self._file)
        # An archive of its own for each thread: archives lock, and a lock may be held in a process that forks.
        archive = zipfile.ZipFile(packed)
        stream: Any = archive.open(self._info)
        # What is passed over is unpacked in pieces of so many bytes, 16 MiB if it weren't for this.
        stream.MAX_SEEK_READ = _SKIP_BYTES
        return stream
