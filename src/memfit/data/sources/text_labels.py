"""Labels that are stored as text, given out as numbers of classes.

Networks learn numbers. The file is gone through once for the different texts that are in it; sorted, they are the
classes, and each text is given as its place among them.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from memfit.core.errors import BadInput
from memfit.data.source import Array, Layout, Source
from memfit.data.sources.passing import Passing

_BLOCK_BYTES = 256 << 10
_MAX_CLASSES = 100_000


class TextLabels(Passing):
    """A source of one field of text, as class numbers.

    Args:
        source: with one field, of one text a sample.

    Raises:
        BadInput: it has more texts than can be classes, or several a sample.
    """

    def __init__(self, source: Source) -> None:
        field = source.fields[0]
        if field.shape:
            raise BadInput(
                f"the labels in {source.name} are text of the shape {field.shape} a sample; one text a sample can be a "
                "class. Save numbers instead."
            )
        super().__init__(source, (replace(field, dtype=np.dtype(np.int64)),))
        self._step = max(1, _BLOCK_BYTES // field.dtype.itemsize)
        self._texts = self._distinct(field.dtype)

    @property
    def layout(self) -> Layout:
        """The source's, and room for a block of texts."""
        layout = self._source.layout
        return replace(layout, scratch_bytes=layout.scratch_bytes + 2 * _BLOCK_BYTES)

    @property
    def classes(self) -> tuple[str, ...]:
        """The different texts, sorted."""
        return tuple(t.decode("utf-8", "replace") if isinstance(t, bytes) else str(t) for t in self._texts.tolist())

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        """Fills the array with the class numbers of samples `start` to `stop`."""
        for first in range(start, stop, self._step):
            texts = self._read(first, min(first + self._step, stop))
            out[0][first - start : first - start + len(texts)] = np.searchsorted(self._texts, texts)

    def _read(self, start: int, stop: int) -> Array:
        texts: Array = np.empty(stop - start, self._source.fields[0].dtype)
        self._source.read(start, stop, [texts])
        return texts

    def _distinct(self, dtype: np.dtype[np.generic]) -> Array:
        found: Array = np.empty(0, dtype)
        for first in range(0, self.num_samples, self._step):
            last = min(first + self._step, self.num_samples)
            found = np.union1d(found, self._read(first, last))
            self._source.drop(first, last)
            if len(found) > _MAX_CLASSES:
                raise BadInput(
                    f"{self.name} holds more than {_MAX_CLASSES} different texts, too many to be classes. "
                    "Check that these are the labels, or save numbers instead."
                )
        return found


def as_labels(source: Source) -> Source:
    """The source, with class numbers where it holds text."""
    is_text = len(source.fields) == 1 and source.fields[0].dtype.kind in "SU" and not source.classes
    return TextLabels(source) if is_text else source
