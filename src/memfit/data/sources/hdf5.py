"""Datasets of an HDF5 file as a source of samples.

HDF5 stores a dataset in one piece or in chunks, which are compressed one by one. A chunk is unpacked whole, whichever
part of it is asked for, so that reading follows the chunks, and each dataset has a cache of just the chunks that one
run of samples lies in: with less, a chunk that is read in parts would be unpacked again for each; more is memory for
nothing.

h5py lets go of the interpreter while it reads, and knows all filters, so that it does the reading here; only what gzip
has packed is unpacked beside it. It may not be used by a process that was forked while it was in use:
each process opens the file for itself.
"""

import contextlib
import itertools
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from memfit.core.errors import BadFile, BadInput, MissingDependency, how_to_install
from memfit.data.files import LocalFile, absolute, fingerprint_of, is_remote
from memfit.data.source import Array, Layout, PerThread, Source
from memfit.data.sources.hdf5_contents import (
    MOST_METADATA_BYTES,
    PIECE_BYTES,
    Dataset,
    ceil_divide,
    choose,
    describe,
    find,
    reason_of,
    stay_inside,
)

_MOST_BLOCKS = 2**19
# Numbers of HDF5's own filters.
_DEFLATE, _SHUFFLE = 1, 2


def open_hdf5(
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | str | None = None,
    labels: Sequence[str] | str | None = None,
    follow_links: bool = False,
) -> "Hdf5Source":
    """The samples of an HDF5 file: rows of its datasets."""
    name = os.fspath(path)
    local = None if is_remote(name) else LocalFile(name)
    file = _open(name, absolute(name))
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
    return Hdf5Source(name, local, datasets)


class PackedChunks:
    """The chunks of a dataset that is packed with gzip, each of which holds whole samples, unpacked by several threads.

    HDF5 does one thing at a time, whoever asks: with gzip, which most files have, two threads wait for each other
    nearly all of the time. A chunk as it is stored is read in a moment, and unpacking it here lets the others go on
    meanwhile. What isn't plain gzip, with or without the shuffle filter, is left to HDF5; so is a chunk that is damaged
    or missing.

    Args:
        dataset: what is read.
        handle: the open dataset.
        is_shuffled: whether bytes were sorted by their place in a value before they were packed.
    """

    def __init__(self, dataset: Dataset, handle: Any, *, is_shuffled: bool) -> None:
        assert dataset.chunks is not None
        self._dataset = dataset
        self._step = dataset.chunks[0]
        self._shape = dataset.chunks
        self._handle = handle
        self._is_shuffled = is_shuffled

    @classmethod
    def of(cls, dataset: Dataset, handle: Any) -> "PackedChunks | None":
        """The chunks of an open dataset; None where HDF5 has to unpack them."""
        if dataset.chunks is None or dataset.chunks[1:] != dataset.field.shape:
            return None
        if handle.dtype != dataset.field.dtype or not hasattr(handle.id, "read_direct_chunk"):
            return None
        settings = handle.id.get_create_plist()
        filters = [settings.get_filter(index)[0] for index in range(settings.get_nfilters())]
        if filters == [_SHUFFLE, _DEFLATE]:
            return cls(dataset, handle, is_shuffled=True)
        return cls(dataset, handle, is_shuffled=False) if filters == [_DEFLATE] else None

    def read(self, lock: threading.RLock, start: int, stop: int, out: Array) -> bool:
        """Fills `out` with samples `start` to `stop`; False where HDF5 has to do it."""
        if start % self._step or out.dtype != self._dataset.field.dtype:
            return False
        if stop % self._step and stop != self._dataset.num_samples:
            return False
        zeros = (0,) * (len(self._shape) - 1)
        for first in range(start, stop, self._step):
            with lock:
                try:
                    skipped, packed = self._handle.id.read_direct_chunk((first, *zeros))
                except (OSError, RuntimeError, ValueError, MemoryError):
                    # The last where a chunk was never written: its size is taken for -1.
                    return False
            if skipped or not self._unpack(packed, out[first - start : first - start + self._step]):
                return False
        return True

    def _unpack(self, packed: bytes, out: Array) -> bool:
        size = self._dataset.chunk_bytes
        try:
            plain = zlib.decompress(packed, bufsize=size)
        except zlib.error:
            return False
        if len(plain) != size:
            return False
        kind = self._dataset.field.dtype
        if self._is_shuffled and kind.itemsize > 1:
            values = np.frombuffer(plain, np.uint8).reshape(kind.itemsize, -1)
            np.copyto(out.reshape(-1).view(np.uint8).reshape(out.size, -1), values[:, : out.size].T)
        else:
            np.copyto(out, np.frombuffer(plain, kind, out.size).reshape(out.shape))
        return True


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
        self.lock = threading.RLock()
        self.file = file
        self.handles = handles


class Hdf5Source(Source):
    """Rows of datasets, read chunk by chunk.

    Args:
        name: the path, as given.
        local: the file's bytes; None where it is remote.
        datasets: what is read, features first.
    """

    def __init__(self, name: str, local: LocalFile | None, datasets: tuple[Dataset, ...]) -> None:
        lengths = {dataset.num_samples for dataset in datasets}
        if len(lengths) > 1:
            each = ", ".join(f"{dataset.path!r} has {dataset.num_samples:,}" for dataset in datasets)
            raise BadInput(f"datasets of {name!r} differ in their number of samples: {each}. They must be equal.")
        self._place = absolute(name)
        self._local = local
        self._datasets = datasets
        self._opened: PerThread[_Opened] = PerThread(per_process=True)
        self.name = name
        self.fields = tuple(dataset.field for dataset in datasets)
        self.num_samples = datasets[0].num_samples
        self.classes = next((dataset.classes for dataset in datasets if dataset.classes), ())
        # Blocks are the chunks of the dataset with the largest samples.
        largest = max(datasets, key=lambda dataset: dataset.field.sample_bytes)
        edges = None
        if largest.chunks is not None:
            # Several chunks are a block where there are very many: the edges of all blocks are held in memory.
            num_merged = ceil_divide(ceil_divide(self.num_samples, largest.chunks[0]), _MOST_BLOCKS)
            step = largest.chunks[0] * num_merged
            edges = np.append(np.arange(0, self.num_samples, step, dtype=np.int64), self.num_samples)
        self.layout = Layout(edges, sum(dataset.scratch_bytes for dataset in datasets))

    def fingerprint(self) -> str:
        """Changes with the file's size and time of change, and with the choice of datasets."""
        return fingerprint_of([self._place], "hdf5", [dataset.path for dataset in self._datasets])

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        """Fills `out` with samples `start` to `stop`."""
        if stop <= start:
            return
        opened = self._opened.get(self._open)
        for dataset, handle, array in zip(self._datasets, opened.handles, out, strict=True):
            if handle.packed is not None and handle.packed.read(opened.lock, start, stop, array):
                continue
            with opened.lock:
                try:
                    handle.read(start, stop, array)
                except (OSError, RuntimeError) as error:
                    raise BadFile(self._damage(dataset, handle.dataset, start, stop, reason_of(error))) from error
        # HDF5 gives zeros for what lies beyond the end of a file that was cut off after it was opened.
        if self._local is not None:
            # One that was deleted, but is open, is still there.
            with contextlib.suppress(OSError):
                size = os.stat(self._place).st_size
                if size < self._local.size:
                    raise BadFile(
                        f"{self.name!r} has become shorter: it had {self._local.size} bytes and now ends at offset "
                        f"{size}. Leave the file as it is while it is read, or start again."
                    )

    def drop(self, start: int, stop: int) -> None:
        """Gives the kernel's pages of the file back, from time to time."""
        if self._local is not None:
            self._local.drop_now_and_then((stop - start) * self.sample_bytes)

    def close(self) -> None:
        """Closes the file in this process; a later read opens it again."""
        opened = self._opened.take_out()
        if opened is not None:
            with opened.lock:
                opened.file.close()
        if self._local is not None:
            self._local.close()

    def _open(self) -> _Opened:
        file = _open(self.name, self._place)
        try:
            return _Opened(file, [_open_cached(file, dataset) for dataset in self._datasets])
        except (OSError, RuntimeError, KeyError) as error:
            file.close()
            raise BadFile(
                f"{self.name!r} has changed since it was opened: {reason_of(error)}. Leave the file as it is "
                "while it is read."
            ) from error

    def _damage(self, dataset: Dataset, handle: Any, start: int, stop: int, reason: str) -> str:
        said = f"dataset {dataset.path!r} of {self.name!r} is damaged"
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
        offset = handle.id.get_offset() if dataset.chunks is None else None
        place = "" if offset is None else f", from offset {offset + start * dataset.field.sample_bytes} of the file on"
        return f"{said} among samples {start} to {stop}{place}: {reason}. {hint}"


def _open(name: str, place: str) -> Any:
    """The file, by h5py."""
    try:
        import h5py
    except ImportError as error:
        raise MissingDependency(
            f"{name!r} is an HDF5 file, for which h5py is needed: {how_to_install('h5py')}"
        ) from error
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
