"""What has to be known of a CSV file before any of its rows can be read by itself.

Rows of text have no fixed length, so that the millionth can be found only by one who has seen those before it. One pass
over the file, in bounded memory, notes where every block of rows begins, checks every row, and finds what the columns
are. What is kept are a few numbers a block, in arrays that forked workers share.
"""

import dataclasses
import functools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memfit.core.errors import BadFile, BadInput, MissingDependency
from memfit.core.units import KIB, MIB, format_size
from memfit.data.source import Array
from memfit.data.sources.csv_bytes import PackedBytes, PlainBytes
from memfit.data.sources.csv_dialect import MISSING, Dialect, find_dialect, is_number
from memfit.data.sources.csv_records import Malformed, find_stop, is_unclosed, iterate_cells, split_records
from memfit.data.sources.table_fields import MOST_CLASSES, sort_classes

BLOCK_BYTES = 128 * KIB
# The edges of all blocks are held in memory.
_MOST_BLOCKS = 2**19
_CHUNK_BYTES = 512 * KIB
# Arrow takes as long to begin a column as to read half a KiB of it, so that tables of many columns are read in larger
# blocks, up to a limit.
_COLUMN_BYTES = 512
_MOST_BLOCK_BYTES = 4 * MIB
_LONGEST_RECORD = 16 * MIB
_LONGEST_CLASSES = 16 * MIB
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """What a column holds.

    Attributes:
        kind: "int", "float", "bool" or "text"; "" where all its cells are empty.
        num_missing: cells that are empty or stand for nothing, such as "NA"; not counted in text.
        odd_line: line of the first cell that is text where most are numbers; 0 where there is none.
        odd_cell: what it is.
    """

    kind: str = ""
    num_missing: int = 0
    odd_line: int = 0
    odd_cell: str = ""


@dataclass(frozen=True, slots=True)
class Index:
    """Where the rows of a file are, and what is in them.

    Attributes:
        dialect: how it is written.
        offsets: of the first byte of each block of rows and, last, after the last row.
        rows: number of the first row of each block and, last, how many there are.
        lines: in the file, counted from 1, of the first row of each block.
        columns: in the order of the file.
        classes: different values of the columns that were asked for and are text, by place, in sorted order.
    """

    dialect: Dialect
    offsets: Array
    rows: Array
    lines: Array
    columns: tuple[ColumnFacts, ...]
    classes: dict[int, tuple[str, ...]]


@functools.cache
def arrow() -> Any:
    """The modules `pyarrow`, with `pyarrow.csv` and `pyarrow.compute` imported.

    Raises:
        MissingDependency: it isn't installed.
    """
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.csv
    except ImportError as error:
        raise MissingDependency(
            f"CSV files are read with pyarrow, which can't be imported ({error}). Install it with "
            "`pip install pyarrow`."
        ) from None
    return pyarrow


def parse(data: Any, dialect: Dialect, types: dict[int, str], wanted: Sequence[int] | None = None) -> Any:
    """A table of whole records, its columns named by their places in the file.

    Args:
        data: bytes of records, at least one of which isn't a blank line.
        dialect: how they are written.
        types: kinds of columns that are known; others are found from these records.
        wanted: places of the columns to give; all if None.
    """
    pa = arrow()
    # A few sizes for all, so that options can be used again.
    block_bytes = 1 << max(16, len(data).bit_length())
    chosen = tuple(range(len(dialect.names)) if wanted is None else wanted)
    read, cut, convert = _options(dialect, tuple(sorted(types.items())), chosen, block_bytes)
    # The streaming reader costs less a call than the other one, which starts a thread each time.
    reader = pa.csv.open_csv(
        pa.BufferReader(pa.py_buffer(data)),
        read_options=read,
        parse_options=cut,
        convert_options=convert,
        # Arrow's own allocator keeps what it once had, which is several times what one block takes.
        memory_pool=pa.system_memory_pool(),
    )
    return reader.read_all()


@functools.lru_cache(maxsize=64)
def _options(
    dialect: Dialect, types: tuple[tuple[int, str], ...], wanted: tuple[int, ...], block_bytes: int
) -> tuple[Any, Any, Any]:
    pa = arrow()
    known = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "text": pa.string(), "": pa.float64()}
    names = [str(place) for place in range(len(dialect.names))]
    return (
        pa.csv.ReadOptions(use_threads=False, block_size=block_bytes, column_names=names),
        pa.csv.ParseOptions(delimiter=dialect.delimiter, newlines_in_values=True),
        pa.csv.ConvertOptions(
            column_types={names[place]: known[kind] for place, kind in types},
            include_columns=[names[place] for place in wanted],
            null_values=MISSING,
            decimal_point=dialect.decimal,
        ),
    )


def build_index(text: PlainBytes | PackedBytes, labels: Sequence[str], size_bytes: int) -> Index:
    """Looks through a file.

    Args:
        text: of the file.
        labels: names of columns whose different values are to be known if they are text.
        size_bytes: of the file.

    Raises:
        BadFile: a row can't be read; says in which line.
        BadInput: a column of text has too many different values to be classes.
    """
    forced: frozenset[int] = frozenset()
    odd: dict[int, ColumnFacts] = {}
    while True:
        looking = _Pass(text.name, tuple(labels), forced, max(BLOCK_BYTES, size_bytes // _MOST_BLOCKS))
        for data, is_last in _chunks(text):
            looking.add(data, is_last)
        found = looking.finish()
        # Of a column of labels that only later turned out to be text, classes were missed.
        missed = looking.labels_that_are_text() - found.classes.keys()
        if not missed:
            columns = [odd.get(place, facts) for place, facts in enumerate(found.columns)]
            return dataclasses.replace(found, columns=tuple(columns))
        forced |= missed
        odd = {place: found.columns[place] for place in forced if found.columns[place].odd_line} | odd


def _chunks(text: PlainBytes | PackedBytes) -> Iterator[tuple[bytes, bool]]:
    """Chunks of a file, and for each whether it is the last; one without bytes where the file has none."""
    ahead: bytes | None = None
    for chunk in text.chunks(_CHUNK_BYTES):
        if ahead is not None:
            yield ahead, False
        ahead = chunk
    yield (b"" if ahead is None else ahead), True


@dataclass(slots=True)
class _Pass:
    """One look through a file, chunk after chunk."""

    name: str
    labels: tuple[str, ...]
    forced: frozenset[int]
    block_bytes: int
    least_bytes: int = 0
    dialect: Dialect | None = None
    # Of the first byte that isn't used yet: its offset, row and line.
    offset: int = 0
    num_rows: int = 0
    line: int = 1
    left: bytes = b""
    num_bytes: int = 0
    offsets: "array[int]" = field(default_factory=lambda: array("q"))
    rows: "array[int]" = field(default_factory=lambda: array("q"))
    lines: "array[int]" = field(default_factory=lambda: array("q"))
    columns: list[ColumnFacts] = field(default_factory=list)
    classes: dict[int, set[str]] = field(default_factory=dict)

    def add(self, chunk: bytes, is_last: bool) -> None:
        data = self.left + chunk
        self.num_bytes += len(chunk)
        if is_last and data and not data.endswith(b"\n"):
            data += b"\n"
        try:
            if self.dialect is None and not self._begin(data, is_last):
                self.left = data
                return
            if len(data) < self.least_bytes and not is_last:
                self.left = data
                return
            data = data[self._skipped() :]
            self._use(data, is_last)
        except Malformed as problem:
            raise self.bad(data, problem.position, problem.text) from None

    def finish(self) -> Index:
        assert self.dialect is not None
        if not self.num_rows:
            raise BadFile(f"{self.name!r} has names of columns but no rows. At least one row was expected.")
        while self.rows and self.rows[-1] == self.num_rows:
            # Nothing but blank lines at the end.
            self.rows.pop()
            self.offsets.pop()
            self.lines.pop()
        names = self.dialect.names
        classes = {place: sort_classes(found, names[place], self.name) for place, found in self.classes.items()}
        return Index(
            self.dialect,
            # The last line may have been given the end that it lacked.
            np.array([*self.offsets, min(self.offset, self.num_bytes)], np.int64),
            np.array([*self.rows, self.num_rows], np.int64),
            np.array(self.lines, np.int64),
            tuple(self.columns),
            {place: found for place, found in classes.items() if self.columns[place].kind == "text"},
        )

    def labels_that_are_text(self) -> set[int]:
        assert self.dialect is not None
        return {
            place
            for place, name in enumerate(self.dialect.names)
            if name in self.labels and self.columns[place].kind == "text"
        }

    def bad(self, data: bytes, position: int, text: str) -> BadFile:
        line = self.line + data.count(b"\n", 0, position)
        return BadFile(f"{self.name!r}, line {line}: {text}.")

    def _begin(self, data: bytes, is_last: bool) -> bool:
        """Finds how the file is written, once its first record is complete."""
        may_wait = not is_last and len(data) <= _LONGEST_RECORD
        end = data.rfind(b"\n") + 1
        if not end and not is_last:
            if may_wait:
                return False
            self._report_stop(data, 0)
        try:
            self.dialect = find_dialect(data[:end], self.name)
        except Malformed:
            if may_wait:
                return False
            raise
        self.columns = [ColumnFacts() for _ in self.dialect.names]
        self.least_bytes = min(_COLUMN_BYTES * len(self.columns), _MOST_BLOCK_BYTES)
        self.block_bytes = max(self.block_bytes, self.least_bytes)
        return True

    def _skipped(self) -> int:
        """Bytes before the first row, which are passed over once."""
        assert self.dialect is not None
        if self.offset >= self.dialect.start:
            return 0
        self.offset, self.line = self.dialect.start, self.dialect.line
        return self.dialect.start

    def _use(self, data: bytes, is_last: bool) -> None:
        assert self.dialect is not None
        self._check_bytes(data)
        ends, is_blank = split_records(data, self.dialect.delimiter)
        used = int(ends[-1]) if len(ends) else 0
        if used < len(data) and (is_last or len(data) - used > _LONGEST_RECORD):
            self._report_stop(data, used)
        num_rows = np.cumsum(~is_blank)
        if used and num_rows[-1]:
            self._look_at(data[:used], int(num_rows[-1]))
        self._note_blocks(data, ends, num_rows)
        self.offset += used
        self.num_rows += int(num_rows[-1]) if used else 0
        self.line += data.count(b"\n", 0, used)
        self.left = data[used:]

    def _check_bytes(self, data: bytes) -> None:
        zero = data.find(b"\0")
        if zero >= 0:
            raise Malformed(zero, "a byte of value zero, which text doesn't have. The file is damaged, or isn't CSV")
        if data.isascii():
            return
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as error:
            # A character may be cut in two where the chunk ends.
            if error.end < len(data) or len(data) - error.start > 3:
                raise Malformed(
                    error.start,
                    f"the byte 0x{data[error.start]:02x} isn't UTF-8. Convert the file, for instance with "
                    "`iconv -f LATIN1 -t UTF-8`",
                ) from None

    def _report_stop(self, data: bytes, start: int) -> None:
        stop = find_stop(data, start, "," if self.dialect is None else self.dialect.delimiter)
        if is_unclosed(data, stop):
            raise Malformed(stop, f"a quote is opened and never closed: {_shown(data[stop:])}")
        raise Malformed(start, f"a row of more than {format_size(_LONGEST_RECORD)}, which no CSV file should have")

    def _note_blocks(self, data: bytes, ends: Array, num_rows: Array) -> None:
        if not self.offsets:
            self._note_block(self.offset, 0, self.line)
        line, counted = self.line, 0
        while True:
            place = int(np.searchsorted(ends, self.offsets[-1] + self.block_bytes - self.offset))
            if place >= len(ends):
                return
            end = int(ends[place])
            line += data.count(b"\n", counted, end)
            counted = end
            self._note_block(self.offset + end, self.num_rows + int(num_rows[place]), line)

    def _note_block(self, offset: int, row: int, line: int) -> None:
        if self.rows and self.rows[-1] == row:
            # Nothing but blank lines since the last one.
            self.offsets[-1], self.lines[-1] = offset, line
            return
        self.offsets.append(offset)
        self.rows.append(row)
        self.lines.append(line)

    def _look_at(self, data: bytes, num_rows: int) -> None:
        """Checks the rows of a chunk and takes from them what their columns are."""
        assert self.dialect is not None
        types = {place: facts.kind for place, facts in enumerate(self.columns) if facts.kind}
        types |= dict.fromkeys(self.forced, "text")
        try:
            table = parse(data, self.dialect, types)
        except arrow().ArrowInvalid:
            check_widths(data, self.dialect)
            try:
                table = parse(data, self.dialect, dict.fromkeys(self.forced, "text"))
            except arrow().ArrowInvalid as error:
                raise Malformed(0, f"rows from here on can't be read: {error}") from None
        if table.num_rows != num_rows:
            raise Malformed(0, f"of {num_rows} rows from here on only {table.num_rows} can be told apart")
        for place in range(len(self.columns)):
            self._look_at_column(place, table.column(place), data)

    def _look_at_column(self, place: int, values: Any, data: bytes) -> None:
        assert self.dialect is not None
        before = self.columns[place]
        kind = _merged(before.kind, _kind(values.type))
        odd_line, odd_cell = before.odd_line, before.odd_cell
        if kind == "text" and before.kind != "text":
            strings = [value for value in values.slice(0, 1000).to_pylist() if str(value) not in MISSING]
            num_numbers = sum(is_number(str(value), self.dialect.decimal) for value in strings)
            if before.kind or 2 * num_numbers > len(strings):
                odd_line, odd_cell = self._find_text(data, place)
        num_missing = before.num_missing + values.null_count
        self.columns[place] = ColumnFacts(kind, num_missing, odd_line, odd_cell)
        if kind == "text" and self.dialect.names[place] in self.labels:
            self._note_classes(place, values, data, is_first=before == ColumnFacts() or place in self.forced)

    def _find_text(self, data: bytes, place: int) -> tuple[int, str]:
        assert self.dialect is not None
        for position, cells in iterate_cells(data, self.dialect.delimiter):
            cell = cells[place]
            if cell not in MISSING and not is_number(cell, self.dialect.decimal):
                return self.line + data.count(b"\n", 0, position), _shown(cell.encode())
        return 0, ""

    def _note_classes(self, place: int, values: Any, data: bytes, is_first: bool) -> None:
        assert self.dialect is not None
        if place not in self.classes:
            if not is_first:
                return
            self.classes[place] = set()
        found = self.classes[place]
        # Dates and the like were read as such, and are text as they are written.
        if values.type != arrow().string():
            values = parse(data, self.dialect, {place: "text"}, [place]).column(0)
        found.update(values.unique().to_pylist())
        name = self.dialect.names[place]
        if "" in found:
            for position, cells in iterate_cells(data, self.dialect.delimiter):
                if not cells[place]:
                    raise Malformed(
                        position,
                        f"column {name!r} is empty, and labels are needed in every row. Fill it in, or take such rows "
                        "out",
                    )
        if len(found) > MOST_CLASSES:
            sort_classes(found, name, self.name)
        if sum(map(len, found)) > _LONGEST_CLASSES:
            raise BadInput(
                f"column {name!r} of {self.name!r} has too long and too many different strings to be classes. Name "
                "another column as labels, or store numbers."
            )


def check_widths(data: bytes, dialect: Dialect) -> None:
    """Finds the first row that has too few or too many cells.

    Raises:
        Malformed: there is one.
    """
    expected = len(dialect.names)
    for position, cells in iterate_cells(data, dialect.delimiter):
        if len(cells) != expected:
            mark = {"\t": "tabs"}.get(dialect.delimiter, repr(dialect.delimiter))
            raise Malformed(
                position,
                f"{len(cells)} cells (separated by {mark}), where {expected} were expected as in the first row: "
                f"{_shown(dialect.delimiter.join(cells).encode())}",
            )


def _kind(arrow_type: Any) -> str:
    types = arrow().types
    if types.is_null(arrow_type):
        return ""
    if types.is_integer(arrow_type):
        return "int"
    if types.is_floating(arrow_type):
        return "float"
    return "bool" if types.is_boolean(arrow_type) else "text"


def _merged(first: str, second: str) -> str:
    if not first or not second or first == second:
        return first or second
    return "float" if {first, second} == {"int", "float"} else "text"


def _shown(data: bytes) -> str:
    text = data[: 4 * _SHOWN].decode("utf-8", errors="replace")
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
