"""`memfit.stream` and `memfit.open_array`: data larger than memory, for every framework.

The parts under `data` know no framework; here a source is opened, unpacked where it can't be read in blocks, and given
the forms that PyTorch, Keras and TensorFlow take.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from memfit.catalogue.host import host_memory_bytes
from memfit.core import env
from memfit.core.errors import BadInput
from memfit.core.units import GIB, MIB, format_size, parse_size
from memfit.data.array import ArrayFile, open_array
from memfit.data.geometry import divide, sizes_of
from memfit.data.source import Layout
from memfit.data.sources.opening import open_source
from memfit.data.stream import DEFAULTS, ArrayStream, StreamOptions, given_dtypes

if TYPE_CHECKING:
    from memfit.frameworks.keras.streaming import KerasStream
    from memfit.frameworks.torch.streaming import StreamLoader, TorchStream

__all__ = ["ArrayFile", "Stream", "StreamOptions", "open_array", "stream"]

_log = logging.getLogger("memfit")

# Of the memory that the container may have, this share is for data; the model needs the rest.
_AUTO_SHARE = 4
_AUTO_LEAST, _AUTO_MOST = 64 * MIB, 4 * GIB


class Stream(ArrayStream):
    """Batches of data that may be larger than memory; each iteration is an epoch. Made by `memfit.stream`.

    As it is, it gives NumPy arrays, read by one thread ahead. `loader`, `torch`, `keras`, `tensorflow` and `parallel`
    give the same batches in the same order to frameworks and with workers.
    """

    def __repr__(self) -> str:
        share = "" if self.rank is None else f", rank {self.rank} of {self.num_ranks}"
        return (
            f"Stream({self.source.name!r}, {self.num_samples} samples in batches of {self.batch_size}, "
            f"memory {format_size(self.memory_bytes)}, epoch {self.epoch}{share})"
        )

    def __iter__(self) -> Iterator[Any]:
        """An epoch of NumPy batches."""
        if self.rank is None and env.launched_rank() is not None:
            _log.warning(
                "this is one of several ranks, and the stream gives all batches to each of them. `stream.split(rank, "
                "num_ranks)` gives it its share; `stream.loader()` and a guard do that by themselves."
            )
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        """Refused, for who gives the stream itself to a DataLoader."""
        raise BadInput(
            "a stream gives batches in order and can't be indexed. For PyTorch take `stream.loader()`, or "
            "`DataLoader(stream.torch(), batch_size=None)`; for Keras `stream.keras()`. `memfit.open_array` gives "
            "single samples."
        )

    def loader(self, num_workers: int = 0, **options: Any) -> "StreamLoader":
        """A loader of torch tensors whose state is the position of the training, not of its workers.

        Args:
            num_workers: processes that read and transform.
            options: of PyTorch's DataLoader, such as pin_memory and persistent_workers.
        """
        from memfit.frameworks.torch.streaming import StreamLoader

        return StreamLoader(self, num_workers, **options)

    def torch(self) -> "TorchStream":
        """An IterableDataset for a DataLoader of one's own, which takes batch_size=None: it gives whole batches."""
        from memfit.frameworks.torch.streaming import TorchStream

        return TorchStream(self)

    def keras(self, num_workers: int = 0) -> "KerasStream":
        """A PyDataset for `fit`, `evaluate` and `predict` of Keras 3, on every backend."""
        from memfit.frameworks.keras.streaming import KerasStream

        return KerasStream(self, num_workers)

    def tensorflow(self, num_workers: int = 0) -> Any:
        """A tf.data.Dataset."""
        from memfit.frameworks.tensorflow.streaming import as_tf_dataset

        return as_tf_dataset(self, num_workers)


def stream(
    source: Any,
    *,
    batch_size: int,
    shuffle: bool = True,
    transform: Callable[..., Any] | None = None,
    memory: str | int = "512MiB",
    columns: Any = None,
    labels: Any = None,
    options: StreamOptions = DEFAULTS,
) -> Stream:
    """Batches of data that may be larger than memory, shuffled, resumable, within a budget of bytes.

    Args:
        source: path of a .npy, .npz, HDF5, Parquet, Arrow or CSV file or of a folder of images; a list or a pattern of
            such paths, which are read one after the other; a pair (features, labels); a dict of named ones; local, or a
            URL such as s3://bucket/data.npy.
        batch_size: samples of a batch, on each rank.
        shuffle: whether each epoch has an order of its own, which depends on seed and epoch alone.
        transform: function of a sample's features, or of features and label; may take `rng`, a NumPy generator seeded
            for this sample. The program's own generators are seeded for it, too.
        memory: budget of data in memory, all workers together; "auto" for up to a quarter of what the container may
            have, which the ranks of this machine share. The order follows from it, too: give a size where runs on
            machines of different memory are to have the same.
        columns: names of the columns, datasets or keys to give; all of them by default.
        labels: name of the column, dataset or key with the labels, or path of a file with them.
        options: seed, batch transform, type of floating values, and what to do with errors, changed files and links.
    """
    memory_bytes = _budget(memory)
    opened = open_source(
        source, columns=columns, labels=labels, on_error=options.on_error, follow_links=options.follow_links
    )
    layout = opened.layout
    if layout.is_sequential or (layout.edges is not None and layout.scratch_bytes > memory_bytes // 4):
        # It can't be read in blocks that the budget allows. Checked before much is written for nothing.
        sizes = sizes_of(opened.fields, given_dtypes(opened.fields, options.dtype))
        divide(opened.num_samples, Layout(), sizes, batch_size, memory_bytes, shuffle=shuffle)
        from memfit.data.sources.spool import spooled

        opened = spooled(opened)
    return Stream(
        opened,
        batch_size=batch_size,
        shuffle=shuffle,
        transform=transform,
        memory_bytes=memory_bytes,
        options=options,
        randomness=_randomness(),
    )


def _budget(memory: str | int) -> int:
    if memory != "auto":
        return parse_size(memory)
    limit = host_memory_bytes()
    if limit is None:
        return 512 * MIB
    share = max(limit // _AUTO_SHARE // env.num_local_ranks(), _AUTO_LEAST)
    # Not of what is free, and a power of two: the order follows from the budget, and must be the same in all ranks and
    # when a run is resumed, though no two processes take equally much.
    return int(min(2 ** (share.bit_length() - 1), _AUTO_MOST))


def _randomness() -> tuple[Any, ...]:
    if "torch" not in sys.modules:
        return ()
    from memfit.frameworks.torch.streaming import TorchRandomness

    return (TorchRandomness(),)
