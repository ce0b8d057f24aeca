"""CSV files: numbers written as text, which have to be read as text and turned back.

Rows are found through an index of blocks (csv_index.py). To read a run of them, the bytes of its blocks are read and
parsed by Arrow, which works without Python's lock; the rest of the first and last block is thrown away, so that runs
that begin and end with blocks waste nothing. Numbers that can be told only from the whole file, such as what a column
is and which classes its labels have, come from the index, and never change from block to block.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from memfit.core.errors import BadFile
from memfit.core.units import KIB
from memfit.data.files import fingerprint_of
from memfit.data.source import Array, Field, Layout
from memfit.data.sources.csv_bytes import PackedBytes, PlainBytes, open_bytes
from memfit.data.sources.csv_cache import load_index
from memfit.data.sources.csv_dialect import MISSING, is_number
from memfit.data.sources.csv_index import Index, arrow, check_widths, parse
from memfit.data.sources.csv_records import Malformed, iterate_cells
from memfit.data.sources.table_fields import Column, Part, choose_fields, fill

# Blocks that follow each other are parsed together up to this size: the more at once, the less each call weighs.
_PIECE_BYTES = 512 * KIB
# Memory that parsing takes for each byte of text: the text twice, and for a cell of two bytes its place and its number.
_PARSING_FACTOR = 8
_DTYPES = {
    "int": np.dtype(np.int64),
    "float": np.dtype(np.float64),
    "bool": np.dtype(np.bool_),
    "": np.dtype(np.float64),
}
_NAMED = 5


class CsvSource:
    """Rows of a CSV file.

    Args:
        text: of the file.
        index: of its rows.
        parts: its fields.

    Attributes:
        notes: what a user should know of how the file was understood.
    """

    def __init__(self, text: PlainBytes | PackedBytes, index: Index, parts: tuple[Part, ...]) -> None:
        self._text = text
        self._index = index
        self._parts = parts
        self._piece_bytes = max(_PIECE_BYTES, int(np.diff(index.offsets).max()))
        self._places = sorted({place for part in parts for place in part.columns})
        self._order = {place: number for number, place in enumerate(self._places)}
        self._types = {place: index.columns[place].kind for place in self._places}
        labelled = [part.columns[0] for part in parts if part.has_classes]
        self._classes = index.classes[labelled[0]] if labelled else ()
        for place in labelled:
            self._types[place] = "text"
        self._numbers: dict[str, int] | None = None
        self.notes = _notes(index, parts)

    @property
    def name(self) -> str:
        """Its path, as the user gave it."""
        return self._text.name

    @property
    def fields(self) -> tuple[Field, ...]:
        """The matrix of the features, then the labels."""
        return tuple(part.field for part in self._parts)

    @property
    def num_samples(self) -> int:
        """Its rows, without that of the names."""
        return int(self._index.rows[-1])

    @property
    def layout(self) -> Layout:
        """Blocks of rows."""
        is_packed = self._text.is_packed
        return Layout(
            edges=self._index.rows,
            scratch_bytes=_PARSING_FACTOR * self._piece_bytes,
            is_sequential=is_packed,
            reason=f"{self.name} is packed by gzip, and can only be unpacked from its beginning" if is_packed else "",
        )

    @property
    def classes(self) -> tuple[str, ...]:
        """The different strings among the labels, sorted; () where labels are numbers."""
        return self._classes

    def fingerprint(self) -> str:
        """Changes with the file, and with what is chosen of it."""
        names = self._index.dialect.names
        chosen = [(part.field.name, [names[place] for place in part.columns]) for part in self._parts]
        return fingerprint_of([self._text.path], "csv", chosen)

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        """Fills `out` with rows `start` to `stop`.

        Raises:
            BadFile: a row can't be read; says in which line.
        """
        rows, offsets = self._index.rows, self._index.offsets
        first, end = self._blocks(start, stop)
        while first < end:
            after = max(first + 1, int(np.searchsorted(offsets, offsets[first] + self._piece_bytes, "right")) - 1)
            after = min(after, end)
            low, high = max(start, int(rows[first])), min(stop, int(rows[after]))
            table = self._parse(first, after).slice(low - int(rows[first]), high - low)
            for part, array in zip(self._parts, out, strict=True):
                values = [self._values(table.column(self._order[place]), place) for place in part.columns]
                fill(array[low - start : high - start], values)
            first = after

    def drop(self, start: int, stop: int) -> None:
        """Gives the kernel's pages of these rows back."""
        first, end = self._blocks(start, stop)
        self._text.drop(int(self._index.offsets[first]), int(self._index.offsets[end]))

    def close(self) -> None:
        """Closes the file; a later read opens it again."""
        self._text.close()

    def _blocks(self, start: int, stop: int) -> tuple[int, int]:
        """The first block with some of these rows, and the one after the last."""
        rows = self._index.rows
        first = int(np.searchsorted(rows, start, "right")) - 1
        return first, max(first, int(np.searchsorted(rows, stop, "left")))

    def _parse(self, first: int, after: int) -> Any:
        """The table of some blocks."""
        index = self._index
        data = self._text.read(int(index.offsets[first]), int(index.offsets[after]))
        try:
            table = parse(data, index.dialect, self._types, self._places)
        except arrow().ArrowInvalid as error:
            raise self._bad_row(bytes(data), int(index.lines[first]), str(error)) from None
        expected = int(index.rows[after] - index.rows[first])
        if table.num_rows != expected:
            raise self._changed(
                f"and has {table.num_rows} rows from line {index.lines[first]} on instead of {expected}"
            )
        return table

    def _values(self, column: Any, place: int) -> Array:
        kind, facts = self._types[place], self._index.columns[place]
        if kind == "text":
            return self._class_numbers(column)
        if column.null_count and not facts.num_missing:
            raise self._changed(f"and has empty cells in column {self._index.dialect.names[place]!r}, which had none")
        if kind == "bool":
            column = column.cast(arrow().float64() if facts.num_missing else arrow().uint8())
        # Of integers with gaps this makes floating-point numbers, and NaN of the gaps.
        found: Array = column.to_numpy()
        return found

    def _class_numbers(self, column: Any) -> Array:
        if self._numbers is None:
            self._numbers = {name: number for number, name in enumerate(self._classes)}
        encoded = column.combine_chunks().dictionary_encode()
        names = encoded.dictionary.to_pylist()
        unknown = [name for name in names if name not in self._numbers]
        if unknown:
            raise self._changed(f"and has the label {unknown[0]!r}, which it hadn't")
        numbers = np.array([self._numbers[name] for name in names], np.int64)
        found: Array = numbers[encoded.indices.to_numpy()]
        return found

    def _bad_row(self, data: bytes, line: int, reason: str) -> BadFile:
        """An error for rows that could be read when the file was opened."""
        if not data.endswith(b"\n"):
            data += b"\n"
        dialect = self._index.dialect
        try:
            check_widths(data, dialect)
            for position, cells in iterate_cells(data, dialect.delimiter):
                for place, kind in self._types.items():
                    cell = cells[place]
                    if kind != "text" and cell not in MISSING and not is_number(cell, dialect.decimal):
                        raise Malformed(position, f"column {dialect.names[place]!r} has {cell!r}, which is no number")
        except Malformed as problem:
            line += data.count(b"\n", 0, problem.position)
            return self._changed(f"line {line}: {problem.text}")
        return self._changed(f"from line {line} on: {reason}")

    def _changed(self, found: str) -> BadFile:
        return BadFile(
            f"{self.name!r} was changed since it was opened, {found}. Leave the file as it is while it is read, "
            "or start again."
        )

    def __getstate__(self) -> tuple[Any, ...]:
        return self._text, self._index, self._parts

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]


def open_csv(
    path: str | os.PathLike[str], *, columns: Sequence[str] | str | None, labels: Sequence[str] | str | None
) -> CsvSource:
    """A CSV file (.csv, .tsv, either of them packed by gzip), of which the first opening looks through all rows.

    Delimiter (comma, semicolon, tab, bar), decimal mark and names of the columns are found from the first rows. Where
    the file has no names they are "column 0", "column 1" and so on, and numbers alone name them too. Empty cells and
    the usual words for them ("NA", "null") are NaN. Blank lines are passed over, and so are lines at the beginning that
    start with "#".

    Args:
        path: of the file, or its address.
        columns: names of the columns to use; all if None.
        labels: names of those that are labels.

    Raises:
        BadFile: a row can't be read; says in which line.
        BadInput: there are no such columns, or they can't be used in this way.
    """
    arrow()
    text = open_bytes(path)
    label_names = [labels] if isinstance(labels, str) else [name for name in labels or () if isinstance(name, str)]
    numbered = [f"column {name}" for name in label_names if name.isdecimal()]
    index = load_index(text, [*label_names, *numbered])
    columns, labels = _by_number(columns, index), _by_number(labels, index)
    _check_numbers(index, columns, labels, text.name)
    table = [_column(index, place) for place in range(len(index.columns))]
    return CsvSource(text, index, choose_fields(table, columns=columns, labels=labels, source=text.name))


def _by_number(given: Any, index: Index) -> Any:
    """Names with numbers alone replaced by those of columns that have no other name."""
    if isinstance(given, str):
        given = [given]
    if given is None or index.dialect.has_header:
        return given
    return [f"column {name}" if isinstance(name, str) and name.isdecimal() else name for name in given]


def _check_numbers(index: Index, columns: Any, labels: Any, source: str) -> None:
    """Raises BadFile where a column of features has text in some row."""
    for name, facts in zip(index.dialect.names, index.columns, strict=True):
        is_feature = (columns is None or name in columns) and not (labels and name in labels)
        if facts.odd_line and is_feature:
            raise BadFile(
                f"{source!r}, line {facts.odd_line}: column {name!r} has {facts.odd_cell}, where other rows have "
                "numbers. Correct the row, or choose other columns with columns=."
            )


def _column(index: Index, place: int) -> Column:
    name, facts = index.dialect.names[place], index.columns[place]
    if facts.kind == "text":
        return Column(name, None, is_text=True, stored_as="text")
    dtype = np.dtype(np.float64) if facts.num_missing else _DTYPES[facts.kind]
    return Column(name, dtype, stored_as=facts.kind or "empty")


def _notes(index: Index, parts: Sequence[Part]) -> tuple[str, ...]:
    names = index.dialect.names
    used = [place for part in parts for place in part.columns]
    notes = []
    missing = [place for place in used if index.columns[place].num_missing and index.columns[place].kind != "text"]
    for place in missing[:_NAMED]:
        facts = index.columns[place]
        whole = ", and its whole numbers are floating-point ones for that" if facts.kind in ("int", "bool") else ""
        notes.append(f"column {names[place]!r} has {facts.num_missing:,} empty cells, which are NaN{whole}")
    if len(missing) > _NAMED:
        notes.append(f"{len(missing) - _NAMED} more columns have empty cells, which are NaN")
    for place in used:
        facts = index.columns[place]
        if facts.odd_line:
            notes.append(
                f"column {names[place]!r} has numbers and text (line {facts.odd_line}: {facts.odd_cell}), and all of "
                "them are names of classes"
            )
    if not index.dialect.has_header:
        notes.append('the first line has no names: columns are "0", "1" and so on')
    elif names[0] == "column 0" and 0 in used:
        notes.append("the first column has no name, as the row numbers that pandas writes; columns= can leave it out")
    if index.dialect.decimal == ",":
        notes.append("numbers have a decimal comma")
    return tuple(notes)
