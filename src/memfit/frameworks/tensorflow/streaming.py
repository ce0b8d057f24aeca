"""Streams as tf.data.

Each iteration of the dataset is an epoch of the stream, in the stream's order. TensorFlow holds one batch ahead, and no
more: its own tuning of buffers would fill memory that the stream was told not to use.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from memfit.core.errors import BadInput
from memfit.core.streams import BatchStream


def as_tf_dataset(stream: BatchStream, num_workers: int = 0) -> "tf.data.Dataset":
    """A `tf.data.Dataset` of the stream's batches; the last one may be smaller.

    Iterating over it again is the next epoch, also where the last iteration was left before its end. A model that isn't
    built yet takes a batch first to learn its shape, which counts as such an iteration. The number of batches is known
    to TensorFlow unless the stream was resumed in the middle of an epoch.

    Args:
        stream: to read; its position moves on with the iterations.
        num_workers: processes that read and transform; by default that happens in this process.

    Raises:
        BadInput: the stream is empty.
    """
    with contextlib.closing(stream.copy().part(0, 1)) as batches:
        first = next(batches, None)
    if first is None:
        raise BadInput("the stream has no batches to make a tf.data.Dataset of.")

    def epoch() -> Iterator[Any]:
        return stream.parallel(num_workers) if num_workers else iter(stream)

    dataset = tf.data.Dataset.from_generator(epoch, output_signature=tf.nest.map_structure(_spec, first))
    if stream.num_batches_left == len(stream):
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(stream)))
    return dataset.prefetch(1)


def _spec(array: Any) -> "tf.TensorSpec":
    array = np.asarray(array)
    return tf.TensorSpec((None, *array.shape[1:]), tf.as_dtype(array.dtype))
