"""Sources made of others: several one after the other, and two side by side.

Data sets come as a hundred files of the same kind, and as x in one file and y in another. Both are one source to all
that follows.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from memfit.core.errors import BadFile, BadInput
from memfit.data.source import Array, Field, Layout, SampleSource, Source
from memfit.data.sources.passing import Passing

_RUN_BYTES = 128 << 10
"""Length of the blocks of a part that has no natural ones, where other parts have."""


class Concatenated:
    """Samples of several sources, one after the other.

    Label numbers that stand for classes are brought to one list: the sorted names of all parts.

    Args:
        sources: at least one; their fields agree.

    Raises:
        BadInput: none is given, or two of them differ in their fields.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        if not sources:
            raise BadInput("at least one source is needed to make one of several")
        self._sources = tuple(sources)
        _check_fields(self._sources)
        self._fields = tuple(_common_field(several) for several in zip(*(s.fields for s in sources), strict=True))
        counts = [source.num_samples for source in self._sources]
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._classes, self._numbers = _common_classes(self._sources)
        self._layout = self._make_layout()

    @property
    def name(self) -> str:
        """The first and the last, and how many there are."""
        if len(self._sources) == 1:
            return self._sources[0].name
        return f"{self._sources[0].name} ... {self._sources[-1].name} ({len(self._sources)} files)"

    @property
    def fields(self) -> tuple[Field, ...]:
        """Those of each part."""
        return self._fields

    @property
    def num_samples(self) -> int:
        """Samples of all parts."""
        return int(self._starts[-1])

    @property
    def layout(self) -> Layout:
        """Blocks of the parts; None where no part has natural ones, as `read` goes across parts."""
        return self._layout

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes of all parts, sorted."""
        return self._classes

    def fingerprint(self) -> str:
        """From those of the parts."""
        return _digest(source.fingerprint() for source in self._sources)

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        """Fills one array a field with samples `start` to `stop`, whichever parts they are in."""
        for part, first, last, offset in self._pieces(start, stop):
            targets = [array[offset : offset + last - first] for array in out]
            self._sources[part].read(first, last, targets)
            self._renumber(part, targets)

    def drop(self, start: int, stop: int) -> None:
        """Passed on to the parts."""
        for part, first, last, _ in self._pieces(start, stop):
            self._sources[part].drop(first, last)

    def close(self) -> None:
        """Closes all parts in this process."""
        for source in self._sources:
            source.close()

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Number of a part, first and last sample in it, and where they belong in the run."""
        part = int(np.searchsorted(self._starts, start, side="right")) - 1
        position = start
        while position < stop:
            begin, end = int(self._starts[part]), int(self._starts[part + 1])
            if position < end:
                last = min(stop, end)
                yield part, position - begin, last - begin, position - start
                position = last
            part += 1

    def _renumber(self, part: int, arrays: Sequence[Array]) -> None:
        table = self._numbers[part]
        if table is None:
            return
        for field, array in zip(self._sources[part].fields, arrays, strict=True):
            if field.is_label:
                numbers = array.astype(np.int64)
                if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(table):
                    raise BadFile(
                        f"{self._sources[part].name} has a label between {numbers.min()} and {numbers.max()} that none "
                        f"of the names of its {len(table)} classes is for. Make the file again."
                    )
                array[...] = table[numbers]

    def _make_layout(self) -> Layout:
        layouts = [source.layout for source in self._sources]
        sequential = [layout for layout in layouts if layout.is_sequential]
        if any(layout.edges is not None for layout in layouts):
            edges = [_edges(source, layout)[:-1] for source, layout in zip(self._sources, layouts, strict=True)]
            shifted = [part + start for part, start in zip(edges, self._starts, strict=False)]
            merged = np.concatenate([*shifted, self._starts[-1:]]).astype(np.int64)
        else:
            merged = None
        return Layout(
            edges=merged,
            scratch_bytes=max(layout.scratch_bytes for layout in layouts),
            read_bytes=max(layout.read_bytes for layout in layouts),
            is_sequential=bool(sequential),
            is_by_sample=any(layout.is_by_sample for layout in layouts),
            reason=sequential[0].reason if sequential else "",
        )


class ConcatenatedSamples(Concatenated):
    """Samples of several sources that are read one by one, such as folders of images."""

    def read_sample(self, sample: int) -> tuple[Array, ...] | None:
        """One array a field; None where it can't be read and such samples are skipped."""
        part, inside = self._place(sample)
        arrays = self._source(part).read_sample(inside)
        if arrays is None or self._numbers[part] is None:
            return arrays
        owned = tuple(np.array(array) for array in arrays)
        self._renumber(part, owned)
        return owned

    @property
    def num_skipped(self) -> int:
        """Different samples that this process left out because they can't be read."""
        return sum(getattr(source, "num_skipped", 0) for source in self._sources)

    @property
    def skipped(self) -> list[str]:
        """Names of the first samples that each part left out."""
        return [name for source in self._sources for name in getattr(source, "skipped", ())]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of how the parts were understood."""
        return tuple(note for source in self._sources for note in getattr(source, "notes", ()))

    def stored_bytes(self, sample: int) -> int:
        """Bytes of its file."""
        part, inside = self._place(sample)
        return self._source(part).stored_bytes(inside)

    def sample_name(self, sample: int) -> str:
        """Its path."""
        part, inside = self._place(sample)
        return self._source(part).sample_name(inside)

    def _place(self, sample: int) -> tuple[int, int]:
        part = int(np.searchsorted(self._starts, sample, side="right")) - 1
        return part, sample - int(self._starts[part])

    def _source(self, part: int) -> SampleSource:
        source = self._sources[part]
        assert isinstance(source, SampleSource)
        return source


class Paired:
    """Samples of two sources side by side: the n-th of one belongs to the n-th of the other.

    Args:
        features: the first half.
        labels: the second half.
        are_labels: whether the second half are labels; else both are features.

    Raises:
        BadInput: they differ in length, both have labels, or one is read sample by sample.
    """

    def __init__(self, features: Source, labels: Source, *, are_labels: bool = True) -> None:
        if features.num_samples != labels.num_samples:
            needed = "one label is needed for each sample" if are_labels else "as many are needed in each"
            raise BadInput(
                f"{features.name} has {features.num_samples} samples, {labels.name} has {labels.num_samples}: "
                f"{needed}. Check that both files are of the same data."
            )
        for source in (features, labels):
            if source.layout.is_by_sample:
                raise BadInput(
                    f"{source.name} is read file by file and can't be paired with another source; the classes of "
                    "images are the names of their folders."
                )
        if are_labels and any(field.is_label for field in features.fields):
            raise BadInput(f"labels are given twice: {features.name} has labels already, and {labels.name} was given.")
        self._features = features
        self._labels = labels
        taken = {field.name for field in features.fields}
        second = [replace(field, is_label=are_labels or field.is_label) for field in labels.fields]
        self._fields = (*features.fields, *(_renamed(field, taken) for field in second))
        if are_labels:
            self._fields = tuple(replace(f, is_label=i >= len(taken)) for i, f in enumerate(self._fields))

    @property
    def name(self) -> str:
        """Both names."""
        return f"{self._features.name} and {self._labels.name}"

    @property
    def fields(self) -> tuple[Field, ...]:
        """Those of the first, then those of the second."""
        return self._fields

    @property
    def num_samples(self) -> int:
        """Samples, as many in either."""
        return self._features.num_samples

    @property
    def layout(self) -> Layout:
        """Natural blocks of the side that has more bytes a sample."""
        sides = sorted((self._features, self._labels), key=_sample_bytes, reverse=True)
        layouts = [side.layout for side in sides]
        sequential = [layout for layout in layouts if layout.is_sequential]
        return Layout(
            edges=layouts[0].edges,
            scratch_bytes=sum(layout.scratch_bytes for layout in layouts),
            read_bytes=max(layout.read_bytes for layout in layouts),
            is_sequential=bool(sequential),
            reason=sequential[0].reason if sequential else "",
        )

    @property
    def classes(self) -> tuple[str, ...]:
        """Those of the labels."""
        return self._labels.classes or self._features.classes

    def fingerprint(self) -> str:
        """From those of both."""
        return _digest([self._features.fingerprint(), self._labels.fingerprint()])

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        """Fills one array a field with samples `start` to `stop` of both."""
        num_first = len(self._features.fields)
        self._features.read(start, stop, out[:num_first])
        self._labels.read(start, stop, out[num_first:])

    def drop(self, start: int, stop: int) -> None:
        """Passed on to both."""
        self._features.drop(start, stop)
        self._labels.drop(start, stop)

    def close(self) -> None:
        """Closes both in this process."""
        self._features.close()
        self._labels.close()


class Named(Passing):
    """A source of one field under another name.

    Args:
        source: the source.
        name: what its field is called.

    Raises:
        BadInput: it has more fields than one.
    """

    def __init__(self, source: Source, name: str) -> None:
        if len(source.fields) != 1:
            names = ", ".join(repr(field.name) for field in source.fields)
            raise BadInput(
                f"{source.name} was given for {name!r} and has {len(source.fields)} fields: {names}. "
                "One was expected; give a file of a single array for each name."
            )
        super().__init__(source, (replace(source.fields[0], name=name),))


def concatenate(sources: Sequence[Source]) -> Source:
    """Several sources one after the other; a single one as it is.

    Raises:
        BadInput: none is given, two of them differ in their fields, or only some are read sample by sample.
    """
    if len(sources) == 1:
        return sources[0]
    by_sample = [source.layout.is_by_sample for source in sources]
    if any(by_sample) and not all(by_sample):
        one, other = sources[by_sample.index(True)], sources[by_sample.index(False)]
        raise BadInput(f"{one.name} holds images and {other.name} doesn't: they can't be one source.")
    return ConcatenatedSamples(sources) if any(by_sample) else Concatenated(sources)


def _check_fields(sources: Sequence[Source]) -> None:
    first = sources[0]
    for other in sources[1:]:
        difference = _difference(first.fields, other.fields)
        if difference:
            raise BadInput(
                f"{first.name} and {other.name} can't be read one after the other: {difference}. Files of one data set "
                "have the same fields; leave out the one that doesn't belong to it, or convert it."
            )
        if bool(first.classes) != bool(other.classes):
            raise BadInput(f"one of {first.name} and {other.name} has names as labels and the other has numbers.")


def _difference(first: Sequence[Field], second: Sequence[Field]) -> str:
    names = [[field.name for field in fields] for fields in (first, second)]
    if names[0] != names[1]:
        return f"the fields of one are {', '.join(names[0])} and those of the other {', '.join(names[1])}"
    for one, other in zip(first, second, strict=True):
        if one.dtype != other.dtype and not _are_numbers_of_tables(one, other):
            return f"{one.name} is {one.dtype} in one and {other.dtype} in the other"
        if one.shape != other.shape and not (one.is_ragged or other.is_ragged):
            return f"a sample of {one.name} has the shape {one.shape} in one and {other.shape} in the other"
        if one.is_label != other.is_label:
            return f"{one.name} is a label in only one of them"
    return ""


def _are_numbers_of_tables(one: Field, other: Field) -> bool:
    # A column of a table may have only whole numbers in one file and fractions in the next.
    return one.is_tabular and other.is_tabular and all(field.dtype.kind in "biuf" for field in (one, other))


def _common_field(fields: Sequence[Field]) -> Field:
    dtype = np.result_type(*{field.dtype for field in fields})
    return replace(fields[0], dtype=dtype, is_ragged=any(field.is_ragged for field in fields))


def _common_classes(sources: Sequence[Source]) -> tuple[tuple[str, ...], list[Array | None]]:
    """All names of classes, and for each part what its numbers become; None where they stay."""
    own = [source.classes for source in sources]
    if all(classes == own[0] for classes in own):
        return own[0], [None] * len(own)
    names = sorted({name for classes in own for name in classes})
    places = {name: place for place, name in enumerate(names)}
    tables: list[Array | None] = [np.array([places[name] for name in classes], np.int64) for classes in own]
    return tuple(names), tables


def _edges(source: Source, layout: Layout) -> Array:
    if layout.edges is not None:
        return layout.edges
    step = max(1, _RUN_BYTES // max(1, _sample_bytes(source)))
    return np.append(np.arange(0, source.num_samples, step, dtype=np.int64), source.num_samples)


def _sample_bytes(source: Source) -> int:
    return sum(field.sample_bytes for field in source.fields)


def _renamed(field: Field, taken: set[str]) -> Field:
    """The field under a name that isn't taken: as it is, else "y", else with a number."""
    if field.name not in taken:
        return field
    candidates = ("y", *(f"{field.name}_{number}" for number in range(2, len(taken) + 3)))
    return replace(field, name=next(name for name in candidates if name not in taken))


def _digest(parts: Sequence[str] | Iterator[str]) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]
