"""What a source shares with one that it stands before: everything but what it changes."""

from collections.abc import Sequence

from memfit.data.source import Array, Field, Layout, Source


class Passing:
    """A source that passes everything on to another, with fields of its own.

    Args:
        source: the other one.
        fields: what is given out.
    """

    def __init__(self, source: Source, fields: tuple[Field, ...]) -> None:
        self._source = source
        self._fields = fields

    @property
    def name(self) -> str:
        """The source's."""
        return self._source.name

    @property
    def fields(self) -> tuple[Field, ...]:
        """What is given out."""
        return self._fields

    @property
    def num_samples(self) -> int:
        """Samples in it."""
        return self._source.num_samples

    @property
    def layout(self) -> Layout:
        """The source's."""
        return self._source.layout

    @property
    def classes(self) -> tuple[str, ...]:
        """The source's."""
        return self._source.classes

    def fingerprint(self) -> str:
        """The source's."""
        return self._source.fingerprint()

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        """Fills the arrays with samples `start` to `stop`."""
        self._source.read(start, stop, out)

    def drop(self, start: int, stop: int) -> None:
        """Passed on."""
        self._source.drop(start, stop)

    def close(self) -> None:
        """Closes the source in this process."""
        self._source.close()
