"""Datasets of an HDF5 file as a source of samples.

HDF5 stores a dataset in one piece or in chunks, which are compressed one by one. A chunk is unpacked whole, whichever
part of it is asked for, so that reading follows the chunks, and each dataset has a cache of just the chunks that one
run of samples lies in: with less, a chunk that is read in parts would be unpacked again for each; more is memory for
nothing.

h5py lets go of the interpreter while it reads, and knows all filters, so that it does the reading here; only what gzip
has packed is unpacked beside it (`hdf5_chunks`). It may not be used by a process that was forked while it was in use:
each process opens the file for itself.
"""

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from memfit.core.errors import BadFile, BadInput, MissingDependency
from memfit.core.units import MIB
from memfit.data.files import LocalFile, fingerprint_of, is_remote
from memfit.data.source import Array, Field, Layout
from memfit.data.sources.hdf5_chunks import PackedChunks
from memfit.data.sources.hdf5_contents import (
    MOST_METADATA_BYTES,
    PIECE_BYTES,
    Dataset,
    ceil_divide,
    choose,
    describe,
    find,
    reason_of,
)
from memfit.data.sources.hdf5_links import stay_inside

_DROP_EVERY_BYTES = 16 * MIB
_MOST_BLOCKS = 2**19
# Handles of a parent process, which a child may neither use nor close.
_abandoned: list[object] = []


def open_hdf5(
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | str | None = None,
    labels: Sequence[str] | str | None = None,
    follow_links: bool = False,
) -> "Hdf5Source":
    """The samples of an HDF5 file: rows of its datasets.

    Args:
        path: of the file; may be an address such as s3://bucket/file.h5.
        columns: paths in the file of the datasets that are features; if None, the one that is obvious from the names.
        labels: those that are labels.
        follow_links: whether datasets may lie in other files that this one refers to.

    Raises:
        BadFile: it isn't an HDF5 file, is damaged, or refers to other files.
        BadInput: no such dataset, or one that can't be streamed.
    """
    name = os.fspath(path)
    local = None if is_remote(name) else LocalFile(name)
    # Workers may run in another folder than the one in which a relative path was given.
    place = name if local is None else os.path.abspath(os.path.expanduser(name))
    file = _open(name, place)
    try:
        features, targets = choose(file, columns, labels, name)
        if not follow_links:
            for key in [*features, *targets]:
                stay_inside(file, key, name)
        datasets = tuple(describe(find(file, key, name), key, key in targets, name) for key in [*features, *targets])
    except (OSError, RuntimeError, KeyError) as error:
        raise BadFile(f"{name!r} is damaged: {reason_of(error)}. Copy or make it again.") from error
    finally:
        file.close()
    return Hdf5Source(name, place, local, datasets)


class _Handle:
    """An open dataset.

    h5py spends 50 microseconds on describing to HDF5 what is read and where to, and the reading itself takes 4: so the
    descriptions are kept.
    """

    def __init__(self, dataset: Any, stored: np.dtype[Any], packed: PackedChunks | None) -> None:
        import h5py

        self.dataset = dataset
        self.packed = packed
        self._stored = stored
        self._type = h5py.h5t.py_create(stored)
        self._chosen = dataset.id.get_space()
        self._target: tuple[tuple[int, ...], Any] = (), None

    def read(self, start: int, stop: int, out: Array) -> None:
        if out.dtype == self._stored:
            self.read_stored(start, out)
            return
        # HDF5 converts too, but not as NumPy does (it limits integers, and float16 takes four times as long).
        step = max(1, PIECE_BYTES // max(1, out[:1].size * self._stored.itemsize))
        piece = np.empty((min(step, stop - start), *out.shape[1:]), self._stored)
        for first in range(start, stop, step):
            part = piece[: min(step, stop - first)]
            self.read_stored(first, part)
            np.copyto(out[first - start : first - start + len(part)], part, casting="unsafe")

    def read_stored(self, start: int, out: Array) -> None:
        import h5py

        if out.size == 0:
            return
        if self._target[0] != out.shape:
            self._target = out.shape, h5py.h5s.create_simple(out.shape)
        self._chosen.select_hyperslab((start, *(0 for _ in out.shape[1:])), out.shape)
        self.dataset.id.read(self._target[1], self._chosen, out, self._type)


class _Opened:
    """What one process has open."""

    def __init__(self, file: Any, handles: Sequence[_Handle]) -> None:
        self.process = os.getpid()
        self.lock = threading.RLock()
        self.file = file
        self.handles = handles
        self.undropped_bytes = 0


class Hdf5Source:
    """Rows of datasets, read chunk by chunk.

    Args:
        name: the path, as given.
        place: where it is, from any folder.
        local: the file's bytes; None where it is remote.
        datasets: what is read, features first.
    """

    def __init__(self, name: str, place: str, local: LocalFile | None, datasets: tuple[Dataset, ...]) -> None:
        lengths = {dataset.num_samples for dataset in datasets}
        if len(lengths) > 1:
            each = ", ".join(f"{dataset.path!r} has {dataset.num_samples:,}" for dataset in datasets)
            raise BadInput(f"datasets of {name!r} differ in their number of samples: {each}. They must be equal.")
        self._name = name
        self._place = place
        self._local = local
        self._datasets = datasets
        self._opened: _Opened | None = None
        self._opening = threading.Lock()

    @property
    def name(self) -> str:
        """The path, as given."""
        return self._name

    @property
    def fields(self) -> tuple[Field, ...]:
        """One a dataset."""
        return tuple(dataset.field for dataset in self._datasets)

    @property
    def num_samples(self) -> int:
        """Rows."""
        return self._datasets[0].num_samples

    @property
    def layout(self) -> Layout:
        """Blocks are the chunks of the dataset with the largest samples."""
        largest = max(self._datasets, key=lambda dataset: dataset.field.sample_bytes)
        edges = None
        if largest.chunks is not None:
            # Several chunks are a block where there are very many: the edges of all blocks are held in memory.
            num_merged = ceil_divide(ceil_divide(self.num_samples, largest.chunks[0]), _MOST_BLOCKS)
            step = largest.chunks[0] * num_merged
            edges = np.append(np.arange(0, self.num_samples, step, dtype=np.int64), self.num_samples)
        return Layout(edges, sum(dataset.scratch_bytes for dataset in self._datasets))

    @property
    def classes(self) -> tuple[str, ...]:
        """Names in the attribute "classes" of the labels; none where they have none."""
        return next((dataset.classes for dataset in self._datasets if dataset.classes), ())

    def fingerprint(self) -> str:
        """Changes with the file's size and time of change, and with the choice of datasets."""
        return fingerprint_of([self._place], "hdf5", [dataset.path for dataset in self._datasets])

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        """Fills `out` with samples `start` to `stop`."""
        if stop <= start:
            return
        opened = self._open()
        for dataset, handle, array in zip(self._datasets, opened.handles, out, strict=True):
            if handle.packed is not None and handle.packed.read(opened.lock, start, stop, array):
                continue
            with opened.lock:
                try:
                    handle.read(start, stop, array)
                except (OSError, RuntimeError) as error:
                    raise BadFile(self._damage(dataset, handle.dataset, start, stop, reason_of(error))) from error
        self._check_size()

    def drop(self, start: int, stop: int) -> None:
        """Gives the kernel's pages of the file back, from time to time.

        Not just those of these samples: the kernel reads ahead in pieces of up to some MiB, and a piece that is only
        partly given back stays whole. Dropped chunk by chunk, 95% of a file stayed in memory.
        """
        if self._local is None:
            return
        opened = self._open()
        opened.undropped_bytes += (stop - start) * sum(dataset.field.sample_bytes for dataset in self._datasets)
        if opened.undropped_bytes >= _DROP_EVERY_BYTES:
            self._local.drop(0, self._local.size)
            opened.undropped_bytes = 0

    def close(self) -> None:
        """Closes the file in this process; a later read opens it again."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        if opened.process != os.getpid():
            _abandoned.append(opened)
            return
        with opened.lock:
            opened.file.close()
        if self._local is not None:
            self._local.close()

    def _open(self) -> _Opened:
        opened = self._opened
        if opened is not None and opened.process == os.getpid():
            return opened
        if opened is not None:
            # A lock that another thread of the parent held is held for ever here.
            _abandoned.append(opened)
            self._opening, self._opened = threading.Lock(), None
        with self._opening:
            if self._opened is None:
                file = _open(self._name, self._place)
                try:
                    self._opened = _Opened(file, [_open_cached(file, dataset) for dataset in self._datasets])
                except (OSError, RuntimeError, KeyError) as error:
                    file.close()
                    raise BadFile(
                        f"{self._name!r} has changed since it was opened: {reason_of(error)}. Leave the file as it is "
                        "while it is read."
                    ) from error
            return self._opened

    def _check_size(self) -> None:
        """HDF5 gives zeros for what lies beyond the end of a file that was cut off after it was opened."""
        if self._local is None:
            return
        try:
            size = os.stat(self._place).st_size
        except OSError:
            # Deleted, but open: all of it is still there.
            return
        if size < self._local.size:
            raise BadFile(
                f"{self._name!r} has become shorter: it had {self._local.size} bytes and now ends at offset {size}. "
                "Leave the file as it is while it is read, or start again."
            )

    def _damage(self, dataset: Dataset, handle: Any, start: int, stop: int, reason: str) -> str:
        said = f"dataset {dataset.path!r} of {self._name!r} is damaged"
        hint = "Copy or make the file again."
        for corner, region in _chunk_regions(dataset, start, stop):
            try:
                handle[region]
            except (OSError, RuntimeError) as error:
                where = f" in the chunk that begins with sample {corner[0]}"
                try:
                    where += f", at offset {handle.id.get_chunk_info_by_coord(corner).byte_offset} of the file"
                except (OSError, RuntimeError):
                    where += ", whose place in the file can't be found"
                return f"{said}{where}: {reason_of(error)}. {hint}"
        place = ""
        if dataset.chunks is None:
            offset = handle.id.get_offset()
            if offset is not None:
                place = f", from offset {offset + start * dataset.field.sample_bytes} of the file on"
        return f"{said} among samples {start} to {stop}{place}: {reason}. {hint}"

    def __getstate__(self) -> tuple[Any, ...]:
        return self._name, self._place, self._local, self._datasets

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"Hdf5Source({self._name!r})"


def _open(name: str, place: str) -> Any:
    """The file, by h5py.

    Raises:
        BadFile: it isn't one.
        MissingDependency: h5py isn't installed.
    """
    try:
        import h5py
    except ImportError as error:
        raise MissingDependency(f"{name!r} is an HDF5 file, for which h5py is needed: pip install h5py") from error
    target: Any = place
    options = {"locking": "best-effort"}
    if is_remote(place):
        from memfit.data.remote_files import as_file

        target, options = as_file(place), {}
    try:
        file = h5py.File(target, "r", **options)
    except (OSError, RuntimeError) as error:
        reason = reason_of(error)
        if "truncated file" in reason:
            raise BadFile(f"{name!r} is truncated: {reason}. Copy or make it again.") from error
        if "file signature not found" in reason:
            raise BadFile(f"{name!r} is not an HDF5 file: it lacks the signature that these begin with.") from error
        raise BadFile(f"{name!r} can't be opened as HDF5: {reason}.") from error
    config = file.id.get_mdc_config()
    config.max_size = MOST_METADATA_BYTES
    file.id.set_mdc_config(config)
    return file


def _open_cached(file: Any, dataset: Dataset) -> _Handle:
    """A dataset whose cache holds what one run of samples needs, and no more."""
    import h5py

    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    # Chunks that were read to their end go first; with 1.0 others would never go, whatever the size of the cache.
    access.set_chunk_cache(dataset.num_slots, dataset.cache_bytes, 0.99)
    handle = h5py.Dataset(h5py.h5d.open(file.id, dataset.path.encode(), access))
    if handle.shape != (dataset.num_samples, *dataset.field.shape):
        raise OSError(f"dataset {dataset.path!r} is now of shape {handle.shape}")
    return _Handle(handle, dataset.field.dtype, PackedChunks.of(dataset, handle))


def _chunk_regions(dataset: Dataset, start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """The first corner of each chunk that has some of these samples, and what part of the dataset it is."""
    if dataset.chunks is None:
        return
    shape = (dataset.num_samples, *dataset.field.shape)
    rows = range(start // dataset.chunks[0], ceil_divide(stop, dataset.chunks[0]))
    for place in itertools.product(rows, *(range(size) for size in dataset.chunk_grid)):
        corner = tuple(index * size for index, size in zip(place, dataset.chunks, strict=True))
        ends = (min(first + size, end) for first, size, end in zip(corner, dataset.chunks, shape, strict=True))
        yield corner, tuple(slice(first, end) for first, end in zip(corner, ends, strict=True))
