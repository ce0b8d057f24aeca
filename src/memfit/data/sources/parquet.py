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
from typing import Any

import numpy as np

from memfit.core.errors import BadFile, reason_of
from memfit.core.units import KIB, MIB, format_size
from memfit.data.files import ByteFile, is_remote, read_bytes
from memfit.data.remote_files import as_file
from memfit.data.source import LARGE_BLOCK_BYTES, Array, PerThread, Storage
from memfit.data.sources.tables import Column, Names, TableSource, describe_type, is_list, load

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
_RELEASED_BYTES = 16 * MIB
# What is taken beyond what is asked for, at most: Arrow's own pool took an eighth more and a few segments, the system's
# allocator takes less.
_POOL_BYTES = 10 * MIB
# Of a file's table of contents: in memory it takes a few times its bytes.
_METADATA_FACTOR = 4
# A fork waits until nobody chooses: its child would find the lock taken, and the wrong pool, for ever.
_choosing_pool = threading.RLock()
os.register_at_fork(
    before=_choosing_pool.acquire, after_in_parent=_choosing_pool.release, after_in_child=_choosing_pool.release
)


class _Cursor:
    """One thread's way through a row group; `row` is the next row of the file that it gives."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.row = 0
        self.leave()

    def leave(self) -> None:
        """Lets go of the row group."""
        self.group = -1
        self.batches: Iterator[Any] = iter(())
        self.batch: Any = None


class ParquetSource(TableSource):
    """Rows of a Parquet file, read row group by row group."""

    kind = "parquet"

    def __init__(self, path: str | os.PathLike[str], *, columns: Names = None, labels: str | None = None) -> None:
        super().__init__(path)
        file = self._opened(None, 0)
        wanted = None if columns is None else {*columns, labels}
        try:
            table = [_describe(file, field, wanted) for field in file.schema_arrow]
            self._choose(
                table,
                columns=columns,
                labels=labels,
                batches=lambda place: file.iter_batches(columns=[table[place].name], use_threads=False),
            )
            metadata = file.metadata
            # Places of the chosen leaf columns in the file's own list.
            paths = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
            chosen = set(self._names)
            self._leaves = [number for number, path in enumerate(paths) if {path, path.partition(".")[0]} & chosen]
            counts = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
            # Numbers in the file of those that have rows.
            self._groups = [number for number, count in enumerate(counts) if count]
            self._set_blocks(np.cumsum([0, *filter(None, counts)], dtype=np.int64), self._scratch_bytes(metadata))
        except _arrow_errors() as error:
            raise BadFile(f"{self.name!r} is damaged: {reason_of(error)}. Copy or make it again.") from error
        finally:
            file.close()
        self._cursors: PerThread[_Cursor] = PerThread()
        self._metadata: PerThread[Any] = PerThread(per_process=True)

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        cursor = self._cursors.get(self._open_cursor)
        for group, row, end in self._blocks(start, stop):
            try:
                self._read_group(cursor, group, row, [array[row - start : end - start] for array in out])
            except _arrow_errors() as error:
                cursor.leave()
                raise BadFile(self._damage(cursor, group, reason_of(error))) from error
            except BaseException:
                cursor.leave()
                raise

    def close(self) -> None:
        self._cursors.take_out()
        self._metadata.take_out()
        super().close()
        _release_pools()

    def storage(self) -> Storage:
        metadata = self._metadata.get(self._read_metadata)
        count = metadata.num_row_groups
        largest = max(metadata.row_group(index).total_byte_size for index in range(min(count, 1000)))
        rows = metadata.row_group(0).num_rows
        codecs = {metadata.row_group(0).column(index).compression for index in range(metadata.num_columns)}
        method = ", ".join(sorted(codec.lower() for codec in codecs)).replace("uncompressed", "no compression")
        groups = "1 row group" if count == 1 else f"{count} row groups"
        warning = (
            f"row groups of {format_size(largest)} are large for shuffling: each is unpacked as a whole, {rows} rows "
            "that lie side by side. `memfit data convert` writes row groups of 1 MiB."
        )
        line = f"{groups} of up to {format_size(largest)}, {rows} rows in the first; {method}"
        return Storage((line,), (warning,) if largest > LARGE_BLOCK_BYTES else ())

    def _opened(self, metadata: Any, buffer_bytes: int) -> Any:
        subject = f"{self.name!r} is a Parquet file"
        pa, pq = load("pyarrow", subject), load("pyarrow.parquet", subject)
        # Read, not mapped: mapped pages count as this process's memory. As bytes: names that aren't UTF-8 are otherwise
        # refused.
        is_local = not is_remote(self._place)
        source = pa.OSFile(os.fsencode(self._place)) if is_local else pa.PythonFile(as_file(self._place), mode="r")
        options = {"buffer_size": buffer_bytes, "pre_buffer": False, "page_checksum_verification": True}
        try:
            with _system_pool():
                return pq.ParquetFile(source, metadata=metadata, **options)
        except _arrow_errors() as error:
            source.close()
            raise BadFile(
                f"{self.name!r} can't be opened as Parquet: {reason_of(error)}. Copy or make it again."
            ) from error

    def _open_cursor(self) -> _Cursor:
        metadata = self._metadata.get(self._read_metadata)
        return _Cursor(self._opened(metadata, _buffer_bytes(len(self._names))))

    def _read_metadata(self) -> Any:
        """The table of contents, which all threads share."""
        file = self._opened(None, 0)
        metadata = file.metadata
        file.close()
        if metadata.num_rows != self.num_samples:
            raise BadFile(
                f"{self.name!r} has changed since it was opened: it had {self.num_samples} rows and now has "
                f"{metadata.num_rows}. Leave the file as it is while it is read."
            )
        return metadata

    def _read_group(self, cursor: _Cursor, group: int, row: int, out: Sequence[Array]) -> None:
        """Reads rows of one row group, on from where the cursor is if it is before them."""
        first, last = self._edges[group : group + 2].tolist()
        if cursor.group != group or cursor.row > row:
            cursor.leave()
            cursor.batches = cursor.file.iter_batches(
                batch_size=self._batch_rows, row_groups=[self._groups[group]], columns=self._names, use_threads=False
            )
            cursor.group, cursor.row = group, first
        done, count = 0, len(out[0])
        while done < count:
            if cursor.batch is None or not cursor.batch.num_rows:
                cursor.batch = next(cursor.batches, None)
                if cursor.batch is None:
                    raise EOFError(f"it ends after {cursor.row - first} rows")
            wanted = row + done
            # Rows before those that are asked for have to be decoded, too.
            skipped = min(wanted - cursor.row, cursor.batch.num_rows)
            taken = min(cursor.batch.num_rows - skipped, count - done)
            if taken:
                into = [array[done : done + taken] for array in out]
                self._put(cursor.batch.slice(skipped, taken), wanted, into)
            cursor.batch = cursor.batch.slice(skipped + taken)
            cursor.row += skipped + taken
            done += taken
        if cursor.row == last:
            cursor.leave()
            # It takes 2 ms, after which fresh memory has to be had: after small row groups that would only cost time,
            # as the next one needs the same.
            if (last - first) * self.sample_bytes >= _RELEASED_BYTES:
                _release_pools()

    @property
    def _batch_rows(self) -> int:
        return max(1, min(max(_BATCH_BYTES // max(1, self.sample_bytes), _LEAST_BATCH_ROWS), _MOST_BATCH_ROWS))

    def _scratch_bytes(self, metadata: Any) -> int:
        """Memory for pages and batches, in the row group where that is the most."""
        total: int = _METADATA_FACTOR * metadata.serialized_size
        if not self._groups:
            return total
        groups = (metadata.row_group(number) for number in self._groups)
        group = max(groups, key=lambda group: group.total_byte_size)
        for leaf in self._leaves:
            total += _column_bytes(group.column(leaf), self._file) + _buffer_bytes(len(self._leaves))
        # A batch, its lists put together, and what is converted.
        total += 3 * min(self._batch_rows, group.num_rows) * self.sample_bytes
        return total + total // 8 + _POOL_BYTES

    def _damage(self, cursor: _Cursor, group: int, reason: str) -> str:
        number = self._groups[group]
        subject = f"row group {number} of {self.name!r} (rows {self._edges[group]} on) is damaged"
        for leaf in self._leaves:
            chunk = cursor.file.metadata.row_group(number).column(leaf)
            try:
                path = chunk.path_in_schema
            except UnicodeDecodeError:
                break
            try:
                for _ in cursor.file.iter_batches(row_groups=[number], columns=[path], use_threads=False):
                    pass
            except _arrow_errors() as error:
                offset = chunk.data_page_offset
                if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
                    offset = min(offset, chunk.dictionary_page_offset)
                return (
                    f"{subject} in column {path.partition('.')[0]!r}, whose {chunk.total_compressed_size} bytes begin "
                    f"at offset {offset} of the file: {reason_of(error)}. Copy or make the file again."
                )
        return f"{subject}: {reason}. Copy or make the file again."


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


def _column_bytes(chunk: Any, file: ByteFile) -> int:
    """Memory for the pages of one column: each as stored and unpacked, and a dictionary with its values."""
    most: int = chunk.total_uncompressed_size
    page, dictionary = _page_bytes(chunk.data_page_offset, file), 0
    if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
        dictionary = min(most, _page_bytes(chunk.dictionary_page_offset, file))
        if most - dictionary > _INDEX_BYTES * chunk.num_values:
            # The dictionary grew too large and was given up: pages after the first hold the values themselves.
            page = max(page, _USUAL_PAGE_BYTES)
    return 2 * min(most, page) + 2 * dictionary


def _page_bytes(offset: int, file: ByteFile) -> int:
    """Unpacked size of the page at an offset, from its header: a Thrift struct whose second number it is."""
    if is_remote(file.name):
        return _USUAL_PAGE_BYTES
    header = read_bytes(file, offset, 16)
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


def _buffer_bytes(num_columns: int) -> int:
    return min(max(_BUFFERS_BYTES // max(1, num_columns), _LEAST_BUFFER_BYTES), _MOST_BUFFER_BYTES)


def _describe(file: Any, field: Any, wanted: set[str | None] | None) -> Column:
    """A column; lists that are to be used are taken to be as long as those of the first row."""
    first = None
    if is_list(field.type) and (wanted is None or field.name in wanted):
        batches = file.iter_batches(batch_size=1, columns=[field.name], use_threads=False)
        first = next((batch.column(0) for batch in batches), None)
    return describe_type(field.name, field.type, first)
