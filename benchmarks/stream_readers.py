"""Readers that the benchmark of speed compares, each run in a process of its own under a limit of memory.

    python -m benchmarks.stream_readers READER PATH --workers 2 --batch-size 256 --seconds 60

Readers: `memfit` (memfit.stream), `memmap` (a map-style Dataset over np.memmap in a shuffled DataLoader), `raw1` and
`raw16` (the file from its beginning to its end by preadv, in blocks of 1 and 16 MiB, which are dropped from the page
cache; nothing is shuffled or given out), `h5py` and `pyarrow` (the loops that one would write by hand: chunks and row
groups in a shuffled order, with the samples of what is in memory shuffled).
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.measure import measure
from memfit.core.units import MIB

MEMORY = "256MiB"


def read_raw(path: Path, block_bytes: int) -> Iterator[Any]:
    """Blocks of the file as rows; the last, which may be a part of a row, is counted by its whole rows."""
    stored = np.load(path, mmap_mode="r")
    num_columns, start, kind = stored.shape[1], int(stored.offset), stored.dtype
    del stored
    row_bytes = num_columns * kind.itemsize
    buffer = np.empty(block_bytes // row_bytes * row_bytes, np.uint8)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while True:
            count = os.preadv(descriptor, [buffer], start)
            if count == 0:
                return
            os.posix_fadvise(descriptor, start, count, os.POSIX_FADV_DONTNEED)
            start += count
            yield buffer[:count].view(kind).reshape(-1, num_columns)
    finally:
        os.close(descriptor)


def memmap_loader(path: Path, batch_size: int, workers: int) -> Any:
    """What most tutorials do with a file larger than memory."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset[Any]):
        def __init__(self) -> None:
            self.array = np.load(path, mmap_mode="r")

        def __len__(self) -> int:
            return len(self.array)

        def __getitem__(self, index: int) -> Any:
            return torch.from_numpy(np.array(self.array[index]))

    return DataLoader(Rows(), batch_size=batch_size, shuffle=True, num_workers=workers)


def read_h5py(path: Path, batch_size: int) -> Iterator[Any]:
    """Whole chunks in a shuffled order, as many as make a batch, shuffled in the batch."""
    import h5py

    generator = np.random.default_rng(0)
    with h5py.File(path, "r") as file:
        x, y = file["x"], file["y"]
        rows = x.chunks[0]
        starts = generator.permutation(np.arange(0, len(x), rows))
        per_batch = max(1, batch_size // rows)
        for first in range(0, len(starts), per_batch):
            spans = [(start, min(start + rows, len(x))) for start in starts[first : first + per_batch]]
            features = np.concatenate([x[start:stop] for start, stop in spans])
            labels = np.concatenate([y[start:stop] for start, stop in spans])
            order = generator.permutation(len(labels))
            features, labels = features[order], labels[order]
            for begin in range(0, len(labels), batch_size):
                yield features[begin : begin + batch_size], labels[begin : begin + batch_size]


def read_pyarrow(path: Path, batch_size: int) -> Iterator[Any]:
    """Row groups in a shuffled order, shuffled in each."""
    import pyarrow.parquet as parquet

    generator = np.random.default_rng(0)
    file = parquet.ParquetFile(path)
    for group in generator.permutation(file.num_row_groups):
        found = file.read_row_group(int(group))
        labels = found["y"].to_numpy()
        features = found["x"].combine_chunks().flatten().to_numpy().reshape(len(labels), -1)
        order = generator.permutation(len(labels))
        for begin in range(0, len(labels), batch_size):
            rows = order[begin : begin + batch_size]
            yield features[rows], labels[rows]


def batches_of(reader: str, path: Path, batch_size: int, workers: int) -> Any:
    """The epoch of a reader."""
    if reader.startswith("raw"):
        return read_raw(path, int(reader.removeprefix("raw")) * MIB)
    if reader == "memmap":
        return memmap_loader(path, batch_size, workers)
    if reader == "h5py":
        return read_h5py(path, batch_size)
    if reader == "pyarrow":
        return read_pyarrow(path, batch_size)
    import memfit

    labels = None if path.suffix == ".npy" else "y"
    stream = memfit.stream(path, batch_size=batch_size, memory=MEMORY, labels=labels)
    if type(stream.source).__name__ == "SpooledSource":
        raise SystemExit("it was unpacked to another file first, which isn't what is compared here")
    return stream.loader(num_workers=workers) if workers else stream


def main() -> int:
    """Reads one epoch and prints what was counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reader")
    parser.add_argument("path", type=Path)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600.0)
    given = parser.parse_args()
    batches = batches_of(given.reader, given.path, given.batch_size, given.workers)
    measure(batches, given.seconds, lambda batch: batch[1] if isinstance(batch, (tuple, list)) else batch[:, 0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
