"""Chunks of HDF5 datasets, unpacked by several threads at once.

HDF5 does one thing at a time, whoever asks: with gzip, which most files have, two threads wait for each other nearly
all of the time. A chunk as it is stored is read in a moment, and unpacking it here lets the others go on meanwhile.
What isn't plain gzip, with or without the shuffle filter, is left to HDF5; so is a chunk that is damaged or missing.
"""

import threading
import zlib
from typing import Any

import numpy as np

from memfit.data.source import Array
from memfit.data.sources.hdf5_contents import Dataset

# Numbers of HDF5's own filters.
_DEFLATE, _SHUFFLE = 1, 2


class PackedChunks:
    """The chunks of a dataset that is packed with gzip, each of which holds whole samples.

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
        """Fills `out` with samples `start` to `stop`; False where HDF5 has to do it.

        Args:
            lock: held while HDF5 is asked.
            start: a sample that begins a chunk.
            stop: after the last one.
            out: of the dataset's own type.
        """
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
            np.copyto(_bytes_of(out), values[:, : out.size].T)
        else:
            np.copyto(out, np.frombuffer(plain, kind, out.size).reshape(out.shape))
        return True


def _bytes_of(out: Array) -> Array:
    """The bytes of an array's values, one row a value."""
    flat: Array = out.reshape(-1).view(np.uint8).reshape(out.size, -1)
    return flat
