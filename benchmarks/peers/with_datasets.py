"""Hugging Face datasets: an IterableDataset with a shuffle buffer, which its guide recommends for large data."""

from pathlib import Path

import numpy as np

from benchmarks.peers.measure import measure, parse

# Its guide's example; the buffer holds so many rows.
_BUFFER_ROWS = 1000
_NUM_FILES = 32


def prepare(source: str, folder: str) -> None:
    """Writes Parquet files, which is what most of its data sets are stored as."""
    import pyarrow
    import pyarrow.parquet as parquet

    array = np.load(source, mmap_mode="r")
    Path(folder).mkdir(parents=True)
    for number, rows in enumerate(np.array_split(np.arange(len(array)), _NUM_FILES)):
        part = np.array(array[rows[0] : rows[-1] + 1])
        column = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(part.reshape(-1)), part.shape[1])
        parquet.write_table(pyarrow.table({"x": column}), f"{folder}/{number:03d}.parquet", row_group_size=1000)


def read(folder: str, batch_size: int, workers: int, seconds: float) -> None:
    """One epoch."""
    from datasets import load_dataset
    from torch.utils.data import DataLoader

    files = sorted(str(path) for path in Path(folder).glob("*.parquet"))
    data = load_dataset("parquet", data_files=files, split="train", streaming=True)
    shuffled = data.shuffle(seed=0, buffer_size=_BUFFER_ROWS).with_format("torch")
    loader = DataLoader(shuffled, batch_size=batch_size, num_workers=workers)
    measure(loader, seconds, lambda batch: batch["x"][:, 0])


if __name__ == "__main__":
    parse(prepare, read)
