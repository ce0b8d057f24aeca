"""Sources made of others: several one after the other, two side by side, and one under other names.

Data sets come as a hundred files of the same kind, and as x in one file and y in another. Both are one source to all
that follows.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from memfit.core.errors import BadFile, BadInput
from memfit.data.source import Array, Field, Layout, SampleSource, Source, Storage

# Length of the blocks of a part that has no natural ones, where other parts have.
_RUN_BYTES = 128 << 10
# Texts of labels that are looked at together, and most different ones.
_TEXT_BYTES = 256 << 10
_MAX_CLASSES = 100_000


class _Joined(Source):
    """A source made of others, which are dropped and closed with it."""

    _sources: tuple[Source, ...]

    def fingerprint(self) -> str:
        """From those of the parts; of a single one, its own."""
        parts = [source.fingerprint() for source in self._sources]
        return parts[0] if len(parts) == 1 else hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]

    def drop(self, start: int, stop: int) -> None:
        for source in self._sources:
            source.drop(start, stop)

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def storage(self) -> Storage:
        """That of all parts, each line once."""
        parts = [source.storage() for source in self._sources]
        lines, warnings = (
            tuple(dict.fromkeys(itertools.chain.from_iterable(texts)))
            for texts in ([part.lines for part in parts], [part.warnings for part in parts])
        )
        return Storage(lines, warnings, parts[0].is_text)


class Concatenated(_Joined):
    """Samples of several sources, one after the other.

    Label numbers that stand for classes are brought to one list: the sorted names of all parts.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)
        for other in sources[1:]:
            difference = _difference(sources[0], other)
            if difference:
                raise BadInput(
                    f"{sources[0].name} and {other.name} can't be read one after the other: {difference}. Files of one "
                    "data set have the same fields; leave out the one that doesn't belong to it, or convert it."
                )
        self.name = f"{sources[0].name} ... {sources[-1].name} ({len(sources)} files)"
        self.fields = tuple(
            replace(
                several[0],
                dtype=np.result_type(*{field.dtype for field in several}),
                is_ragged=any(field.is_ragged for field in several),
            )
            for several in zip(*(source.fields for source in sources), strict=True)
        )
        self._starts = np.concatenate([[0], np.cumsum([source.num_samples for source in sources], dtype=np.int64)])
        self.num_samples = int(self._starts[-1])
        self.classes, self._numbers = _common_classes(sources)
        # `read` goes across parts: where no part has natural blocks, neither has the whole.
        edges = None
        if any(source.layout.edges is not None for source in sources):
            parts = [_edges(source)[:-1] + start for source, start in zip(sources, self._starts, strict=False)]
            edges = np.concatenate([*parts, self._starts[-1:]]).astype(np.int64)
        self.layout = _layout(sources, edges, max(source.layout.scratch_bytes for source in sources))

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        for part, first, last, offset in self._pieces(start, stop):
            arrays = [array[offset : offset + last - first] for array in out]
            self._sources[part].read(first, last, arrays)
            self._renumber(part, arrays)

    def storage(self) -> Storage:
        """That of the first, and how many there are."""
        storage, count = self._sources[0].storage(), len(self._sources)
        lines = tuple(f"{line} ({count} files; the first is described)" for line in storage.lines)
        return replace(storage, lines=lines)

    def drop(self, start: int, stop: int) -> None:
        for part, first, last, _ in self._pieces(start, stop):
            self._sources[part].drop(first, last)

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


class ConcatenatedSamples(Concatenated, SampleSource):
    """Samples of several sources that are read one by one, such as folders of images."""

    def read_sample(self, sample: int) -> tuple[Array, ...] | None:
        part, source, inside = self._part_of(sample)
        arrays = source.read_sample(inside)
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

    def stored_bytes(self, sample: int) -> int:
        _, source, inside = self._part_of(sample)
        return source.stored_bytes(inside)

    def sample_name(self, sample: int) -> str:
        _, source, inside = self._part_of(sample)
        return source.sample_name(inside)

    def _part_of(self, sample: int) -> tuple[int, SampleSource, int]:
        part = int(np.searchsorted(self._starts, sample, side="right")) - 1
        source = self._sources[part]
        assert isinstance(source, SampleSource)
        return part, source, sample - int(self._starts[part])


class Paired(_Joined):
    """Samples of two sources side by side: the n-th of one belongs to the n-th of the other.

    The second half are labels, or else, without `are_labels`, further features.
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
        self._sources = (features, labels)
        self.name = f"{features.name} and {labels.name}"
        taken = {field.name for field in features.fields}
        second = [replace(field, is_label=are_labels or field.is_label) for field in labels.fields]
        self.fields = (*features.fields, *(_renamed(field, taken) for field in second))
        self.num_samples = features.num_samples
        self.classes = labels.classes or features.classes
        # Natural blocks are those of the side that has more bytes a sample.
        sides = sorted((features, labels), key=lambda source: source.sample_bytes, reverse=True)
        self.layout = _layout(sides, sides[0].layout.edges, sum(side.layout.scratch_bytes for side in sides))

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        features, labels = self._sources
        features.read(start, stop, out[: len(features.fields)])
        labels.read(start, stop, out[len(features.fields) :])


class Passing(_Joined):
    """A source that passes everything on to another, with other fields, perhaps as what that one was made of."""

    def __init__(
        self, source: Source, fields: tuple[Field, ...], *, name: str | None = None, fingerprint: str | None = None
    ) -> None:
        self._sources = (source,)
        self._fingerprint = fingerprint
        self.name = source.name if name is None else name
        self.fields = fields
        self.num_samples = source.num_samples
        self.layout = source.layout
        self.classes = source.classes

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        self._sources[0].read(start, stop, out)

    def fingerprint(self) -> str:
        return self._fingerprint or super().fingerprint()


class TextLabels(Passing):
    """A source of one field of text, as class numbers.

    Networks learn numbers. The file is gone through once for the different texts that are in it; sorted, they are the
    classes, and each text is given as its place among them.
    """

    def __init__(self, source: Source) -> None:
        field = source.fields[0]
        if field.shape:
            raise BadInput(
                f"the labels in {source.name} are text of the shape {field.shape} a sample; one text a sample can be a "
                "class. Save numbers instead."
            )
        super().__init__(source, (replace(field, dtype=np.dtype(np.int64)),))
        self.layout = replace(source.layout, scratch_bytes=source.layout.scratch_bytes + 2 * _TEXT_BYTES)
        texts: Array = np.empty(0, field.dtype)
        for first, part in self._parts(0, self.num_samples):
            texts = np.union1d(texts, part)
            source.drop(first, first + len(part))
            if len(texts) > _MAX_CLASSES:
                raise BadInput(
                    f"{self.name} holds more than {_MAX_CLASSES} different texts, too many to be classes. "
                    "Check that these are the labels, or save numbers instead."
                )
        self._texts = texts
        self.classes = tuple(
            text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text) for text in texts.tolist()
        )

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        for first, texts in self._parts(start, stop):
            out[0][first - start : first - start + len(texts)] = np.searchsorted(self._texts, texts)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, Array]]:
        (source,) = self._sources
        dtype = source.fields[0].dtype
        step = max(1, _TEXT_BYTES // dtype.itemsize)
        for first in range(start, stop, step):
            texts: Array = np.empty(min(step, stop - first), dtype)
            source.read(first, first + len(texts), [texts])
            yield first, texts


def as_labels(source: Source) -> Source:
    """The source, with class numbers where it holds text."""
    is_text = len(source.fields) == 1 and source.fields[0].dtype.kind in "SU" and not source.classes
    return TextLabels(source) if is_text else source


def class_names(names: Any, field: Field) -> tuple[str, ...]:
    """A list of different names as those of the classes of a field; () where it is none, or the field has none."""
    if field.dtype.kind not in "iu" or field.shape or not isinstance(names, list) or len(names) > _MAX_CLASSES:
        return ()
    are_different = all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    return tuple(names) if are_different else ()


def named(source: Source, name: str) -> Source:
    """A source of one field under another name."""
    if len(source.fields) != 1:
        names = ", ".join(repr(field.name) for field in source.fields)
        raise BadInput(
            f"{source.name} was given for {name!r} and has {len(source.fields)} fields: {names}. "
            "One was expected; give a file of a single array for each name."
        )
    return Passing(source, (replace(source.fields[0], name=name),))


def concatenate(sources: Sequence[Source]) -> Source:
    """Several sources one after the other; a single one as it is."""
    if len(sources) == 1:
        return sources[0]
    by_sample = [source.layout.is_by_sample for source in sources]
    if any(by_sample) and not all(by_sample):
        images, other = sources[by_sample.index(True)], sources[by_sample.index(False)]
        raise BadInput(f"{images.name} holds images and {other.name} doesn't: they can't be one source.")
    return ConcatenatedSamples(sources) if any(by_sample) else Concatenated(sources)


def _difference(first: Source, second: Source) -> str:
    """Why two sources can't be one, in a part of a sentence; "" where they can."""
    names = [[field.name for field in source.fields] for source in (first, second)]
    if names[0] != names[1]:
        return f"the fields of one are {', '.join(names[0])} and those of the other {', '.join(names[1])}"
    for here, there in zip(first.fields, second.fields, strict=True):
        # A column of a table may have only whole numbers in one file and fractions in the next.
        are_of_tables = all(field.is_tabular and field.dtype.kind in "biuf" for field in (here, there))
        if here.dtype != there.dtype and not are_of_tables:
            return f"{here.name} is {here.dtype} in one and {there.dtype} in the other"
        if here.shape != there.shape and not (here.is_ragged or there.is_ragged):
            return f"a sample of {here.name} has the shape {here.shape} in one and {there.shape} in the other"
        if here.is_label != there.is_label:
            return f"{here.name} is a label in only one of them"
    return "one has names as labels and the other has numbers" if bool(first.classes) != bool(second.classes) else ""


def _common_classes(sources: Sequence[Source]) -> tuple[tuple[str, ...], list[Array | None]]:
    """All names of classes, and for each part what its numbers become; None where they stay."""
    own = [source.classes for source in sources]
    if all(classes == own[0] for classes in own):
        return own[0], [None] * len(own)
    names = sorted({name for classes in own for name in classes})
    number_of = {name: number for number, name in enumerate(names)}
    return tuple(names), [np.array([number_of[name] for name in classes], np.int64) for classes in own]


def _layout(sources: Sequence[Source], edges: Array | None, scratch_bytes: int) -> Layout:
    sequential = [source.layout for source in sources if source.layout.is_sequential]
    return Layout(
        edges,
        scratch_bytes,
        max(source.layout.read_bytes for source in sources),
        bool(sequential),
        any(source.layout.is_by_sample for source in sources),
        sequential[0].reason if sequential else "",
    )


def _edges(source: Source) -> Array:
    if source.layout.edges is not None:
        return source.layout.edges
    step = max(1, _RUN_BYTES // max(1, source.sample_bytes))
    return np.append(np.arange(0, source.num_samples, step, dtype=np.int64), source.num_samples)


def _renamed(field: Field, taken: set[str]) -> Field:
    """The field under a name that isn't taken: as it is, else "y", else with a number."""
    if field.name not in taken:
        return field
    candidates = ("y", *(f"{field.name}_{number}" for number in range(2, len(taken) + 3)))
    return replace(field, name=next(name for name in candidates if name not in taken))
