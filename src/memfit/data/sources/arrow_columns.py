"""From columns of Arrow, in which Parquet and Feather files are read, to arrays of NumPy.

Numbers without gaps and lists of one length lie in Arrow's memory as they do in NumPy's, and are only looked at in
another way. What NumPy has no room for is refused where it is met, with the column and the row: missing integers, lists
of different lengths. A missing fraction becomes NaN, which means the same.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from memfit.core.errors import BadFile, BadInput
from memfit.data.files import absolute, fingerprint_of
from memfit.data.source import Array, Source
from memfit.data.sources.table_fields import MOST_CLASSES, Column, Part, fill, sort_classes


def describe_type(name: str, kind: Any, first: Any = None) -> Column:
    """What a column is to `choose_fields`."""
    import pyarrow as pa

    stored_as = str(kind) if len(str(kind)) <= 60 else f"{str(kind)[:60]}..."
    if isinstance(kind, pa.FixedShapeTensorType):
        is_in_order = kind.permutation is None or list(kind.permutation) == sorted(kind.permutation)
        dtype = number_dtype(kind.value_type) if is_in_order else None
        return Column(name, dtype, tuple(kind.shape), stored_as=stored_as)
    shape = []
    while is_list(kind):
        length = kind.list_size if pa.types.is_fixed_size_list(kind) else None
        if first is not None:
            length = len(first[0]) if length is None and len(first) and first[0].is_valid else length
            first = _flattened(first) if len(first) else first
        if length is None:
            return Column(name, None, stored_as=f"{stored_as}, without a first list to take the length from")
        shape.append(length)
        kind = kind.value_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if is_text(kind):
        return Column(name, None, tuple(shape), is_text=not shape, stored_as=stored_as)
    return Column(name, number_dtype(kind), tuple(shape), stored_as=stored_as)


def is_list(kind: Any) -> bool:
    """Whether values are lists."""
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_text(kind: Any) -> bool:
    """Whether values are strings, be they stored once each (a dictionary)."""
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def number_dtype(kind: Any) -> np.dtype[Any] | None:
    """NumPy's name for a type of numbers; None where values are something else."""
    import pyarrow as pa

    if pa.types.is_decimal(kind):
        return np.dtype(np.float64)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
        return dtype
    return None


class BatchReader:
    """Puts batches of Arrow into the caller's arrays.

    Args:
        source: what the user calls the file.
        table: all its columns.
        parts: the fields, and the columns that they are made of.
        classes: names of the classes, where labels are text.
    """

    def __init__(self, source: str, table: Sequence[Column], parts: Sequence[Part], classes: Sequence[str]) -> None:
        self._source = source
        self._table = table
        self._parts = parts
        self._classes = classes

    def put(self, batch: Any, row: int, out: Sequence[Array]) -> None:
        """Fills `out` with a batch that begins at sample `row`."""
        for part, array in zip(self._parts, out, strict=True):
            values = []
            for place in part.columns:
                name, shape = self._table[place].name, self._table[place].shape
                column = batch.column(batch.schema.get_field_index(name))
                if part.has_classes:
                    values.append(self._class_numbers(column, name, row))
                else:
                    values.append(self._numbers(column, name, row, shape))
            fill(array, values)

    def _class_numbers(self, column: Any, name: str, row: int) -> Array:
        import pyarrow as pa
        import pyarrow.compute as pc

        if column.null_count:
            raise BadInput(self._missing(column, name, row, "a label"))
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        numbers = pc.index_in(column, value_set=pa.array(self._classes, column.type))
        if numbers.null_count:
            where = row + int(np.argmax(np.asarray(numbers.is_null())))
            raise BadFile(f"column {name!r} of {self._source} has a new value in row {where}: the file has changed.")
        return _as_array(numbers)

    def _numbers(self, column: Any, name: str, row: int, shape: tuple[int, ...]) -> Array:
        import pyarrow as pa

        num_rows = len(column)
        if isinstance(column.type, pa.BaseExtensionType):
            column = column.storage
        if is_list(column.type):
            column = self._flat(column, name, row, shape)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if pa.types.is_decimal(column.type):
            column = column.cast(pa.float64())
        if column.null_count and not pa.types.is_floating(column.type):
            each = max(1, len(column) // max(1, num_rows))
            raise BadInput(self._missing(column, name, row, "a number", each))
        return _as_array(column).reshape(num_rows, *shape)

    def _flat(self, column: Any, name: str, row: int, shape: tuple[int, ...]) -> Any:
        """The numbers in lists, all of which must have the lengths that the first ones have."""
        import pyarrow as pa

        each = 1
        for length in shape:
            if not is_list(column.type):
                # A tensor's numbers lie in one list, whatever its shape.
                break
            if column.null_count:
                raise BadInput(self._missing(column, name, row, "a list", each))
            if not pa.types.is_fixed_size_list(column.type):
                lengths = np.diff(_as_array(column.offsets))
                if len(lengths) and (lengths != length).any():
                    first = int(np.argmax(lengths != length))
                    raise BadInput(
                        f"column {name!r} of {self._source} is ragged: row {row + first // each} has a list of "
                        f"{lengths[first]}, and row 0 one of {length}. Pad the lists to one length, or leave the "
                        "column out with columns=."
                    )
            each *= length
            column = _flattened(column)
        return column

    def _missing(self, column: Any, name: str, row: int, what: str, each: int = 1) -> str:
        where = row + int(np.argmax(np.asarray(column.is_null()))) // each
        return (
            f"column {name!r} of {self._source} lacks {what} in row {where} ({column.null_count} missing nearby). Fill "
            "the gaps, store fractions (a missing one is given as NaN), or leave the column out with columns=."
        )


class TableSource(Source):
    """Rows of a file that Arrow reads, block by block.

    Args:
        kind: of the file, which its fingerprint depends on.
        name: what the user calls it.
        path: of the file, or its address.
        table: all its columns.
        parts: the fields, and the columns that they are made of.
        classes: names of the classes, where labels are text.
        edges: first rows of the blocks and, last, the number of rows.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        path: str,
        table: Sequence[Column],
        parts: Sequence[Part],
        classes: tuple[str, ...],
        edges: Array,
    ) -> None:
        self._kind = kind
        self._place = absolute(path)
        self._parts = parts
        self._edges = edges
        self._columns = [place for part in parts for place in part.columns]
        self._names = [table[place].name for place in self._columns]
        self._reader = BatchReader(repr(name), table, parts, classes)
        self.name = name
        self.fields = tuple(part.field for part in parts)
        self.num_samples = int(edges[-1])
        self.classes = classes

    def fingerprint(self) -> str:
        """Changes with the file's size and time of change, and with the choice of columns."""
        return fingerprint_of([self._place], self._kind, self._names, [field.is_label for field in self.fields])

    def _blocks(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Number of each block that these rows lie in, and which of the rows do."""
        row = start
        while row < stop:
            block = int(np.searchsorted(self._edges, row, side="right")) - 1
            end = min(stop, int(self._edges[block + 1]))
            yield block, row, end
            row = end


def _flattened(column: Any) -> Any:
    """The values of lists, one after the other, of a column in which none is missing.

    As `flatten`, which loads all of `pyarrow.compute`, several megabytes, for it.
    """
    import pyarrow as pa

    if pa.types.is_fixed_size_list(column.type):
        size = column.type.list_size
        return column.values.slice(column.offset * size, len(column) * size)
    start, stop = column.offsets[0].as_py(), column.offsets[-1].as_py()
    return column.values.slice(start, stop - start)


def find_classes(batches: Any, name: str, source: str) -> tuple[str, ...]:
    """The different strings of a column, sorted."""
    import pyarrow as pa

    found: set[str] = set()
    for batch in batches:
        column = batch.column(0)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        found.update(value for value in column.unique().to_pylist() if value is not None)
        # Looked at after each batch, so that a column of names is given up before it fills the memory.
        if len(found) > MOST_CLASSES:
            break
    return sort_classes(found, name, source)


def _as_array(column: Any) -> Array:
    array: Array = column.to_numpy(zero_copy_only=False)
    return array


def reason_of(error: Exception) -> str:
    """What Arrow says of a damaged file, in one line."""
    return str(error).replace("\n", " ").rstrip(". ") or type(error).__name__
