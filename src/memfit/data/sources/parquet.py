"""Columns of a Parquet file as a source of samples.

A row group is read from its beginning: its pages are compressed one by one, and where a row lies in them isn't known.
So row groups are the blocks, and each thread goes through one with an iterator that holds a page of each column and a
small batch, never the row group as a whole; a read that goes on where the last one ended costs nothing extra. What that
takes in memory is known before, from the sizes that the pages' own headers state.
"""

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from memfit.core.errors import BadFile, MissingDependency
from memfit.core.units import KIB, MIB
from memfit.data.files import ByteFile, LocalFile, fingerprint_of, is_remote, open_file
from memfit.data.source import Array, Field, Layout
from memfit.data.sources.arrow_columns import BatchReader, describe_type, find_classes, is_list, is_text, reason_of
from memfit.data.sources.table_fields import Column, Part, choose_fields

if TYPE_CHECKING:
    from memfit.data.sources.arrow import ArrowSource

# Decoded bytes of a batch: more is no faster, and less is many calls.
_BATCH_BYTES = 1 * MIB
_LEAST_BATCH_ROWS, _MOST_BATCH_ROWS = 64, 65_536
# What is read at once of all columns together, and of one.
_BUFFERS_BYTES = 8 * MIB
_LEAST_BUFFER_BYTES, _MOST_BUFFER_BYTES = 16 * KIB, 256 * KIB
# A page, where its header wasn't looked at: what most writers make.
_USUAL_PAGE_BYTES = 1 * MIB
# Numbers of entries in a dictionary of a megabyte have at most 20 bits.
_INDEX_BYTES = 2.5
_DROP_EVERY_BYTES = 16 * MIB
_RELEASED_BYTES = 16 * MIB
# What is taken beyond what is asked for, at most: Arrow's own pool took an eighth more and a few segments, the system's
# allocator takes less.
_POOL_BYTES = 10 * MIB
# Of a file's table of contents: in memory it takes a few times its bytes.
_METADATA_FACTOR = 4
_abandoned: list[object] = []
# A fork waits until nobody chooses: its child would find the lock taken, and the wrong pool, for ever.
_choosing_pool = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_choosing_pool.acquire, after_in_parent=_choosing_pool.release, after_in_child=_choosing_pool.release
    )


def open_parquet(
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | str | None = None,
    labels: Sequence[str] | str | None = None,
) -> "ParquetSource | ArrowSource":
    """The rows of a Parquet file, or of an Arrow or Feather file.

    Args:
        path: of the file; may be an address such as s3://bucket/file.parquet.
        columns: names of the columns to use; all of them if None.
        labels: names of those that are labels.

    Raises:
        BadFile: it isn't a Parquet file, or is damaged.
        BadInput: no such column, or one that can't be streamed.
    """
    name = os.fspath(path)
    if is_arrow(name):
        from memfit.data.sources.arrow import open_arrow

        return open_arrow(path, columns=columns, labels=labels)
    local = None if is_remote(name) else LocalFile(name)
    # Workers may run in another folder than the one in which a relative path was given.
    place = name if local is None else os.path.abspath(os.path.expanduser(name))
    shown = repr(name)
    file = _open(name, place, None, 0)
    try:
        wanted = None if columns is None else {*_listed(columns), *_listed(labels)}
        table = [
            describe_type(field.name, field.type, _first_value(file, field, wanted)) for field in file.schema_arrow
        ]
        parts = choose_fields(table, columns=columns, labels=labels, source=shown)
        classes: tuple[str, ...] = ()
        for part in parts:
            if part.has_classes:
                batches = file.iter_batches(columns=[part.field.name], use_threads=False)
                classes = find_classes(batches, part.field.name, shown)
        groups = _row_groups(file.metadata, {table[place].name for part in parts for place in part.columns})
        scratch = _scratch_bytes(file.metadata, groups, table, parts, local)
    except _arrow_errors() as error:
        raise BadFile(f"{shown} is damaged: {reason_of(error)}. Copy or make it again.") from error
    finally:
        file.close()
    return ParquetSource(name, place, local, tuple(table), parts, classes, groups, scratch)


def is_arrow(name: str) -> bool:
    """Whether a file is one of Arrow's own: by its ending, or by the bytes that it begins with."""
    if os.path.splitext(name)[1].lower() in (".arrow", ".feather", ".ipc"):
        return True
    file = open_file(name)
    start = bytearray(min(6, file.size))
    file.read_into(0, start)
    return start == b"ARROW1"


@dataclass(frozen=True, slots=True)
class _RowGroups:
    """Where row groups lie.

    Attributes:
        numbers: of those that have rows.
        edges: first rows of these and, last, the number of rows.
        chunks: for each, offset and size of its chosen column chunks, run together where they touch.
        leaves: places of the chosen leaf columns in the file's own list.
    """

    numbers: tuple[int, ...]
    edges: Array
    chunks: tuple[tuple[tuple[int, int], ...], ...]
    leaves: tuple[int, ...]


class _Cursor:
    """One thread's way through a row group."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.group = -1
        self.batches: Iterator[Any] | None = None
        self.batch: Any = None
        self.row = 0
        """The next row of the file that it gives."""

    def leave(self) -> None:
        """Lets go of the row group."""
        self.group, self.batches, self.batch = -1, None, None


class _Opened:
    """What one process has open: a cursor a thread."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.cursors = threading.local()
        self.metadata: Any = None
        self.undropped_bytes = 0


class ParquetSource:
    """Rows of a Parquet file, read row group by row group.

    Args:
        name: the path, as given.
        place: where it is, from any folder.
        local: the file's bytes; None where it is remote.
        table: all its columns.
        parts: the fields, and the columns that they are made of.
        classes: names of the classes, where labels are text.
        groups: where row groups lie.
        scratch_bytes: memory that a read takes.
    """

    def __init__(
        self,
        name: str,
        place: str,
        local: LocalFile | None,
        table: tuple[Column, ...],
        parts: tuple[Part, ...],
        classes: tuple[str, ...],
        groups: _RowGroups,
        scratch_bytes: int,
    ) -> None:
        self._name = name
        self._place = place
        self._local = local
        self._table = table
        self._parts = parts
        self._classes = classes
        self._groups = groups
        self._scratch_bytes = scratch_bytes
        self._names = [table[place].name for part in parts for place in part.columns]
        self._reader = BatchReader(repr(name), table, parts, classes)
        self._opened = _Opened()

    @property
    def name(self) -> str:
        """The path, as given."""
        return self._name

    @property
    def fields(self) -> tuple[Field, ...]:
        """Features first, then labels."""
        return tuple(part.field for part in self._parts)

    @property
    def num_samples(self) -> int:
        """Rows."""
        return int(self._groups.edges[-1])

    @property
    def layout(self) -> Layout:
        """Blocks are the row groups."""
        return Layout(self._groups.edges, self._scratch_bytes)

    @property
    def classes(self) -> tuple[str, ...]:
        """The different strings of the labels, sorted."""
        return self._classes

    def fingerprint(self) -> str:
        """Changes with the file's size and time of change, and with the choice of columns."""
        return fingerprint_of([self._place], "parquet", self._names, [part.field.is_label for part in self._parts])

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        """Fills `out` with samples `start` to `stop`."""
        cursor = self._cursor()
        row = start
        while row < stop:
            group = int(np.searchsorted(self._groups.edges, row, side="right")) - 1
            end = min(stop, int(self._groups.edges[group + 1]))
            try:
                self._read_group(cursor, group, row, [array[row - start : end - start] for array in out])
            except _arrow_errors() as error:
                cursor.leave()
                raise BadFile(self._damage(cursor, group, reason_of(error))) from error
            except BaseException:
                cursor.leave()
                raise
            row = end

    def drop(self, start: int, stop: int) -> None:
        """Gives the kernel's pages of the file back, from time to time.

        Not just those of these samples: the kernel reads ahead in pieces of up to some MiB, and a piece that is only
        partly given back stays whole. Dropped by row groups, a third of a file stayed in memory.
        """
        if self._local is None:
            return
        opened = self._this_process()
        opened.undropped_bytes += (stop - start) * sum(field.sample_bytes for field in self.fields)
        if opened.undropped_bytes >= _DROP_EVERY_BYTES:
            self._local.drop(0, self._local.size)
            opened.undropped_bytes = 0

    def close(self) -> None:
        """Closes the file in this process; a later read opens it again."""
        self._opened = _Opened()
        if self._local is not None:
            self._local.close()
        _release_pools()

    def _this_process(self) -> _Opened:
        if self._opened.process != os.getpid():
            # What the parent has open stays the parent's.
            _abandoned.append(self._opened)
            self._opened = _Opened()
        return self._opened

    def _cursor(self) -> _Cursor:
        opened = self._this_process()
        cursor: _Cursor | None = getattr(opened.cursors, "cursor", None)
        if cursor is None:
            file = _open(self._name, self._place, opened.metadata, _buffer_bytes(len(self._names)))
            if opened.metadata is None:
                if file.metadata.num_rows != self.num_samples:
                    raise BadFile(
                        f"{self._name!r} has changed since it was opened: it had {self.num_samples} rows and now has "
                        f"{file.metadata.num_rows}. Leave the file as it is while it is read."
                    )
                opened.metadata = file.metadata
            cursor = opened.cursors.cursor = _Cursor(file)
        return cursor

    def _read_group(self, cursor: _Cursor, group: int, row: int, out: Sequence[Array]) -> None:
        """Reads rows of one row group, on from where the cursor is if it is before them."""
        if cursor.group != group or cursor.row > row:
            self._enter(cursor, group)
        done, count = 0, len(out[0])
        while done < count:
            if cursor.batch is None or not cursor.batch.num_rows:
                assert cursor.batches is not None
                cursor.batch = next(cursor.batches, None)
                if cursor.batch is None:
                    raise EOFError(f"it ends after {cursor.row - int(self._groups.edges[group])} rows")
            wanted = row + done
            # Rows before those that are asked for have to be decoded, too.
            skipped = min(wanted - cursor.row, cursor.batch.num_rows)
            taken = min(cursor.batch.num_rows - skipped, count - done)
            if taken:
                self._reader.put(
                    cursor.batch.slice(skipped, taken), wanted, [array[done : done + taken] for array in out]
                )
            cursor.batch = cursor.batch.slice(skipped + taken)
            cursor.row += skipped + taken
            done += taken
        if cursor.row == int(self._groups.edges[group + 1]):
            cursor.leave()
            self._release_large(int(self._groups.edges[group + 1] - self._groups.edges[group]))

    def _release_large(self, num_rows: int) -> None:
        """Gives memory that Arrow holds in reserve back to the system, after a row group that took much.

        It takes 2 ms, after which fresh memory has to be had: after small ones that would only cost time, as the next
        one needs the same.
        """
        if num_rows * sum(field.sample_bytes for field in self.fields) >= _RELEASED_BYTES:
            _release_pools()

    def _enter(self, cursor: _Cursor, group: int) -> None:
        cursor.leave()
        cursor.batches = cursor.file.iter_batches(
            batch_size=_batch_rows(self.fields),
            row_groups=[self._groups.numbers[group]],
            columns=self._names,
            use_threads=False,
        )
        cursor.group, cursor.row = group, int(self._groups.edges[group])

    def _damage(self, cursor: _Cursor, group: int, reason: str) -> str:
        number = self._groups.numbers[group]
        said = f"row group {number} of {self._name!r} (rows {self._groups.edges[group]} on) is damaged"
        for leaf in self._groups.leaves:
            chunk = cursor.file.metadata.row_group(number).column(leaf)
            try:
                name = chunk.path_in_schema.partition(".")[0]
            except UnicodeDecodeError:
                break
            try:
                for _ in cursor.file.iter_batches(row_groups=[number], columns=[chunk.path_in_schema]):
                    pass
            except _arrow_errors() as error:
                offset, size = _extent(chunk)
                return (
                    f"{said} in column {name!r}, whose {size} bytes begin at offset {offset} of the file: "
                    f"{reason_of(error)}. Copy or make the file again."
                )
        return f"{said}: {reason}. Copy or make the file again."

    def __getstate__(self) -> tuple[Any, ...]:
        return (
            self._name,
            self._place,
            self._local,
            self._table,
            self._parts,
            self._classes,
            self._groups,
            self._scratch_bytes,
        )

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"ParquetSource({self._name!r})"


def _open(name: str, place: str, metadata: Any, buffer_bytes: int) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingDependency(
            f"{name!r} is a Parquet file, for which pyarrow is needed: pip install pyarrow"
        ) from error
    if is_remote(place):
        from memfit.data.remote_files import as_file

        source: Any = pa.PythonFile(as_file(place), mode="r")
    else:
        # Read, not mapped: mapped pages count as this process's memory.
        # As bytes: names that aren't UTF-8 are otherwise refused.
        source = pa.OSFile(os.fsencode(place))
    try:
        with _system_pool():
            return pq.ParquetFile(
                source, metadata=metadata, buffer_size=buffer_bytes, pre_buffer=False, page_checksum_verification=True
            )
    except _arrow_errors() as error:
        source.close()
        raise BadFile(f"{name!r} can't be opened as Parquet: {reason_of(error)}. Copy or make it again.") from error


@contextlib.contextmanager
def _system_pool() -> Iterator[None]:
    """Readers that are made meanwhile take memory from the system's allocator.

    Arrow's usual pool keeps what was given back: 25 MiB stayed after a file had been unpacked, to be copied by each
    process that was forked afterwards.
    """
    import pyarrow as pa

    with _choosing_pool:
        usual = pa.default_memory_pool()
        pa.set_memory_pool(pa.system_memory_pool())
        try:
            yield
        finally:
            pa.set_memory_pool(usual)


def _release_pools() -> None:
    """Gives memory that Arrow holds in reserve back: of its readers, and of what it makes beside them."""
    import pyarrow as pa

    for pool in (pa.system_memory_pool(), pa.default_memory_pool()):
        pool.release_unused()


def _arrow_errors() -> tuple[type[Exception], ...]:
    import pyarrow as pa

    # Names of columns in a damaged file aren't always text.
    return OSError, EOFError, UnicodeDecodeError, pa.ArrowException


# From the table of contents.


def _row_groups(metadata: Any, names: set[str]) -> _RowGroups:
    leaves = tuple(
        number
        for number in range(metadata.num_columns)
        if metadata.schema.column(number).path.partition(".")[0] in names
        or metadata.schema.column(number).path in names
    )
    numbers, edges, chunks = [], [0], []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if group.num_rows:
            numbers.append(number)
            edges.append(edges[-1] + group.num_rows)
            chunks.append(_joined(sorted(_extent(group.column(leaf)) for leaf in leaves)))
    return _RowGroups(tuple(numbers), np.array(edges, np.int64), tuple(chunks), leaves)


def _extent(chunk: Any) -> tuple[int, int]:
    """Offset and size of a column chunk."""
    offset = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
        offset = min(offset, chunk.dictionary_page_offset)
    return offset, chunk.total_compressed_size


def _joined(extents: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for offset, size in extents:
        if joined and sum(joined[-1]) == offset:
            joined[-1] = joined[-1][0], joined[-1][1] + size
        else:
            joined.append((offset, size))
    return tuple(joined)


def _scratch_bytes(
    metadata: Any, groups: _RowGroups, table: Sequence[Column], parts: Sequence[Part], local: ByteFile | None
) -> int:
    """Memory for pages and batches, in the row group where that is the most."""
    total: int = _METADATA_FACTOR * metadata.serialized_size
    if not groups.numbers:
        return total
    largest = max(groups.numbers, key=lambda number: metadata.row_group(number).total_byte_size)
    group = metadata.row_group(largest)
    for leaf in groups.leaves:
        total += _column_bytes(group.column(leaf), local) + _buffer_bytes(len(groups.leaves))
    fields = [part.field for part in parts]
    # A batch, its lists put together, and what is converted.
    total += 3 * min(_batch_rows(fields), group.num_rows) * sum(field.sample_bytes for field in fields)
    return total + total // 8 + _POOL_BYTES


def _column_bytes(chunk: Any, local: ByteFile | None) -> int:
    """Memory for the pages of one column: each as stored and unpacked, and a dictionary with its values."""
    most: int = chunk.total_uncompressed_size
    page, dictionary = _page_bytes(chunk.data_page_offset, local), 0
    if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
        dictionary = min(most, _page_bytes(chunk.dictionary_page_offset, local))
        if most - dictionary > _INDEX_BYTES * chunk.num_values:
            # The dictionary grew too large and was given up: pages after the first hold the values themselves.
            page = max(page, _USUAL_PAGE_BYTES)
    return 2 * min(most, page) + 2 * dictionary


def _page_bytes(offset: int, local: ByteFile | None) -> int:
    """Unpacked size of the page at an offset, from its header: a Thrift struct whose second number it is."""
    if local is None:
        return _USUAL_PAGE_BYTES
    header = bytearray(min(16, max(0, local.size - offset)))
    local.read_into(offset, header)
    numbers: list[int] = []
    place = 0
    while len(numbers) < 2 and place < len(header):
        # 0x15: the next field, a 32-bit integer, of seven bits a byte and with the sign in the lowest bit.
        if header[place] != 0x15:
            return _USUAL_PAGE_BYTES
        place, shift, value = place + 1, 0, 0
        while place < len(header):
            value |= (header[place] & 0x7F) << shift
            place, shift = place + 1, shift + 7
            if header[place - 1] < 0x80:
                break
        numbers.append(value >> 1)
    return numbers[1] if len(numbers) == 2 else _USUAL_PAGE_BYTES


def _batch_rows(fields: Sequence[Field]) -> int:
    sample_bytes = max(1, sum(field.sample_bytes for field in fields))
    return max(1, min(max(_BATCH_BYTES // sample_bytes, _LEAST_BATCH_ROWS), _MOST_BATCH_ROWS))


def _buffer_bytes(num_columns: int) -> int:
    return min(max(_BUFFERS_BYTES // max(1, num_columns), _LEAST_BUFFER_BYTES), _MOST_BUFFER_BYTES)


def _first_value(file: Any, field: Any, wanted: set[str] | None) -> Any:
    """The first row of a column of lists, of those that are to be used; None otherwise."""
    if not is_list(field.type) or (wanted is not None and field.name not in wanted) or is_text(field.type):
        return None
    for batch in file.iter_batches(batch_size=1, columns=[field.name], use_threads=False):
        return batch.column(0)
    return None


def _listed(given: Sequence[str] | str | None) -> list[str]:
    return [given] if isinstance(given, str) else list(given or ())
