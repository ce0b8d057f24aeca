"""Arrays in .npz files, which are zip archives of .npy files.

numpy's own `mmap_mode` does nothing for them. But members that np.savez wrote lie in the archive as they are, so once
their offset is known they are read like any .npy file. Members that np.savez_compressed wrote can only be unpacked from
their beginning: they are read forwards, in bounded memory, and unpacked to a scratch file before they are streamed.
"""

import os
import re
import struct
import threading
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import IO, Any

from memfit.core.errors import BadFile, BadInput
from memfit.data.files import ByteFile, SequentialReader, fingerprint_of, open_file
from memfit.data.source import Array, Field, Layout
from memfit.data.sources.npy import NpyArray, fields_of, layout_of, read_fields

_LOCAL_HEADER_BYTES = 30
_SKIP_BYTES = 256 << 10
_UNPACKING_BYTES = 1 << 20
"""The unpacker's window and its buffers, for one member."""
_ENCRYPTED = 0x1
_FEATURES = r"x|images?|data|features?|inputs?"
_LABELS = r"y|labels?|targets?"
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError, ValueError)


class NpzSource:
    """Samples in one .npz file: its keys are the fields, the entries of their first axes the samples.

    Args:
        path: the file, or its address.
        columns: keys of the features, in this order. If not given: the obvious one of two such as "x" and "y", else
            all but the label.
        labels: key of the labels.

    Raises:
        BadFile: it can't be read as such a file, or its members differ in length.
        BadInput: an unknown key.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, columns: Sequence[str] | None = None, labels: str | None = None
    ) -> None:
        self._path = os.fspath(path)
        self._file = open_file(path)
        members = list_members(self._file)
        features, label = _choose(self._file.name, list(members), columns, labels)
        self._arrays = []
        self._fields: tuple[Field, ...] = ()
        for key in (*features, *([label] if label is not None else [])):
            array = open_member(self._file, members[key])
            self._arrays.append(array)
            self._fields += _only_field(array, key, is_label=key == label)
        self._check_lengths()

    @property
    def name(self) -> str:
        """The path."""
        return self._file.name

    @property
    def fields(self) -> tuple[Field, ...]:
        """One a key."""
        return self._fields

    @property
    def num_samples(self) -> int:
        """Length of the first axes."""
        return self._arrays[0].shape[0]

    @property
    def layout(self) -> Layout:
        """Like that of .npy files where no member is compressed."""
        layout = layout_of(self._arrays)
        compressed = [array for array in self._arrays if isinstance(array.file, _Unpacked)]
        if not compressed:
            return layout
        return replace(
            layout,
            scratch_bytes=layout.scratch_bytes + len(compressed) * _UNPACKING_BYTES,
            is_sequential=True,
            reason=(
                f"{compressed[0].name} is compressed: a compressed .npz can't be mapped, nor read from its middle; "
                "np.savez writes it uncompressed."
            ),
        )

    @property
    def classes(self) -> tuple[str, ...]:
        """None: labels are as stored."""
        return ()

    def fingerprint(self) -> str:
        """From the file's name, size and time of change."""
        return fingerprint_of([self._path], self._fields)

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        """Fills one array a field with samples `start` to `stop`."""
        for field, array, target in zip(self._fields, self._arrays, out, strict=True):
            read_fields(array, (field,), start, stop, (target,))

    def drop(self, start: int, stop: int) -> None:
        """Gives the pages of these samples back."""
        for array in self._arrays:
            array.file.drop(*array.span(start, stop))

    def close(self) -> None:
        """Closes the file in this process."""
        for array in self._arrays:
            array.file.close()
        self._file.close()

    def _check_lengths(self) -> None:
        lengths = {field.name: array.shape[0] for field, array in zip(self._fields, self._arrays, strict=True)}
        if len(set(lengths.values())) > 1:
            described = ", ".join(f"{key!r} has {length}" for key, length in lengths.items())
            raise BadFile(
                f"the arrays of {self.name!r} differ in their number of samples: {described}. Choose those that belong "
                "together with columns=[...] and labels=..."
            )


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
    found = re.finditer(rf"(?i)(?<![a-z])(?:{stems})(?![a-z])", stem)
    return {(stem[: match.start()], stem[match.end() :]) for match in found}


def list_members(file: ByteFile) -> dict[str, zipfile.ZipInfo]:
    """The arrays of an .npz file by their keys.

    Raises:
        BadFile: it isn't a whole zip archive, or has no arrays in it.
    """
    try:
        with zipfile.ZipFile(_stream(file)) as archive:
            listed = archive.infolist()
    except _DAMAGED as error:
        raise BadFile(
            f"{file.name!r} ({file.size} bytes) can't be read as an .npz file: {_reason(error)}. It is damaged or cut "
            "short; copy or save it again."
        ) from error
    members = {info.filename.removesuffix(".npy"): info for info in listed if info.filename.endswith(".npy")}
    if not members:
        held = ", ".join(info.filename for info in listed[:3]) or "nothing"
        raise BadFile(f"{file.name!r} is a zip archive without arrays in it (it holds {held}); np.savez writes them.")
    return members


def open_member(file: ByteFile, member: zipfile.ZipInfo) -> NpyArray:
    """One array of an .npz file, read in place if it is stored as it is.

    Raises:
        BadFile: it is damaged, cut short, encrypted, or holds what can't be read without unpickling.
    """
    name = f"{member.filename!r} in {file.name!r}"
    if member.flag_bits & _ENCRYPTED:
        raise BadFile(f"{name} is encrypted; save it again without a password.")
    if member.compress_type != zipfile.ZIP_STORED:
        return NpyArray(_Unpacked(file, member), name)
    head = bytearray(_LOCAL_HEADER_BYTES)
    file.read_into(member.header_offset, head)
    if head[:4] != b"PK\x03\x04":
        raise BadFile(
            f"{name} is damaged: at offset {member.header_offset} {bytes(head[:4])!r} was found where its header was "
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


class _Unpacked:
    """The contents of a compressed member. Going back means to begin again; each thread has its own position."""

    def __init__(self, file: ByteFile, member: zipfile.ZipInfo) -> None:
        self._file = file
        self._member = member
        self._mine = threading.local()

    @property
    def name(self) -> str:
        return self._file.name

    @property
    def size(self) -> int:
        return self._member.file_size

    def read_into(self, offset: int, buffer: Any) -> None:
        view = memoryview(buffer)
        if not view.nbytes:
            return
        view = view.cast("B")
        try:
            stream = self._stream_at(offset)
            done = 0
            while done < len(view):
                count = stream.readinto(view[done:])  # type: ignore[attr-defined]
                if not count:
                    raise EOFError(f"{len(view) - done} bytes are missing")
                done += count
            self._mine.position += done
        except BadFile:
            self._forget()
            raise
        except _DAMAGED as error:
            self._forget()
            raise BadFile(
                f"{self._member.filename!r} in {self._file.name!r} is damaged: unpacking {len(view)} bytes at offset "
                f"{offset} of it failed: {_reason(error)}. Copy or save it again."
            ) from error

    def will_need(self, offset: int, length: int) -> None:
        """Nothing: reading ahead is unpacking."""

    def drop(self, offset: int, length: int) -> None:
        """Nothing: the stream gives back the pages that it has read."""

    def close(self) -> None:
        self._forget()
        self._file.close()

    def _stream_at(self, offset: int) -> IO[bytes]:
        stream: IO[bytes] | None = getattr(self._mine, "stream", None)
        if stream is None or self._mine.position > offset:
            self._forget()
            # An archive of its own for each thread: archives lock, and a lock may be held in a process that forks.
            archive = zipfile.ZipFile(_stream(self._file))
            stream = archive.open(self._member)
            self._mine.stream, self._mine.position = stream, 0
        while self._mine.position < offset:
            skipped = len(stream.read(min(_SKIP_BYTES, offset - self._mine.position)))
            if not skipped:
                raise EOFError(f"it ends at offset {self._mine.position}")
            self._mine.position += skipped
        return stream

    def _forget(self) -> None:
        self._mine.__dict__.clear()

    def __getstate__(self) -> tuple[ByteFile, zipfile.ZipInfo]:
        return self._file, self._member

    def __setstate__(self, state: tuple[ByteFile, zipfile.ZipInfo]) -> None:
        self._file, self._member = state
        self._mine = threading.local()


def _choose(
    name: str, keys: list[str], columns: Sequence[str] | None, labels: str | None
) -> tuple[list[str], str | None]:
    """Keys of the features, and that of the labels."""
    for key in (*(columns or ()), *([labels] if labels is not None else [])):
        if key not in keys:
            raise BadInput(f"{name!r} has no array {key!r}; it has {', '.join(map(repr, keys))}.")
    pair = obvious_pair(keys) if columns is None else None
    if pair is not None and labels in (None, pair[1]):
        return [pair[0]], pair[1]
    features = [key for key in (keys if columns is None else columns) if key != labels]
    if not features:
        raise BadInput(f"{name!r} has nothing but the label {labels!r}; features are needed too.")
    return features, labels


def _only_field(array: NpyArray, key: str, *, is_label: bool) -> tuple[Field, ...]:
    if array.dtype.fields is not None:
        raise BadFile(f"{array.name} is a structured array; save its columns as arrays of their own.")
    return fields_of(array, key, is_label=is_label)


def _stream(file: ByteFile) -> Any:
    return SequentialReader(file)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
