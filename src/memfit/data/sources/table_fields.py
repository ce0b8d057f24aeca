"""What the columns of a table become: one matrix of features, arrays of their own, labels.

A model takes a matrix, not forty vectors, so that columns of single numbers are put side by side into one field. Its
type is floating whatever the columns are, because a mixture of integers and fractions has to be: single precision where
that holds every value of every column, and double precision otherwise. Columns of text can't be features, but they can
be labels, whose classes are numbered in sorted order, so that the numbers depend on the data alone.
"""

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.core.errors import BadInput
from memfit.data.source import Array, Field

# More classes than this are names or keys, not classes, and would be held in memory.
MOST_CLASSES = 65_536
_MOST_NAMED = 40
# Rows that are transposed at a time, so that what is read and what is written stay in the processor's cache together.
_CACHED_BYTES = 128 * 1024


class UnusableColumns(BadInput):
    """Columns of a table that can't be features.

    Attributes:
        usable: names of the other ones that were to be.
    """

    def __init__(self, message: str, usable: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.usable = usable


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table, as the file has it.

    Attributes:
        name: of the column.
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
class Part:
    """A field, and the columns that it is made of.

    Attributes:
        field: what samples have.
        columns: places in the table of its columns.
        has_classes: whether its numbers stand for strings: class numbers in sorted order.
    """

    field: Field
    columns: tuple[int, ...]
    has_classes: bool = False


def choose_fields(
    table: Sequence[Column], *, columns: Sequence[str] | str | None, labels: Sequence[str] | str | None, source: str
) -> tuple[Part, ...]:
    """Fields that samples of a table have: the matrix of features first, then columns of arrays, then labels."""
    label_names = _names(labels, "labels")
    chosen = [column.name for column in table] if columns is None else _names(columns, "columns")
    places = _places(table, list(dict.fromkeys([*chosen, *label_names])), source)
    features = [places[name] for name in dict.fromkeys(chosen) if name not in label_names]
    if not features:
        raise BadInput(f"no column of {source} is left for the features: {_quoted(chosen)} are labels.")
    _check_features([table[place] for place in features], source)
    arrays = [place for place in features if table[place].shape]
    numbers = [place for place in features if not table[place].shape]
    parts = []
    if numbers:
        # A column of arrays keeps its name.
        name = "numbers" if any(table[place].name == "features" for place in arrays) else "features"
        dtype = _common_dtype([table[place].dtype for place in numbers])
        parts.append(Part(Field(name, dtype, (len(numbers),), is_tabular=True), tuple(numbers)))
    for place in arrays:
        column = table[place]
        assert column.dtype is not None
        parts.append(Part(Field(column.name, column.dtype, column.shape), (place,)))
    parts += [_label(table[places[name]], places[name], source) for name in label_names]
    texts = [part.field.name for part in parts if part.has_classes]
    if len(texts) > 1:
        raise BadInput(
            f"{_quoted(texts)} of {source} are all text, and only one column of labels can be. "
            "Store the others as numbers."
        )
    return tuple(parts)


def sort_classes(found: Iterable[str], column: str, source: str) -> tuple[str, ...]:
    """Names of classes, in the order in which they are numbered."""
    classes = sorted(set(found))
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


def describe_unknown(names: Sequence[str], known: Sequence[str], kind: str, source: str) -> str:
    """A message about names that aren't there, with the nearest ones and those that are."""
    parts = []
    for name in names:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or [
            other for other in known if other.lower() == name.lower()
        ]
        meant = f" (did you mean {' or '.join(repr(other) for other in near)}?)" if near else ""
        parts.append(f"{name!r}{meant}")
    return f"{source} has no {kind} {', '.join(parts)}. It has: {_quoted(known)}."


def _names(given: Sequence[str] | str | None, argument: str) -> list[str]:
    if given is None:
        return []
    names = [given] if isinstance(given, str) else list(given)
    for name in names:
        if not isinstance(name, str):
            raise BadInput(f"{argument} must be names of columns, and {name!r} is not a string.")
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        raise BadInput(f"{argument} names {_quoted(repeated)} more than once. Name each column once.")
    if not names and argument == "columns":
        raise BadInput("columns names no column. Leave it out to use all of them.")
    return names


def _places(table: Sequence[Column], names: Sequence[str], source: str) -> dict[str, int]:
    known: dict[str, list[int]] = {}
    for place, column in enumerate(table):
        known.setdefault(column.name, []).append(place)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BadInput(describe_unknown(unknown, list(known), "column", source))
    repeated = [name for name in names if len(known[name]) > 1]
    if repeated:
        raise BadInput(
            f"{source} has more than one column named {_quoted(repeated)}. Choose others with columns=, or rename."
        )
    return {name: known[name][0] for name in names}


def _check_features(features: Sequence[Column], source: str) -> None:
    texts = [column.name for column in features if column.is_text]
    others = [
        f"{column.name!r} ({column.stored_as})" for column in features if column.dtype is None and not column.is_text
    ]
    said = []
    if texts:
        said.append(
            f"{_quoted(texts)} of {source} {'is' if len(texts) == 1 else 'are'} text, which can't be features. Leave "
            "out with columns= (the names of those to use), or use as labels with labels=."
        )
    if others:
        said.append(
            f"{_listed(others)} of {source} can't be features: neither numbers nor lists of equally many numbers. "
            "Leave out with columns= (the names of those to use), or store as numbers."
        )
    if said:
        usable = tuple(column.name for column in features if column.dtype is not None and not column.is_text)
        raise UnusableColumns(" ".join(said), usable)


def _label(column: Column, place: int, source: str) -> Part:
    if column.is_text and not column.shape:
        return Part(Field(column.name, np.dtype(np.int64), (), is_label=True), (place,), has_classes=True)
    if column.dtype is None:
        raise BadInput(
            f"column {column.name!r} of {source} ({column.stored_as}) can't be labels: neither numbers nor strings."
        )
    dtype = np.dtype(np.int64) if column.dtype.kind == "b" else column.dtype
    return Part(Field(column.name, dtype, column.shape, is_label=True), (place,))


def _common_dtype(dtypes: Iterable[np.dtype[Any] | None]) -> np.dtype[Any]:
    """The narrowest floating type of at least 32 bits that holds all values of these types; float64 at most.

    >>> _common_dtype([np.dtype("uint8"), np.dtype("float32")]), _common_dtype([np.dtype("int32")])
    (dtype('float32'), dtype('float64'))
    """
    single = np.dtype(np.float32)
    return single if all(np.can_cast(dtype, single) for dtype in dtypes if dtype is not None) else np.dtype(np.float64)


def _quoted(names: Sequence[str]) -> str:
    return _listed([repr(name) for name in names])


def _listed(words: Sequence[str]) -> str:
    if len(words) > _MOST_NAMED:
        return f"{', '.join(words[:_MOST_NAMED])} and {len(words) - _MOST_NAMED} more"
    return ", ".join(words)
