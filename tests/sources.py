"""Sources in memory, for tests of what is above them."""

import functools
import threading
from dataclasses import fields

import numpy as np

from memfit.core.errors import BadFile
from memfit.data.source import Field, Layout, SampleSource, Source
from memfit.data.stream import ArrayStream, StreamOptions


class ArraySource(Source):
    """Arrays as a source; counts what is read of each sample."""

    classes = ()

    def __init__(self, *arrays, labels=0, edges=None, name="arrays", fails_at=None):
        self.arrays = arrays
        self.name = name
        self.layout = Layout(edges=None if edges is None else np.asarray(edges))
        names = ["x", *(f"x{number}" for number in range(1, len(arrays)))]
        self.fields = tuple(
            Field(names[index], array.dtype, array.shape[1:], is_label=index >= len(arrays) - labels)
            for index, array in enumerate(arrays)
        )
        self.num_samples = len(arrays[0])
        self.reads = np.zeros(self.num_samples, int)
        self.fails_at = fails_at

    def fingerprint(self):
        return f"{self.name} {self.num_samples}"

    def read(self, start, stop, out):
        if self.fails_at is not None and start <= self.fails_at < stop:
            raise BadFile(f"{self.name} is damaged at sample {self.fails_at}")
        self.reads[start:stop] += 1
        for array, into in zip(self.arrays, out, strict=True):
            assert into.flags.c_contiguous
            into[...] = array[start:stop]

    def drop(self, start, stop):
        assert 0 <= start < stop <= self.num_samples

    def close(self):
        pass


class NamedSamples(SampleSource):
    """Samples that are read one by one, each of a shape of its own where `shapes` says so."""

    classes = ("odd", "even")

    def __init__(self, num_samples, *, shapes=lambda number: (2, 3), unreadable=(), fails=False):
        self.num_samples = num_samples
        self.shapes = shapes
        self.unreadable = set(unreadable)
        self.fails = fails
        self.name = "folder"
        self.layout = Layout(is_by_sample=True)
        self.fields = (
            Field("image", np.dtype("uint8"), shapes(0), is_ragged=True),
            Field("label", np.dtype("int64"), (), is_label=True),
        )
        self.reads = []
        self._lock = threading.Lock()

    def fingerprint(self):
        return f"folder {self.num_samples}"

    def read_sample(self, sample):
        with self._lock:
            self.reads.append(sample)
        if sample in self.unreadable:
            if self.fails:
                raise BadFile(f"{self.sample_name(sample)} can't be read")
            return None
        image = np.full(self.shapes(sample), sample % 256, np.uint8)
        return image, np.asarray(sample, np.int64)

    def stored_bytes(self, sample):
        return 10

    def sample_name(self, sample):
        return f"folder/{sample}.png"

    def read(self, start, stop, out):
        raise AssertionError("samples are read one by one")

    def drop(self, start, stop):
        pass

    def close(self):
        pass


def samples_of(order, start, stop):
    """Numbers in the source of the samples at places `start` to `stop` of an order."""
    samples = functools.cache(order.samples)
    parts = [samples(piece.lane, piece.window)[piece.start : piece.stop] for piece in order.pieces(start, stop)]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def stream_over(source, **options):
    """A `Stream` whose arguments and `StreamOptions` are given together."""
    names = [field.name for field in fields(StreamOptions) if field.name in options]
    seldom = StreamOptions(**{name: options.pop(name) for name in names})
    return ArrayStream(source, options=seldom, **options)


def read(source, start=0, stop=None, dtypes=None):
    """Samples of a source, one array a field, as stored or of other types: one for all fields, or one each."""
    stop = source.num_samples if stop is None else stop
    if not isinstance(dtypes, list):
        dtypes = [dtypes or field.dtype for field in source.fields]
    # What isn't filled would show.
    out = [np.full((stop - start, *field.shape), 77, dtype) for field, dtype in zip(source.fields, dtypes, strict=True)]
    source.read(start, stop, out)
    return out


def names(source):
    """Names of a source's fields, and which of them are labels."""
    return [(field.name, field.is_label) for field in source.fields]
