"""CSV files: read once from beginning to end by Arrow, and from then on from a file of numbers in the spool folder.

Rows of text have no fixed length, so that the millionth can be found only by reading those before it, and parsing them
in every epoch takes longer than training on them. So the chosen columns are converted when the file is opened, block
after block in bounded memory, to an Arrow file of compressed batches, which any process can read anywhere; it takes
about as much room as the text. The next opening finds it there, as long as the file and the choice are the same.

What a column holds is guessed from the first rows. Where a later row disagrees, labels become floating-point numbers,
then text; in features that is an error. Python's `csv` reads up to a row that Arrow refuses, to name its line.
"""

import contextlib
import csv
import gzip
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from memfit.core.env import spool_folder
from memfit.core.errors import BadFile, BadInput
from memfit.core.progress import announce
from memfit.core.units import KIB, MIB, format_size
from memfit.data.files import BlockReader, ByteFile, absolute, fingerprint_of, is_remote, open_file, read_bytes, stat_of
from memfit.data.journal import Journal, write_whole
from memfit.data.source import Storage
from memfit.data.sources.arrow import ArrowSource
from memfit.data.sources.csv_dialect import MISSING, Dialect, find_dialect
from memfit.data.sources.spool import DESCRIPTION, SpooledSource, make_once
from memfit.data.sources.tables import MOST_CLASSES, Column, Names, TableField, choose_fields, fill, load, sort_classes

_GZIP_MAGIC = b"\x1f\x8b"
_HEAD_BYTES = 64 * KIB
# Arrow reads 32 blocks ahead. It takes as long to begin a column as to read half a KiB of it.
_BLOCK_BYTES = 64 * KIB
_COLUMN_BYTES = 256
_LONGEST_RECORD = 16 * MIB
# Of the Arrow file: what is unpacked together. The places of all batches are held in memory.
_BATCH_BYTES = 128 * KIB
_MOST_BATCHES = 2**17
_LONGEST_CLASSES = 16 * MIB
# Smaller files are converted before anybody has read that they are.
_ANNOUNCED_BYTES = 4 * MIB
_SHOWN = 60
_FORMAT = 1
_ROWS = "rows.arrow"
# Types to read a column as and to store it as, the first that holds all cells. Only floating-point numbers can be
# missing, and only they are features.
_TRIALS = {
    "int": (("int64", "int64"), ("float64", "float64"), ("string", "string")),
    "float": (("float64", "float64"), ("string", "string")),
    "bool": (("bool", "int64"), ("bool", "float64"), ("string", "string")),
    "": (("float64", "float64"), ("bool", "float64"), ("string", "string")),
    "text": (("string", "string"),),
}
_DTYPES = {
    "int": np.dtype(np.int64),
    "bool": np.dtype(np.bool_),
    "float": np.dtype(np.float64),
    "": np.dtype(np.float64),
}


class CsvSource(SpooledSource):
    """Rows of a CSV file (.csv, .tsv, either of them packed by gzip), which the first opening converts.

    Delimiter (comma, semicolon, tab, bar), decimal mark and names of the columns are found from the first rows. Where
    the file has no names they are "column 0", "column 1" and so on, and numbers alone name them too. Empty cells and
    the usual words for them ("NA", "null") are NaN. Blank lines are passed over, and so are lines at the beginning that
    start with "#". `paths` is that of the Arrow file that was made of it.
    """

    def __init__(self, path: str | os.PathLike[str], *, columns: Names = None, labels: str | None = None) -> None:
        load("pyarrow.csv", f"{os.fspath(path)!r} is a CSV file")
        file = open_file(path)
        with _unpacking(file.name):
            dialect = find_dialect(_read_head(file), file.name)
        table = [
            Column(name, _DTYPES.get(kind), is_text=kind == "text", stored_as=kind or "empty")
            for name, kind in zip(dialect.names, dialect.kinds, strict=True)
        ]
        if not dialect.has_header:
            columns = None if columns is None else list(map(_by_number, columns))
            labels = None if labels is None else _by_number(labels)
        parts = choose_fields(table, columns=columns, labels=labels, source=file.name)
        place = absolute(os.fspath(path))
        chosen = [(part.field.name, [dialect.names[column] for column in part.columns]) for part in parts]
        # Files of one name and size in two folders are two; an address is taken without its signature.
        key = fingerprint_of([place], "csv", _FORMAT, file.name if is_remote(place) else place, chosen)

        def convert(folder: Path) -> None:
            if file.size >= _ANNOUNCED_BYTES:
                announce(f"converting {file.name} to {str(folder)!r}, once. Later runs find it there.")
            before = stat_of(place)
            _Conversion(file, dialect, parts).run(Journal(folder))
            if stat_of(place) != before:
                Journal(folder).discard()
                raise BadFile(
                    f"{file.name!r} was changed while it was read. Wait until it is written, and start again."
                )
            Journal(folder).finish()

        source = make_once(key, lambda folder: _open_converted(folder, parts), convert, file.name, file.size)
        fields = tuple(
            replace(stored, name=part.field.name, is_tabular=part.field.is_tabular)
            for stored, part in zip(source.fields, parts, strict=True)
        )
        # Changes with the file, and with what is chosen of it.
        fingerprint = fingerprint_of([place], "csv", chosen)
        super().__init__(source, fields, [Path(source.name)], name=file.name, fingerprint=fingerprint)
        self._is_packed = read_bytes(file, 0, 2) == _GZIP_MAGIC

    def storage(self) -> Storage:
        text = "text, compressed with gzip" if self._is_packed else "text, one line a sample"
        return Storage((f"{text}; converted once to Arrow in {spool_folder()!r}, and read from there",), is_text=True)


def _open_converted(folder: Path, parts: Sequence[TableField]) -> ArrowSource | None:
    """What was made before; None where it isn't there or isn't whole."""
    labels = next((str(number) for number, part in enumerate(parts) if part.field.is_label), None)
    try:
        classes = tuple(json.loads((folder / DESCRIPTION).read_bytes())["classes"])
        return ArrowSource(folder / _ROWS, columns=["0"], labels=labels, classes=classes)
    except (OSError, ValueError, KeyError, TypeError, BadFile):
        return None


def _by_number(name: str) -> str:
    """The name of a column; a number stands for the column without another one at that place."""
    return f"column {name}" if isinstance(name, str) and name.isdecimal() else name


@contextlib.contextmanager
def _unpacking(name: str) -> Iterator[None]:
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise BadFile(
            f"{name!r} can't be unpacked: {str(error).rstrip('.')}. It is truncated or damaged; copy or make it again."
        ) from error


def _open_bytes(file: ByteFile) -> io.BufferedIOBase:
    """The text of a file; whether it is packed is told by its first bytes, whatever its name."""
    reader = io.BufferedReader(BlockReader(file))
    return gzip.GzipFile(fileobj=reader, mode="rb") if reader.peek(2).startswith(_GZIP_MAGIC) else reader


def _read_head(file: ByteFile) -> bytes:
    """The first lines."""
    text = _open_bytes(file)
    head = text.read(_HEAD_BYTES)
    while len(head.splitlines()) < 3 and len(head) < _LONGEST_RECORD and (more := text.read(len(head))):
        head += more
    return head[: head.rfind(b"\n") + 1 or len(head)] if text.read(1) else head


class _Rows(io.BufferedIOBase):
    """The text from the first row on, and behind it a row of empty cells.

    That row comes out by itself, unless a quote is opened before it and never closed. No block ends between a carriage
    return and what follows: Arrow (26.0.1) takes a line feed at the beginning of a block for the rest of a line end,
    also inside of quotes.
    """

    def __init__(self, file: ByteFile, dialect: Dialect) -> None:
        self._text = _open_bytes(file)
        self._text.read(dialect.start)
        self._closing = b"\n" + dialect.delimiter.join(['""'] * len(dialect.names)).encode() + b"\n"
        self._kept = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        size = sys.maxsize if size is None or size < 0 else size
        data = self._kept + self._text.read(size - len(self._kept))
        self._kept = b""
        if not data:
            data, self._closing = self._closing[:size], self._closing[size:]
        if len(data) > 1 and data.endswith(b"\r"):
            data, self._kept = data[:-1], b"\r"
        return data

    read1 = read


class _Misfit(Exception):
    """A cell of a column, in a row counted from 1, that isn't of the type that the column was read as."""


class _TooLong(Exception):
    """A record is longer than Arrow's blocks; says in which row, counted from 1."""


class _Conversion:
    """Makes an Arrow file of a CSV file: one column for each field."""

    def __init__(self, file: ByteFile, dialect: Dialect, parts: Sequence[TableField]) -> None:
        self._file = file
        self._dialect = dialect
        self._parts = parts
        # Of each column: types to read it as, and to store it as.
        self._trials = {
            column: [
                (read, stored)
                for read, stored in _TRIALS[dialect.kinds[column]]
                if part.field.is_label or stored == "float64"
            ]
            for part in parts
            for column in part.columns
        }
        self._block_bytes = max(_BLOCK_BYTES, min(_COLUMN_BYTES * len(dialect.names), 1 * MIB))
        self._num_rows = 0
        self._classes: set[str] = set()

    def run(self, journal: Journal) -> None:
        """Leaves a folder with the Arrow file and what is known of it in the journal's place for unfinished files."""
        journal.discard()
        journal.part.mkdir()
        try:
            is_written = False
            while not is_written:
                try:
                    with _unpacking(self._file.name):
                        self._write(journal.part / _ROWS)
                    is_written = True
                except _TooLong as problem:
                    if self._block_bytes >= _LONGEST_RECORD:
                        raise self._bad_row(problem.args[0]) from None
                    self._block_bytes *= 2
                except _Misfit as misfit:
                    column, row = misfit.args
                    if len(self._trials[column]) == 1:
                        raise self._bad_row(row, "", column) from None
                    del self._trials[column][0]
            if not self._num_rows:
                raise BadFile(f"{self._file.name!r} has names of columns but no rows. At least one row was expected.")
            classes = sort_classes(self._classes, self._parts[-1].field.name, self._file.name)
            description = {"name": self._file.name, "classes": classes}
            write_whole(journal.part / DESCRIPTION, json.dumps(description).encode())
        except BaseException:
            journal.discard()
            raise
        finally:
            self._file.close()

    def _write(self, path: Path) -> None:
        import pyarrow as pa

        self._num_rows = 0
        self._classes = set()
        fields = []
        for number, part in enumerate(self._parts):
            kind = pa.type_for_alias(self._trials[part.columns[0]][0][1])
            kind = kind if part.field.is_label else pa.list_(kind, len(part.columns))
            fields.append(pa.field(str(number), kind))
        schema = pa.schema(fields)
        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        batch_bytes = max(_BATCH_BYTES, self._file.size // _MOST_BATCHES)
        each = max(1, batch_bytes // (8 * len(self._trials)))
        with pa.OSFile(os.fsencode(path), "wb") as sink, pa.ipc.new_stream(sink, schema, options=options) as writer:
            for batch in self._batches():
                columns = dict(zip(sorted(self._trials), batch.columns, strict=True))
                arrays = [self._field(part, columns) for part in self._parts]
                writer.write_table(pa.table(arrays, schema=schema), max_chunksize=each)
                self._num_rows += batch.num_rows
        with open(path, "rb") as written:
            os.fsync(written.fileno())

    def _batches(self) -> Iterator[Any]:
        """The chosen columns, in the order of the file, some rows at a time."""
        import pyarrow as pa
        import pyarrow.csv

        names = [str(column) for column in range(len(self._dialect.names))]
        chosen = sorted(self._trials)
        last = None
        try:
            reader = pyarrow.csv.open_csv(
                _Rows(self._file, self._dialect),
                read_options=pyarrow.csv.ReadOptions(
                    use_threads=False, block_size=self._block_bytes, column_names=names
                ),
                parse_options=pyarrow.csv.ParseOptions(delimiter=self._dialect.delimiter, newlines_in_values=True),
                convert_options=pyarrow.csv.ConvertOptions(
                    column_types={names[column]: pa.type_for_alias(self._trials[column][0][0]) for column in chosen},
                    include_columns=[names[column] for column in chosen],
                    null_values=MISSING,
                    decimal_point=self._dialect.decimal,
                ),
                # Arrow's own allocator keeps what it once had.
                memory_pool=pa.system_memory_pool(),
            )
            for batch in reader:
                if not batch.num_rows:
                    # Nothing but blank lines.
                    continue
                if last is not None:
                    yield last
                last = batch
        except pa.ArrowInvalid as error:
            matches = (re.search(pattern, str(error)) for pattern in (r"column #(\d+)", r"Row #(\d+)"))
            column, row = (None if match is None else int(match[1]) for match in matches)
            if column is not None and row is not None:
                raise _Misfit(column, row) from None
            row = row or self._num_rows + (0 if last is None else last.num_rows) + 1
            if "straddling" in str(error):
                raise _TooLong(row) from None
            raise self._bad_row(row, str(error)) from None
        assert last is not None
        end = last.num_rows - 1
        if any(last.column(number)[end].as_py() not in (None, "") for number in range(len(chosen))):
            raise self._bad_row(self._num_rows + end + 1)
        if end:
            yield last.slice(0, end)

    def _field(self, part: TableField, columns: dict[int, Any]) -> Any:
        import pyarrow as pa

        if not part.field.is_label:
            values = [columns[place].cast(pa.float64()).to_numpy(zero_copy_only=False) for place in part.columns]
            matrix = np.empty((len(values[0]), len(values)))
            fill(matrix, values)
            return pa.FixedSizeListArray.from_arrays(matrix.reshape(-1), len(values))
        place = part.columns[0]
        column, (_, stored) = columns[place], self._trials[place][0]
        if stored == "string":
            self._note_classes(column, place)
        elif stored == "int64" and column.null_count:
            raise _Misfit(place, self._num_rows + 1)
        return column.cast(stored)

    def _note_classes(self, column: Any, place: int) -> None:
        self._classes.update(column.unique().to_pylist())
        name, source = self._dialect.names[place], self._file.name
        if "" in self._classes:
            row = self._num_rows + 1 + column.index("").as_py()
            raise self._bad_row(
                row, f"column {name!r} is empty, and labels are needed in every row. Fill it in, or take such rows out"
            )
        if len(self._classes) > MOST_CLASSES:
            sort_classes(self._classes, name, source)
        if sum(map(len, self._classes)) > _LONGEST_CLASSES:
            raise BadInput(
                f"column {name!r} of {source!r} has too long and too many different strings to be classes. Name "
                "another column as labels, or store numbers."
            )

    def _bad_row(self, row: int, reason: str = "", column: int | None = None) -> BadFile:
        """An error that names the line of a row, counted from 1, and what is wrong in it."""
        names, delimiter = self._dialect.names, self._dialect.delimiter
        line, cells, is_closed = self._find_row(row)
        if not is_closed:
            text = (
                f"a quote is opened and never closed, or a row has more than {format_size(_LONGEST_RECORD)}: "
                f"{_shown(delimiter.join(cells))}"
            )
        elif len(cells) != len(names):
            mark = {"\t": "tabs"}.get(delimiter, repr(delimiter))
            text = (
                f"{len(cells)} cells (separated by {mark}), where {len(names)} were expected as in the first row: "
                f"{_shown(delimiter.join(cells))}"
            )
        elif column is not None and re.search("[\udc80-\udcff]", cells[column]):
            text = (
                f"column {names[column]!r} has {_shown(cells[column])}, which isn't UTF-8. Convert the file, for "
                "instance with `iconv -f LATIN1 -t UTF-8`"
            )
        elif column is not None:
            text = (
                f"column {names[column]!r} has {_shown(cells[column])}, where other rows have numbers. Correct the "
                "row, or choose other columns with --columns (columns=)"
            )
        else:
            text = reason
        return BadFile(f"{self._file.name!r}, line {line}: {text}.")

    def _find_row(self, row: int) -> tuple[int, list[str], bool]:
        """Line and cells of a row, and whether all its quotes are closed."""
        rows: Any = _Rows(self._file, self._dialect)
        text = io.TextIOWrapper(rows, "utf-8", errors="surrogateescape", newline="")
        reader = csv.reader(text, delimiter=self._dialect.delimiter)
        number = line = 0
        try:
            for cells in reader:
                number += bool(cells)
                if number == row:
                    return self._dialect.line + line, cells, next(filter(None, reader), None) is not None
                line = reader.line_num
        except csv.Error:
            # A cell beyond what Python's csv takes for one.
            pass
        return self._dialect.line + line, [], False


def _shown(text: str) -> str:
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
