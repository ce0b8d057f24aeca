"""What a file of samples has to be able to do to be streamed.

Every format is brought to the same small shape: a number of samples, the fields that each of them has, where reading
may start without waste, and one call that reads a run of samples into arrays that the caller owns. All else (order,
shuffling, budget, batches, workers) is the same for all formats and knows nothing of them.
"""

import contextlib
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import numpy as np

from memfit.core.errors import BadFile, BadInput
from memfit.data.files import absolute, open_file

Array = np.ndarray[Any, np.dtype[Any]]
_T = TypeVar("_T")
LARGE_BLOCK_BYTES = 4 << 20
"""A window of an ordinary budget holds only a few dozen blocks that are larger than this."""
# What a parent process has open, which a forked child may neither use nor close.
_abandoned: list[object] = []


@dataclass(frozen=True, slots=True)
class Field:
    """One array of each sample."""

    name: str  # as in the file: a column, a dataset, a key; "x" and "y" where the file has no names
    dtype: np.dtype[Any]  # as stored, in this machine's byte order
    shape: tuple[int, ...]  # of one sample; () for a number
    is_label: bool = False  # belongs to the second half of a (features, labels) batch
    is_ragged: bool = False  # samples differ in shape, so that `shape` is only the first one's
    # Holds the numbers of a table's columns, which are given in the stream's floating type even where all are integers.
    is_tabular: bool = False

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample, as stored."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a source can be read."""

    # First samples of natural blocks (chunks of HDF5, row groups of Parquet, files) and, last, the number of samples;
    # None where a run of samples costs what its bytes cost, wherever it begins.
    edges: Array | None = None
    scratch_bytes: int = 0  # memory that one `read` takes beside the caller's arrays, at most
    read_bytes: int = 0  # what a read should bring at least, where each has a price of its own, as on a network
    # The file can only be read from its beginning (compressed .npz, a row group larger than any window): it is unpacked
    # to a scratch file before it is streamed.
    is_sequential: bool = False
    is_by_sample: bool = False  # each sample is read by itself: the source is a SampleSource
    reason: str = ""  # why it is sequential, as a sentence for people


@dataclass(frozen=True, slots=True)
class Storage:
    """How a source stores its samples, for people."""

    lines: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # what is worth changing
    is_text: bool = False  # numbers are stored as text, so that their types are the reader's


class Source:
    """Samples in a file or in several.

    It can be pickled and read after a fork: files are opened in the process that reads them. Several threads may call
    `read` at once.
    """

    name: str  # what the user calls it: a path, or several
    fields: tuple[Field, ...]  # in the order in which they are given out
    num_samples: int
    layout: Layout
    classes: tuple[str, ...] = ()  # that label numbers stand for; () where labels are as stored

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample, as stored, all fields together."""
        return sum(field.sample_bytes for field in self.fields)

    @property
    def total_bytes(self) -> int:
        """Bytes of all samples in memory, as stored."""
        return self.num_samples * self.sample_bytes

    def empty(self, num_samples: int, dtypes: Sequence[np.dtype[Any]] | None = None) -> list[Array]:
        """Arrays for so many samples, one a field, as stored or of other types."""
        types = dtypes or [field.dtype for field in self.fields]
        return [np.empty((num_samples, *field.shape), kind) for field, kind in zip(self.fields, types, strict=True)]

    def fingerprint(self) -> str:
        """Changes when the data does: from names, sizes and times of change, not from the contents."""
        raise NotImplementedError

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        """Fills `out`, one array a field, each of `stop - start` samples, with samples `start` to `stop`.

        The arrays are C-contiguous. They may have another dtype than the field; values are then converted as by
        `astype`. Raises BadFile where the file is damaged, with its name and the offset.
        """
        raise NotImplementedError

    def drop(self, start: int, stop: int) -> None:
        """Tells that these samples won't be read again soon, so that the kernel needn't keep their pages."""

    def close(self) -> None:
        """Closes what this process has opened; a later read opens it again."""

    def sample_name(self, sample: int) -> str:
        """What to call a sample in a message."""
        return f"sample {sample} of {self.name}"

    def storage(self) -> Storage:
        """How it is stored, from headers alone."""
        return Storage()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class FileSource(Source):
    """Samples in one file, local or behind an address, which a library reads.

    Args:
        path: of the file, or its address.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open_file(path)
        # Without the secrets of an address, as the file has it; and what to open, from any folder.
        self.name = self._file.name
        self._place = absolute(os.fspath(path))

    def drop(self, start: int, stop: int) -> None:
        """Gives the kernel's pages of the file back, from time to time."""
        self._file.drop_now_and_then((stop - start) * self.sample_bytes)

    def close(self) -> None:
        """Closes the file in this process; a later read opens it again."""
        self._file.close()


class SampleSource(Source):
    """A source whose samples are read one by one, such as files of images."""

    def read_sample(self, sample: int) -> tuple[Array, ...] | None:
        """One array a field; None where it can't be read and the user chose to skip such samples.

        Raises BadFile, with the sample's name, where the user chose to fail.
        """
        raise NotImplementedError

    def stored_bytes(self, sample: int) -> int:
        """Bytes of its file."""
        raise NotImplementedError

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        """Fills `out` with samples `start` to `stop`, which must all be of one shape."""
        for row, sample in enumerate(range(start, stop)):
            values = self.read_sample(sample)
            if values is None:
                name = self.sample_name(sample)
                raise BadFile(f"{name} can't be read, and a file of samples has no room for a gap.")
            for array, value in zip(out, values, strict=True):
                if array.shape[1:] != value.shape:
                    raise BadInput(
                        f"samples differ in shape: {self.sample_name(sample)} is {list(value.shape)}, and the first "
                        f"one is {list(array.shape[1:])}. Bring them to one shape first, such as by resizing images."
                    )
                array[row] = value


class PerThread(Generic[_T]):
    """A value that each thread of each process makes for itself: it is neither pickled nor used after a fork.

    Args:
        per_process: whether the threads of a process share one value instead.
    """

    def __init__(self, *, per_process: bool = False) -> None:
        self._per_process = per_process
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._values: Any = SimpleNamespace() if self._per_process else threading.local()

    def get(self, make: Callable[[], _T]) -> _T:
        """The value, made now if there is none."""
        if self._process != os.getpid():
            # Also the lock, which another thread of the parent may have held.
            _abandoned.append(self._values)
            self._start()
        value: _T | None = getattr(self._values, "value", None)
        if value is None:
            with self._lock if self._per_process else contextlib.nullcontext():
                value = getattr(self._values, "value", None)
                if value is None:
                    value = self._values.value = make()
        return value

    def forget(self) -> None:
        """Forgets the value of this thread."""
        self._values.__dict__.clear()

    def take_out(self) -> _T | None:
        """Forgets the values of all threads; gives back that of this one where it is of this process."""
        value: _T | None = getattr(self._values, "value", None)
        if self._process != os.getpid():
            _abandoned.append(self._values)
            value = None
        self._start()
        return value

    def __getstate__(self) -> bool:
        return self._per_process

    def __setstate__(self, per_process: bool) -> None:
        self._per_process = per_process
        self._start()
