"""Columns of Arrow and Feather files as a source of samples.

Such a file is a row of messages, each with a batch of rows. A message begins with its own description, a FlatBuffers
table that states the number of rows and the bytes that follow, so that the places of all batches are found by looking
at a few bytes of each. That works for files with a table of contents (Feather, "ARROW1") and for those without
(streams, as the `datasets` library stores them). Batches are read, not mapped: mapped pages count as this process's
memory. A batch together with the messages about columns at the file's beginning is a whole stream, which Arrow reads.

Layout: https://arrow.apache.org/docs/format/Columnar.html#encapsulated-message-format
"""

import os
import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.core.errors import BadFile, BadInput, MissingDependency
from memfit.core.units import MIB
from memfit.data.files import ByteFile, fingerprint_of, is_remote, open_file
from memfit.data.source import Array, Field, Layout
from memfit.data.sources.arrow_columns import BatchReader, describe_type, find_classes, reason_of
from memfit.data.sources.table_fields import Column, Part, choose_fields

_MAGIC = b"ARROW1"
_CONTINUES = 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
# A description of a batch of ten thousand columns has half a megabyte.
_MOST_DESCRIPTION_BYTES = 64 * MIB
_SPARE_BYTES = 1 * MIB


def open_arrow(
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | str | None = None,
    labels: Sequence[str] | str | None = None,
) -> "ArrowSource":
    """The rows of an Arrow or Feather file.

    Args:
        path: of the file; may be an address such as s3://bucket/file.arrow.
        columns: names of the columns to use; all of them if None.
        labels: names of those that are labels.

    Raises:
        BadFile: it isn't an Arrow file, or is damaged.
        BadInput: no such column, or one that can't be streamed.
    """
    name = os.fspath(path)
    try:
        import pyarrow as pa
    except ImportError as error:
        raise MissingDependency(
            f"{name!r} is an Arrow file, for which pyarrow is needed: pip install pyarrow"
        ) from error
    file = open_file(path)
    contents = _contents(file)
    shown = repr(name)
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(contents.preamble))
        first = _Batches(file, contents, range(len(schema))).get(0) if contents.places else None
        table = tuple(
            describe_type(field.name, field.type, None if first is None else first.column(place))
            for place, field in enumerate(schema)
        )
        del first
        parts = choose_fields(table, columns=columns, labels=labels, source=shown)
        classes: tuple[str, ...] = ()
        for part in parts:
            if part.has_classes:
                reader = _Batches(file, contents, part.columns)
                classes = find_classes(map(reader.get, range(len(contents.places))), part.field.name, shown)
    except (OSError, pa.ArrowException) as error:
        raise BadFile(f"{shown} is damaged: {reason_of(error)}. Copy or make it again.") from error
    # Workers may run in another folder than the one in which a relative path was given.
    place = name if is_remote(name) else os.path.abspath(os.path.expanduser(name))
    return ArrowSource(place, file, contents, table, parts, classes)


@dataclass(frozen=True, slots=True)
class _Contents:
    """Where the messages of a file lie.

    Attributes:
        preamble: the messages that describe the columns and hold the values of those that are stored as numbers of
            entries in a dictionary.
        places: offset and bytes of each batch's message.
        edges: first rows of the batches and, last, the number of rows.
    """

    preamble: bytes
    places: tuple[tuple[int, int], ...]
    edges: Array


class _Batches:
    """Batches of a file, of which the last one that was asked for is kept."""

    def __init__(self, file: ByteFile, contents: _Contents, columns: Iterable[int]) -> None:
        self._file = file
        self._contents = contents
        self._columns = sorted(columns)
        self._kept: tuple[int, Any] = -1, None

    def get(self, number: int) -> Any:
        import pyarrow as pa

        if self._kept[0] != number:
            # The old one goes before the new one comes.
            self._kept = -1, None
            offset, size = self._contents.places[number]
            num_before = len(self._contents.preamble)
            stream = np.empty(num_before + size, np.uint8)
            stream[:num_before] = np.frombuffer(self._contents.preamble, np.uint8)
            self._file.read_into(offset, stream[num_before:])
            options = pa.ipc.IpcReadOptions(included_fields=self._columns, use_threads=False)
            self._kept = number, pa.ipc.open_stream(pa.py_buffer(stream), options=options).read_next_batch()
        return self._kept[1]


class ArrowSource:
    """Rows of an Arrow file, read batch by batch.

    Args:
        place: where it is, from any folder.
        file: its bytes.
        contents: where the batches lie.
        table: all its columns.
        parts: the fields, and the columns that they are made of.
        classes: names of the classes, where labels are text.
    """

    def __init__(
        self,
        place: str,
        file: ByteFile,
        contents: _Contents,
        table: tuple[Column, ...],
        parts: tuple[Part, ...],
        classes: tuple[str, ...],
    ) -> None:
        self._place = place
        self._file = file
        self._contents = contents
        self._table = table
        self._parts = parts
        self._classes = classes
        self._reader = BatchReader(repr(file.name), table, parts, classes)
        self._threads = threading.local()

    @property
    def name(self) -> str:
        """The path, as given."""
        return self._file.name

    @property
    def fields(self) -> tuple[Field, ...]:
        """Features first, then labels."""
        return tuple(part.field for part in self._parts)

    @property
    def num_samples(self) -> int:
        """Rows."""
        return int(self._contents.edges[-1])

    @property
    def layout(self) -> Layout:
        """Blocks are the batches."""
        stored = max((size for _, size in self._contents.places), default=0)
        rows = int(np.diff(self._contents.edges).max(initial=0))
        # A batch as stored and, where it is compressed, unpacked.
        unpacked = rows * sum(field.sample_bytes for field in self.fields)
        return Layout(self._contents.edges, len(self._contents.preamble) + stored + unpacked + _SPARE_BYTES)

    @property
    def classes(self) -> tuple[str, ...]:
        """The different strings of the labels, sorted."""
        return self._classes

    def fingerprint(self) -> str:
        """Changes with the file's size and time of change, and with the choice of columns."""
        chosen = [self._table[place].name for part in self._parts for place in part.columns]
        return fingerprint_of([self._place], "arrow", chosen, [part.field.is_label for part in self._parts])

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        """Fills `out` with samples `start` to `stop`."""
        import pyarrow as pa

        edges = self._contents.edges
        row = start
        while row < stop:
            number = int(np.searchsorted(edges, row, side="right")) - 1
            first, end = int(edges[number]), min(stop, int(edges[number + 1]))
            try:
                batch = self._batches().get(number).slice(row - first, end - row)
                self._reader.put(batch, row, [array[row - start : end - start] for array in out])
            except (OSError, pa.ArrowException) as error:
                raise BadFile(
                    f"the batch of {self.name!r} that begins with row {first}, at offset "
                    f"{self._contents.places[number][0]} of the file, is damaged: {reason_of(error)}. Copy or make the "
                    "file again."
                ) from error
            row = end

    def drop(self, start: int, stop: int) -> None:
        """Gives the kernel's pages of these samples' batches back."""
        for offset, size in self._between(start, stop):
            self._file.drop(offset, size)

    def close(self) -> None:
        """Closes the file in this process; a later read opens it again."""
        self._threads = threading.local()
        self._file.close()

    def _between(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        if stop <= start:
            return ()
        low = int(np.searchsorted(self._contents.edges, start, side="right")) - 1
        return self._contents.places[low : int(np.searchsorted(self._contents.edges, stop))]

    def _batches(self) -> _Batches:
        batches: _Batches | None = getattr(self._threads, "batches", None)
        if batches is None:
            columns = (place for part in self._parts for place in part.columns)
            batches = self._threads.batches = _Batches(self._file, self._contents, columns)
        return batches

    def __getstate__(self) -> tuple[Any, ...]:
        return self._place, self._file, self._contents, self._table, self._parts, self._classes

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"ArrowSource({self.name!r})"


def _contents(file: ByteFile) -> _Contents:
    """Goes from message to message and looks at their descriptions."""
    offset = 8 if _bytes(file, 0, 6) == _MAGIC else 0
    preamble, edges = b"", [0]
    places: list[tuple[int, int]] = []
    while file.size - offset >= 8:
        marker, size = struct.unpack("<II", _bytes(file, offset, 8))
        if marker == _CONTINUES and size == 0:
            break
        if marker != _CONTINUES or not 0 < size <= min(_MOST_DESCRIPTION_BYTES, file.size - offset - 8):
            raise BadFile(f"{file.name!r} is not an Arrow or Feather file, or is damaged at offset {offset}.")
        description = _bytes(file, offset + 8, size)
        try:
            kind, num_rows, body_bytes = _described(description)
        except (struct.error, IndexError) as error:
            raise BadFile(f"{file.name!r} is damaged: no description of a batch at offset {offset + 8}.") from error
        whole = 8 + size + body_bytes
        if body_bytes < 0 or num_rows < 0 or offset + whole > file.size:
            raise BadFile(
                f"{file.name!r} is truncated or damaged: the batch of {num_rows} rows at offset {offset} ends at "
                f"{offset + whole}, and the file has {file.size} bytes. Copy or make it again."
            )
        if kind == _DICTIONARY and places:
            raise BadInput(
                f"{file.name!r} changes the dictionary of a column on its way, at offset {offset}, so that its batches "
                "can't be read by themselves. Store the table as Parquet."
            )
        if kind in (_SCHEMA, _DICTIONARY):
            preamble += _bytes(file, offset, whole)
        elif kind == _BATCH and num_rows:
            places.append((offset, whole))
            edges.append(edges[-1] + num_rows)
        offset += whole
    if not preamble:
        raise BadFile(f"{file.name!r} is not an Arrow or Feather file: it doesn't say what its columns are.")
    return _Contents(preamble, tuple(places), np.array(edges, np.int64))


def _described(message: bytes) -> tuple[int, int, int]:
    """Kind of a message, its rows if it is a batch, and the bytes of its body.

    A FlatBuffers table begins with the way back to a list of where its members lie: of a message these are its
    version, the kind of its header, the header, and the length of its body; of a batch, first, its length.
    """
    table = struct.unpack_from("<I", message, 0)[0]
    kind_at, header_at, body_at = (_member(message, table, number) for number in (1, 2, 3))
    kind = message[kind_at] if kind_at else 0
    body_bytes = struct.unpack_from("<q", message, body_at)[0] if body_at else 0
    num_rows = 0
    if kind == _BATCH and header_at:
        header = header_at + struct.unpack_from("<I", message, header_at)[0]
        rows_at = _member(message, header, 0)
        num_rows = struct.unpack_from("<q", message, rows_at)[0] if rows_at else 0
    return kind, num_rows, body_bytes


def _member(message: bytes, table: int, number: int) -> int:
    """Where a member of a table lies; 0 where it has its default."""
    members = table - struct.unpack_from("<i", message, table)[0]
    if 4 + 2 * number >= struct.unpack_from("<H", message, members)[0]:
        return 0
    distance: int = struct.unpack_from("<H", message, members + 4 + 2 * number)[0]
    return table + distance if distance else 0


def _bytes(file: ByteFile, offset: int, size: int) -> bytes:
    buffer = bytearray(min(size, max(0, file.size - offset)))
    file.read_into(offset, buffer)
    return bytes(buffer)
