"""litdata: chunks of its own format, written by `optimize`, read by its StreamingDataset and StreamingDataLoader."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.peers.measure import measure, parse

_PART_ROWS = 4096


def rows_of(source: str, start: int) -> Iterator[Any]:
    """The rows of one part of the file."""
    import torch

    array = np.load(source, mmap_mode="r")
    for row in np.array(array[start : start + _PART_ROWS]):
        yield {"x": torch.from_numpy(row)}


def prepare(source: str, folder: str) -> None:
    """Writes its chunks, of the size that its guide uses."""
    from litdata import optimize

    starts = list(range(0, len(np.load(source, mmap_mode="r")), _PART_ROWS))
    optimize(functools.partial(rows_of, source), starts, folder, chunk_bytes="64MB", num_workers=1)


def read(folder: str, batch_size: int, workers: int, seconds: float) -> None:
    """One epoch."""
    from litdata import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(folder, shuffle=True, seed=0)
    loader = StreamingDataLoader(data, batch_size=batch_size, num_workers=workers)
    measure(loader, seconds, lambda batch: batch["x"][:, 0])


if __name__ == "__main__":
    parse(prepare, read)
