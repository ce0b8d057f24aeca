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
import math
import os
import threading
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from memfit.core.errors import BadFile, BadInput, reason_of
from memfit.core.units import format_size
from memfit.data.files import fingerprint_of, is_remote
from memfit.data.remote_files import as_file
from memfit.data.source import LARGE_BLOCK_BYTES, Array, FileSource, Layout, PerThread, Storage
from memfit.data.sources.hdf5_contents import (
    MOST_METADATA_BYTES,
    PIECE_BYTES,
    Dataset,
    ceil_divide,
    choose,
    describe,
    find,
    stay_inside,
)
from memfit.data.sources.tables import Names, load

_MOST_BLOCKS = 2**19
# Numbers of HDF5's own filters.
_DEFLATE, _SHUFFLE = 1, 2


class Handle:
    """An open dataset, with a cache for what one run of samples needs, and no more.

    HDF5 does one thing at a time, whoever asks: with gzip, which most files have, two threads wait for each other
    nearly all of the time. A chunk as it is stored is read in a moment, and unpacking it here lets the others go on
    meanwhile. What isn't plain gzip, with or without the shuffle filter, is left to HDF5; so is a chunk that is damaged
    or missing.

    h5py spends 50 microseconds on describing to HDF5 what is read and where to, and the reading itself takes 4: so the
    descriptions are kept.
    """

    def __init__(self, file: Any, dataset: Dataset) -> None:
        import h5py

        access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
        # Chunks that were read to their end go first; with 1.0 others would never go, whatever the size of the cache.
        access.set_chunk_cache(dataset.num_slots, dataset.cache_bytes, 0.99)
        self.opened = h5py.Dataset(h5py.h5d.open(file.id, dataset.path.encode(), access))
        if self.opened.shape != (dataset.num_samples, *dataset.field.shape):
            raise OSError(f"dataset {dataset.path!r} is now of shape {self.opened.shape}")
        self._dataset = dataset
        self._stored = dataset.field.dtype
        self._type = h5py.h5t.py_create(self._stored)
        self._chosen = self.opened.id.get_space()
        self._target: tuple[tuple[int, ...], Any] = (), None
        settings = self.opened.id.get_create_plist()
        filters = [settings.get_filter(index)[0] for index in range(settings.get_nfilters())]
        self._is_shuffled = _SHUFFLE in filters and self._stored.itemsize > 1
        self._is_plain_gzip = (
            filters in ([_DEFLATE], [_SHUFFLE, _DEFLATE])
            and dataset.chunks is not None
            and dataset.chunks[1:] == dataset.field.shape
            and self.opened.dtype == self._stored
        )

    def unpack(self, lock: threading.RLock, start: int, stop: int, out: Array) -> bool:
        """Fills `out` with samples `start` to `stop`, if they are whole chunks; False where HDF5 has to do it."""
        chunks = self._dataset.chunks
        if not self._is_plain_gzip or chunks is None or out.dtype != self._stored:
            return False
        step = chunks[0]
        if start % step or (stop % step and stop != self._dataset.num_samples):
            return False
        for first in range(start, stop, step):
            with lock:
                try:
                    skipped, packed = self.opened.id.read_direct_chunk((first, *(0 for _ in chunks[1:])))
                except (OSError, RuntimeError, ValueError, MemoryError):
                    # The last where a chunk was never written: its size is taken for -1.
                    return False
            if skipped or not self._unpack_chunk(packed, out[first - start : first - start + step]):
                return False
        return True

    def _unpack_chunk(self, packed: bytes, out: Array) -> bool:
        size = self._dataset.chunk_bytes
        try:
            plain = zlib.decompress(packed, bufsize=size)
        except zlib.error:
            return False
        if len(plain) != size:
            return False
        if self._is_shuffled:
            # All first bytes of the values come first, then all second ones.
            values = np.frombuffer(plain, np.uint8).reshape(self._stored.itemsize, -1)
            np.copyto(out.reshape(-1).view(np.uint8).reshape(out.size, -1), values[:, : out.size].T)
        else:
            np.copyto(out, np.frombuffer(plain, self._stored, out.size).reshape(out.shape))
        return True

    def read(self, start: int, stop: int, out: Array) -> None:
        """Fills `out` with samples `start` to `stop`, read by HDF5."""
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
        """Fills an array of the stored type with the samples from `start` on."""
        import h5py

        if out.size == 0:
            return
        if self._target[0] != out.shape:
            self._target = out.shape, h5py.h5s.create_simple(out.shape)
        self._chosen.select_hyperslab((start, *(0 for _ in out.shape[1:])), out.shape)
        self.opened.id.read(self._target[1], self._chosen, out, self._type)

    def describe_damage(self, start: int, stop: int, reason: str) -> str:
        """Where among these samples the dataset is damaged: the first chunk that can't be read."""
        chunks = self._dataset.chunks
        if chunks is not None:
            for region in self.opened.iter_chunks(
                (slice(start, stop), *(slice(0, size) for size in self._dataset.field.shape))
            ):
                try:
                    self.opened[region]
                except (OSError, RuntimeError) as error:
                    corner = tuple(part.start // size * size for part, size in zip(region, chunks, strict=True))
                    where = f"in the chunk that begins with sample {corner[0]}"
                    try:
                        where += f", at offset {self.opened.id.get_chunk_info_by_coord(corner).byte_offset} of the file"
                    except (OSError, RuntimeError):
                        where += ", whose place in the file can't be found"
                    return f"{where}: {reason_of(error)}"
        offset = self.opened.id.get_offset() if chunks is None else None
        sample_bytes = self._dataset.field.sample_bytes
        place = "" if offset is None else f", from offset {offset + start * sample_bytes} of the file on"
        return f"among samples {start} to {stop}{place}: {reason}"


class _Opened(NamedTuple):
    """The file as one process has it open."""

    lock: threading.RLock
    file: Any
    handles: list[Handle]


class Hdf5Source(FileSource):
    """Rows of the datasets of an HDF5 file, read chunk by chunk.

    Columns and labels are paths of datasets; they are told by their names where none are given.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Names = None,
        labels: str | None = None,
        follow_links: bool = False,
    ) -> None:
        super().__init__(path)
        name = self.name
        file = _open(name, self._place)
        try:
            features, targets = choose(file, columns, labels, name)
            keys = [*features, *targets]
            if not follow_links:
                for key in keys:
                    stay_inside(file, key, f"dataset {key!r} of {name!r}")
            datasets = tuple(describe(find(file, key, name), key, key in targets, name) for key in keys)
        except (OSError, RuntimeError, KeyError) as error:
            raise BadFile(f"{name!r} is damaged: {reason_of(error)}. Copy or make it again.") from error
        finally:
            file.close()
        if len({dataset.num_samples for dataset in datasets}) > 1:
            each = ", ".join(f"{dataset.path!r} has {dataset.num_samples:,}" for dataset in datasets)
            raise BadInput(f"datasets of {name!r} differ in their number of samples: {each}. They must be equal.")
        self._datasets = datasets
        self._opened: PerThread[_Opened] = PerThread(per_process=True)
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
        if stop <= start:
            return
        opened = self._opened.get(self._open)
        for dataset, handle, array in zip(self._datasets, opened.handles, out, strict=True):
            if handle.unpack(opened.lock, start, stop, array):
                continue
            with opened.lock:
                try:
                    handle.read(start, stop, array)
                except (OSError, RuntimeError) as error:
                    raise BadFile(
                        f"dataset {dataset.path!r} of {self.name!r} is damaged "
                        f"{handle.describe_damage(start, stop, reason_of(error))}. Copy or make the file again."
                    ) from error
        # HDF5 gives zeros for what lies beyond the end of a file that was cut off after it was opened.
        if not is_remote(self._place):
            # One that was deleted, but is open, is still there.
            with contextlib.suppress(OSError):
                size = os.stat(self._place).st_size
                if size < self._file.size:
                    raise BadFile(
                        f"{self.name!r} has become shorter: it had {self._file.size} bytes and now ends at offset "
                        f"{size}. Leave the file as it is while it is read, or start again."
                    )

    def close(self) -> None:
        opened = self._opened.take_out()
        if opened is not None:
            with opened.lock:
                opened.file.close()
        super().close()

    def storage(self) -> Storage:
        lines: list[str] = []
        warnings: list[str] = []
        for dataset, handle in zip(self._datasets, self._opened.get(self._open).handles, strict=True):
            name, opened, chunks = dataset.path, handle.opened, dataset.chunks
            if chunks is None:
                lines.append(f"{name}: in one piece, without compression")
                continue
            share = opened.id.get_storage_size() / max(1, opened.nbytes)
            method = f"compressed with {opened.compression} to {share:.0%}"
            if opened.compression is None:
                # Filters that h5py has no name for.
                method = "other filters" if dataset.is_filtered else "no compression"
            lines.append(f"{name}: chunks of {list(chunks)}, {format_size(dataset.chunk_bytes)}, {method}")
            across = math.prod(dataset.chunk_grid)
            if across > 1:
                warnings.append(
                    f"the chunks of {name!r} cut across samples: one sample lies in {across} chunks, and each read "
                    f"unpacks all of them with {chunks[0]} samples each. `memfit data convert` writes chunks of whole "
                    "samples."
                )
            if dataset.chunk_bytes * across > LARGE_BLOCK_BYTES:
                warnings.append(
                    f"the chunks of {name!r} are large for shuffling: {format_size(dataset.chunk_bytes * across)} are "
                    f"unpacked together, {chunks[0]} samples that lie side by side. `memfit data convert` writes "
                    "chunks of 1 MiB."
                )
        return Storage(tuple(lines), tuple(warnings))

    def _open(self) -> _Opened:
        file = _open(self.name, self._place)
        try:
            return _Opened(threading.RLock(), file, [Handle(file, dataset) for dataset in self._datasets])
        except (OSError, RuntimeError, KeyError) as error:
            file.close()
            raise BadFile(
                f"{self.name!r} has changed since it was opened: {reason_of(error)}. Leave the file as it is "
                "while it is read."
            ) from error


def _open(name: str, place: str) -> Any:
    """The file, by h5py."""
    h5py = load("h5py", f"{name!r} is an HDF5 file")
    try:
        file = h5py.File(as_file(place), "r") if is_remote(place) else h5py.File(place, "r", locking="best-effort")
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
