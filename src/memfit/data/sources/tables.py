"""Columns of tables (CSV, Parquet, Arrow) as fields, and as arrays of NumPy.

The numbers of a table are given as one matrix of features: names of columns are for choosing, and networks take
matrices. A column of arrays stays a field of its own, and so do labels. The matrix has a floating type of at least 32
bits that holds all numbers of its columns, float32 where that is enough and float64 otherwise. Columns of text can't be
features, but they can be labels, whose classes are numbered in sorted order, so that the numbers depend on the data
alone.

Numbers without gaps and lists of one length lie in Arrow's memory as they do in NumPy's, and are only looked at in
another way. What NumPy has no room for is refused where it is met, with the column and the row: missing integers, lists
of different lengths. A missing fraction becomes NaN, which means the same.
"""

import difflib
import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.core.errors import BadFile, BadInput, MissingDependency, how_to_install
from memfit.data.files import fingerprint_of
from memfit.data.source import Array, Field, FileSource, Layout

# More classes than this are names or keys, not classes, and would be held in memory.
MOST_CLASSES = 65_536
_MOST_NAMED = 40
# Rows that are transposed at a time, so that what is read and what is written stay in the processor's cache together.
_CACHED_BYTES = 128 * 1024


Names = Sequence[str] | None
"""Of columns; None where the user names none."""


class UnusableColumns(BadInput):
    """Columns of a table that can't be features; `usable` are the names of the other ones that were to be."""

    def __init__(self, message: str, usable: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.usable = usable


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table as stored in the file.

    Attributes:
        dtype: of its numbers; None where they aren't numbers.
        shape: of one value; () for a number, (3,) for lists of three.
        is_text: whether its values are strings.
        stored_as: what the file calls its type, for messages.
    """

    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] = ()
    is_text: bool = False
    stored_as: str = ""


@dataclass(frozen=True, slots=True)
class TableField:
    """A field, and the places in the table of the columns that it is made of.

    With `has_classes` its numbers stand for strings: class numbers in sorted order.
    """

    field: Field
    columns: tuple[int, ...]
    has_classes: bool = False


def load(module: str, subject: str) -> Any:
    """The library that reads a kind of file; where it is missing, the error says what `subject` is read with."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        package = top.replace("PIL", "pillow")
        is_there = not (isinstance(error, ModuleNotFoundError) and error.name == top)
        why = f". It is there, but can't be imported: {error}" if is_there else ""
        raise MissingDependency(f"{subject}, for which {package} is needed: {how_to_install(package)}{why}") from error


def choose_fields(
    table: Sequence[Column], *, columns: Names, labels: str | None, source: str
) -> tuple[TableField, ...]:
    """Fields that samples of a table have: the matrix of features first, then columns of arrays, then labels."""
    known: dict[str, list[int]] = {}
    for place, column in enumerate(table):
        known.setdefault(column.name, []).append(place)
    features, targets = choose_names(list(known), columns, labels, kind="column", source=source)
    repeated = [name for name in (*features, *targets) if len(known[name]) > 1]
    if repeated:
        raise BadInput(
            f"{source} has more than one column named {_quoted(repeated)}. Choose others with --columns "
            "(columns=), or rename."
        )
    places = [known[name][0] for name in features]
    _check_features([table[place] for place in places], source)
    numbers = [place for place in places if not table[place].shape]
    arrays = [(place, table[place]) for place in places if table[place].shape]
    parts = []
    if numbers:
        # A column of arrays keeps its name.
        name = "numbers" if any(column.name == "features" for _, column in arrays) else "features"
        # float32 where it holds all values of these types.
        dtypes = [table[place].dtype for place in numbers]
        is_single = all(dtype is None or np.can_cast(dtype, np.float32) for dtype in dtypes)
        dtype = np.dtype(np.float32 if is_single else np.float64)
        parts.append(TableField(Field(name, dtype, (len(numbers),), is_tabular=True), tuple(numbers)))
    parts += [
        TableField(Field(column.name, column.dtype, column.shape), (place,))
        for place, column in arrays
        if column.dtype is not None
    ]
    if labels is not None:
        (place,) = known[labels]
        parts.append(_label(table[place], place, source))
    return tuple(parts)


def sort_classes(names: Iterable[str], column: str, source: str) -> tuple[str, ...]:
    """Names of classes, in the order in which they are numbered."""
    classes = sorted(set(names))
    if len(classes) > MOST_CLASSES:
        raise BadInput(
            f"column {column!r} of {source} has more than {MOST_CLASSES:,} different strings, too many to be classes "
            f"({classes[0]!r}, {classes[1]!r}, ...). Name another column as labels, or store numbers."
        )
    return tuple(classes)


def fill(out: Array, values: Sequence[Array]) -> None:
    """Puts the columns of a part into the caller's array, converted as by `astype`."""
    if out.ndim == 1 or len(values) == 1:
        np.copyto(out, values[0].reshape(out.shape), casting="unsafe")
        return
    # Column after column over all rows would touch each line of memory once for each column.
    step = max(64, _CACHED_BYTES // max(1, out.shape[1] * out.itemsize))
    for start in range(0, len(out), step):
        rows = out[start : start + step]
        for place, column in enumerate(values):
            rows[:, place] = column[start : start + step]


def choose_names(
    known: Sequence[str], columns: Names, labels: str | None, *, kind: str, source: str, own_labels: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Names of the features and of the labels; where none are chosen, `own_labels` are labels and all else features."""
    for name in columns or ():
        if not isinstance(name, str):
            raise BadInput(f"columns must be names of columns, and {name!r} is not a string.")
    repeated = sorted(name for name, count in Counter(columns).items() if count > 1)
    if repeated:
        raise BadInput(f"columns names {_quoted(repeated)} more than once. Name each {kind} once.")
    if columns is not None and not columns:
        raise BadInput(f"columns names no {kind}. Leave it out to use all of them.")
    unknown = [name for name in (*(columns or ()), *([] if labels is None else [labels])) if name not in known]
    if unknown:
        raise BadInput(describe_unknown(unknown, known, kind, source))
    targets = [labels] if labels is not None else list(own_labels) if columns is None else []
    chosen = [name for name in known if name not in own_labels] if columns is None else columns
    features = [name for name in chosen if name not in targets]
    if not features:
        raise BadInput(f"no {kind} of {source} is left for features, which are needed too: {labels!r} is the label.")
    return features, targets


def describe_unknown(names: Sequence[str], known: Sequence[str], kind: str, source: str) -> str:
    """A message about names that aren't there, with the nearest ones and those that are."""
    described = []
    for name in names:
        near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
        near = near or [other for other in known if other.lower() == str(name).lower()]
        described.append(f"{name!r} (did you mean {' or '.join(map(repr, near))}?)" if near else repr(name))
    return f"{source} has no {kind} {', '.join(described)}. It has: {_quoted(known)}."


def _check_features(features: Sequence[Column], source: str) -> None:
    texts = [column.name for column in features if column.is_text]
    others = [
        f"{column.name!r} ({column.stored_as})" for column in features if column.dtype is None and not column.is_text
    ]
    problems = []
    if texts:
        problems.append(
            f"{_quoted(texts)} of {source} {'is' if len(texts) == 1 else 'are'} text, which can't be features. Leave "
            "out with --columns (columns=, the names of those to use), or use as labels with --labels (labels=)."
        )
    if others:
        problems.append(
            f"{_listed(others)} of {source} can't be features: neither numbers nor lists of equally many numbers. "
            "Leave out with --columns (columns=, the names of those to use), or store as numbers."
        )
    if problems:
        usable = tuple(column.name for column in features if column.dtype is not None and not column.is_text)
        raise UnusableColumns(" ".join(problems), usable)


def _label(column: Column, place: int, source: str) -> TableField:
    if column.is_text and not column.shape:
        return TableField(Field(column.name, np.dtype(np.int64), (), is_label=True), (place,), has_classes=True)
    if column.dtype is None:
        raise BadInput(
            f"column {column.name!r} of {source} ({column.stored_as}) can't be labels: neither numbers nor strings."
        )
    dtype = np.dtype(np.int64) if column.dtype.kind == "b" else column.dtype
    return TableField(Field(column.name, dtype, column.shape, is_label=True), (place,))


def _quoted(names: Sequence[str]) -> str:
    return _listed([repr(name) for name in names])


def _listed(words: Sequence[str]) -> str:
    if len(words) > _MOST_NAMED:
        return f"{', '.join(words[:_MOST_NAMED])} and {len(words) - _MOST_NAMED} more"
    return ", ".join(words)


def describe_type(name: str, kind: Any, first: Any = None) -> Column:
    """What a column is to `choose_fields`."""
    import pyarrow as pa

    stored_as = str(kind) if len(str(kind)) <= 60 else f"{str(kind)[:60]}..."
    if isinstance(kind, pa.FixedShapeTensorType):
        is_in_order = kind.permutation is None or list(kind.permutation) == sorted(kind.permutation)
        dtype = _number_dtype(kind.value_type) if is_in_order else None
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
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return Column(name, None, tuple(shape), is_text=not shape, stored_as=stored_as)
    return Column(name, _number_dtype(kind), tuple(shape), stored_as=stored_as)


def is_list(kind: Any) -> bool:
    """Whether values are lists."""
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _number_dtype(kind: Any) -> np.dtype[Any] | None:
    """NumPy's name for a type of numbers; None where values are something else."""
    import pyarrow as pa

    if pa.types.is_decimal(kind):
        return np.dtype(np.float64)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
        return dtype
    return None


class TableSource(FileSource):
    """Rows of a file that Arrow reads, block by block."""

    kind: str
    """Of the file, which its fingerprint depends on."""

    def _choose(
        self,
        table: Sequence[Column],
        *,
        columns: Names,
        labels: str | None,
        batches: Callable[[int], Iterable[Any]],
        classes: tuple[str, ...] | None = None,
    ) -> None:
        """Settles what is read.

        Args:
            table: all columns of the file.
            columns: those that are features; all but the labels if not given.
            labels: the one with the labels.
            batches: of the column at a place in the table, from which the classes are found where labels are text.
            classes: names of the classes, where they are known.
        """
        self._table = table
        self._parts = choose_fields(table, columns=columns, labels=labels, source=repr(self.name))
        self._columns = [place for part in self._parts for place in part.columns]
        self._names = [table[place].name for place in self._columns]
        self.fields = tuple(part.field for part in self._parts)
        for part in self._parts:
            if part.has_classes and classes is None:
                classes = find_classes(batches(part.columns[0]), part.field.name, repr(self.name))
        self.classes = classes or ()

    def _set_blocks(self, edges: Array, scratch_bytes: int) -> None:
        """First rows of the blocks and, last, the number of rows; and the memory that a read takes."""
        self._edges = edges
        self.num_samples = int(edges[-1])
        self.layout = Layout(edges, scratch_bytes)

    def fingerprint(self) -> str:
        """Changes with the file's size and time of change, and with the choice of columns."""
        return fingerprint_of([self._place], self.kind, self._names, [field.is_label for field in self.fields])

    def _blocks(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Number of each block that these rows lie in, and which of the rows do."""
        row = start
        while row < stop:
            block = int(np.searchsorted(self._edges, row, side="right")) - 1
            end = min(stop, int(self._edges[block + 1]))
            yield block, row, end
            row = end

    def _put(self, batch: Any, row: int, out: Sequence[Array]) -> None:
        """Fills `out` with a batch of Arrow that begins at sample `row`."""
        for part, array in zip(self._parts, out, strict=True):
            read = self._class_numbers if part.has_classes else self._numbers
            columns = [self._table[place] for place in part.columns]
            fill(array, [read(batch.column(batch.schema.get_field_index(c.name)), c, row) for c in columns])

    def _class_numbers(self, column: Any, described: Column, row: int) -> Array:
        import pyarrow as pa
        import pyarrow.compute as pc

        if column.null_count:
            raise self._missing(column, described.name, row, "a label")
        column = _plain(column)
        numbers = pc.index_in(column, value_set=pa.array(self.classes, column.type))
        if numbers.null_count:
            where = row + int(np.argmax(np.asarray(numbers.is_null())))
            raise BadFile(
                f"column {described.name!r} of {self.name!r} has a new value in row {where}: the file has changed."
            )
        return _as_array(numbers)

    def _numbers(self, column: Any, described: Column, row: int) -> Array:
        import pyarrow as pa

        num_rows, name, shape = len(column), described.name, described.shape
        if isinstance(column.type, pa.BaseExtensionType):
            column = column.storage
        if is_list(column.type):
            column = self._flat(column, name, row, shape)
        column = _plain(column)
        if pa.types.is_decimal(column.type):
            column = column.cast(pa.float64())
        if column.null_count and not pa.types.is_floating(column.type):
            raise self._missing(column, name, row, "a number", max(1, len(column) // max(1, num_rows)))
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
                raise self._missing(column, name, row, "a list", each)
            if not pa.types.is_fixed_size_list(column.type):
                lengths = np.diff(_as_array(column.offsets))
                if len(lengths) and (lengths != length).any():
                    first = int(np.argmax(lengths != length))
                    raise BadInput(
                        f"column {name!r} of {self.name!r} is ragged: row {row + first // each} has a list of "
                        f"{lengths[first]}, and row 0 one of {length}. Pad the lists to one length, or leave the "
                        "column out with --columns (columns=)."
                    )
            each *= length
            column = _flattened(column)
        return column

    def _missing(self, column: Any, name: str, row: int, what: str, each: int = 1) -> BadInput:
        where = row + int(np.argmax(np.asarray(column.is_null()))) // each
        return BadInput(
            f"column {name!r} of {self.name!r} lacks {what} in row {where} ({column.null_count} missing nearby). Fill "
            "the gaps, store fractions (a missing one is given as NaN), or leave the column out with --columns "
            "(columns=)."
        )


def _plain(column: Any) -> Any:
    """Values themselves, where a column stores each once (a dictionary)."""
    return column.dictionary_decode() if hasattr(column, "dictionary_decode") else column


def _flattened(column: Any) -> Any:
    """The values of lists, one after the other, of a column in which none is missing.

    The values of a list column; Arrow's own `flatten` would load all of `pyarrow.compute`, several megabytes.
    """
    import pyarrow as pa

    if pa.types.is_fixed_size_list(column.type):
        size = column.type.list_size
        return column.values.slice(column.offset * size, len(column) * size)
    start, stop = column.offsets[0].as_py(), column.offsets[-1].as_py()
    return column.values.slice(start, stop - start)


def find_classes(batches: Iterable[Any], name: str, source: str) -> tuple[str, ...]:
    """The different strings of a column, sorted."""
    names: set[str] = set()
    for batch in batches:
        names.update(value for value in _plain(batch.column(0)).unique().to_pylist() if value is not None)
        # Looked at after each batch, so that a column of names is given up before it fills the memory.
        if len(names) > MOST_CLASSES:
            break
    return sort_classes(names, name, source)


def _as_array(column: Any) -> Array:
    array: Array = column.to_numpy(zero_copy_only=False)
    return array
