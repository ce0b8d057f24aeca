"""What a file of samples has to be able to do to be streamed.

Every format is brought to the same small shape: a number of samples, the fields that each of them has, the places
where reading may start without waste, and one call that reads a run of samples into arrays that the caller owns. All
else (order, shuffling, budget, batches, workers) is the same for all formats and knows nothing of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Field:
    """One array of each sample.

    Attributes:
        name: as in the file: a column, a dataset, a key; "x" and "y" where the file has no names.
        dtype: as stored, in this machine's byte order.
        shape: of one sample; () for a number.
        is_label: whether it belongs to the second half of a (features, labels) batch.
        is_ragged: whether samples differ in shape, so that `shape` is only the first one's.
        is_tabular: whether it holds the numbers of a table's columns, which are given in the stream's floating type
            even where all of them are integers.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_label: bool = False
    is_ragged: bool = False
    is_tabular: bool = False

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample, as stored."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Layout:
    """How a source can be read.

    Attributes:
        edges: numbers of the first samples of natural blocks (chunks of HDF5, row groups of Parquet, files) and, last,
            the number of samples; None where a run of samples costs what its bytes cost, wherever it begins.
        scratch_bytes: memory that one `read` takes beside the caller's arrays, at most.
        read_bytes: what a read should bring at least, where each has a price of its own, as on a network.
        is_sequential: whether the file can only be read from its beginning (compressed .npz, .csv.gz, a row group
            larger than any window): it is unpacked to a scratch file before it is streamed.
        is_by_sample: whether each sample is read by itself whatever its neighbours are: the source is a SampleSource.
        reason: why it is sequential, as a sentence for people; "" otherwise.
    """

    edges: Array | None = None
    scratch_bytes: int = 0
    read_bytes: int = 0
    is_sequential: bool = False
    is_by_sample: bool = False
    reason: str = ""


class Source(Protocol):
    """Samples in a file or in several.

    It can be pickled and read after a fork: files are opened in the process that reads them. Several threads may call
    `read` at once.
    """

    @property
    def name(self) -> str:
        """What the user calls it: a path, or several."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """The arrays of a sample, in the order in which they are given out."""

    @property
    def num_samples(self) -> int:
        """Samples in it."""

    @property
    def layout(self) -> Layout:
        """How it can be read."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes that label numbers stand for; () where labels are as stored."""

    def fingerprint(self) -> str:
        """Changes when the data does: from names, sizes and times of change, not from the contents."""

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        """Fills `out`, one array a field, each of `stop - start` samples, with samples `start` to `stop`.

        The arrays are C-contiguous. They may have another dtype than the field; values are then converted as by
        `astype`. Raises BadFile where the file is damaged, with its name and the offset.
        """

    def drop(self, start: int, stop: int) -> None:
        """These samples were read and won't be again soon: the kernel needn't keep their pages. A hint."""

    def close(self) -> None:
        """Closes what this process has opened; a later read opens it again."""


@runtime_checkable
class SampleSource(Source, Protocol):
    """A source whose samples are read one by one, such as files of images; `read` isn't called then."""

    def read_sample(self, sample: int) -> tuple[Array, ...] | None:
        """One array a field; None where it can't be read and the user chose to skip such samples.

        Raises BadFile, with the sample's name, where the user chose to fail.
        """

    def stored_bytes(self, sample: int) -> int:
        """Bytes of its file."""

    def sample_name(self, sample: int) -> str:
        """What to call it in a message: its path."""
