"""mosaicml-streaming: shards of its own format (MDS), without compression, shuffled by its default algorithm."""

import numpy as np

from benchmarks.peers.measure import measure, parse


def prepare(source: str, folder: str) -> None:
    """Writes its shards, of the default size."""
    from streaming import MDSWriter

    array = np.load(source, mmap_mode="r")
    kind = f"ndarray:{array.dtype.name}:{array.shape[1]}"
    with MDSWriter(out=folder, columns={"x": kind}, compression=None) as writer:
        for row in array:
            writer.write({"x": np.array(row)})


def read(folder: str, batch_size: int, workers: int, seconds: float) -> None:
    """One epoch."""
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    data = StreamingDataset(local=folder, shuffle=True, shuffle_seed=0, batch_size=batch_size)
    measure(DataLoader(data, batch_size=batch_size, num_workers=workers), seconds, lambda batch: batch["x"][:, 0])


if __name__ == "__main__":
    parse(prepare, read)
