"""mosaicml-streaming: shards of its own format (MDS), without compression, shuffled by its default algorithm."""

from typing import Any

import numpy as np
import torch

from benchmarks.peers.measure import measure, parse


def declare_operators() -> Any:
    """Lets torchvision, which the library imports, be imported beside a build of PyTorch that it wasn't made for."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def prepare(source: str, folder: str) -> None:
    """Writes its shards, of the default size."""
    kept = declare_operators()
    from streaming import MDSWriter

    array = np.load(source, mmap_mode="r")
    kind = f"ndarray:{array.dtype.name}:{array.shape[1]}"
    with MDSWriter(out=folder, columns={"x": kind}, compression=None) as writer:
        for row in array:
            writer.write({"x": np.array(row)})
    del kept


def read(folder: str, batch_size: int, workers: int, seconds: float) -> None:
    """One epoch."""
    kept = declare_operators()
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    data = StreamingDataset(local=folder, shuffle=True, shuffle_seed=0, batch_size=batch_size)
    measure(DataLoader(data, batch_size=batch_size, num_workers=workers), seconds, lambda batch: batch["x"][:, 0])
    del kept


if __name__ == "__main__":
    parse(prepare, read)
