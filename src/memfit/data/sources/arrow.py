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
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from memfit.core.errors import BadFile, BadInput, reason_of
from memfit.core.units import MIB
from memfit.data.files import ByteFile, read_bytes
from memfit.data.source import Array, PerThread, Storage
from memfit.data.sources.tables import Names, TableSource, describe_type, load

_MAGIC = b"ARROW1"
_CONTINUES = 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
# A description of a batch of ten thousand columns has half a megabyte.
_MOST_DESCRIPTION_BYTES = 64 * MIB
_SPARE_BYTES = 1 * MIB


class _Contents(NamedTuple):
    """Where the messages of a file lie."""

    preamble: bytes
    """The messages that describe the columns and hold the values of those that are stored as numbers of entries."""
    places: Array
    """Offset and bytes of each batch's message, one row a batch."""
    edges: Array
    """First rows of the batches and, last, the number of rows."""


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
            offset, size = self._contents.places[number].tolist()
            num_before = len(self._contents.preamble)
            stream = np.empty(num_before + size, np.uint8)
            stream[:num_before] = np.frombuffer(self._contents.preamble, np.uint8)
            self._file.read_into(offset, stream[num_before:])
            options = pa.ipc.IpcReadOptions(included_fields=self._columns, use_threads=False)
            # Arrow's own allocator keeps what it once had, which every forked worker would copy.
            pool = pa.system_memory_pool()
            reader = pa.ipc.open_stream(pa.py_buffer(stream), options=options, memory_pool=pool)
            self._kept = number, reader.read_next_batch()
        return self._kept[1]


class ArrowSource(TableSource):
    """Rows of an Arrow or Feather file, read batch by batch."""

    kind = "arrow"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Names = None,
        labels: str | None = None,
        classes: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(path)
        file = self._file
        pa = load("pyarrow", f"{self.name!r} is an Arrow file")
        self._contents = contents = _contents(file)
        numbers = range(len(contents.places))
        try:
            schema = pa.ipc.read_schema(pa.py_buffer(contents.preamble))
            first = _Batches(file, contents, range(len(schema))).get(0) if numbers else None
            table = [
                describe_type(field.name, field.type, None if first is None else first.column(place))
                for place, field in enumerate(schema)
            ]
            del first
            self._choose(
                table,
                columns=columns,
                labels=labels,
                batches=lambda column: map(_Batches(file, contents, [column]).get, numbers),
                classes=classes,
            )
        except (OSError, pa.ArrowException) as error:
            raise BadFile(f"{self.name!r} is damaged: {reason_of(error)}. Copy or make it again.") from error
        self._batches: PerThread[_Batches] = PerThread()
        # A batch as stored and, where it is compressed, unpacked.
        stored = int(contents.places[:, 1].max(initial=0))
        unpacked = int(np.diff(contents.edges).max(initial=0)) * self.sample_bytes
        self._set_blocks(contents.edges, len(contents.preamble) + stored + unpacked + _SPARE_BYTES)

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        import pyarrow as pa

        batches = self._batches.get(lambda: _Batches(self._file, self._contents, self._columns))
        for number, row, end in self._blocks(start, stop):
            first = int(self._edges[number])
            try:
                batch = batches.get(number).slice(row - first, end - row)
                self._put(batch, row, [array[row - start : end - start] for array in out])
            except (OSError, pa.ArrowException) as error:
                raise BadFile(
                    f"the batch of {self.name!r} that begins with row {first}, at offset "
                    f"{self._contents.places[number][0]} of the file, is damaged: {reason_of(error)}. Copy or make the "
                    "file again."
                ) from error

    def drop(self, start: int, stop: int) -> None:
        for number, _, _ in self._blocks(start, stop):
            self._file.drop(*self._contents.places[number].tolist())

    def storage(self) -> Storage:
        return Storage(("Arrow: record batches, each read as a whole",))

    def close(self) -> None:
        self._batches.take_out()
        super().close()


def _contents(file: ByteFile) -> _Contents:
    """Goes from message to message and looks at their descriptions."""
    offset = 8 if read_bytes(file, 0, 6) == _MAGIC else 0
    preamble, edges = b"", [0]
    places: list[tuple[int, int]] = []
    while file.size - offset >= 8:
        marker, size = struct.unpack("<II", read_bytes(file, offset, 8))
        if marker == _CONTINUES and size == 0:
            break
        if marker != _CONTINUES or not 0 < size <= min(_MOST_DESCRIPTION_BYTES, file.size - offset - 8):
            raise BadFile(f"{file.name!r} is not an Arrow or Feather file, or is damaged at offset {offset}.")
        description = read_bytes(file, offset + 8, size)
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
            preamble += read_bytes(file, offset, whole)
        elif kind == _BATCH and num_rows:
            places.append((offset, whole))
            edges.append(edges[-1] + num_rows)
        offset += whole
    if not preamble:
        raise BadFile(f"{file.name!r} is not an Arrow or Feather file: it doesn't say what its columns are.")
    return _Contents(preamble, np.array(places, np.int64).reshape(-1, 2), np.array(edges, np.int64))


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
