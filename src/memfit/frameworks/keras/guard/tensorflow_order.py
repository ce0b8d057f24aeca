"""Arrays as a TensorFlow data set in an order that is given for each pass."""

from collections.abc import Callable
from typing import Any

import keras
import numpy
import tensorflow as tf


def ordered(adapter: Any, order: Callable[[int, int], Any]) -> Any:
    """The batches of Keras's adapter of arrays, in an order of our own.

    `order` gives the numbers of all samples for the next pass, from their count and the size of a batch.
    """
    num_samples, size = int(adapter._num_samples), int(adapter.batch_size)
    arrays = [None if one is None else tf.convert_to_tensor(one) for one in keras.tree.flatten(adapter._inputs)]
    whole = num_samples % size == 0

    def next_order() -> Any:
        return numpy.asarray(order(num_samples, size), numpy.int64)

    def batches(_: Any) -> Any:
        numbers = tf.numpy_function(next_order, [], tf.int64, stateful=True)
        numbers.set_shape([num_samples])

        def batch(start: Any) -> Any:
            chosen = numbers[start : start + size]
            if whole:
                # Keras's own says so, too, and steps are traced for what is known of a batch.
                chosen.set_shape([size])
            parts = [None if one is None else tf.gather(one, chosen, axis=0) for one in arrays]
            return keras.tree.lists_to_tuples(keras.tree.pack_sequence_as(adapter._inputs, parts))

        return tf.data.Dataset.range(0, num_samples, size).map(batch, num_parallel_calls=tf.data.AUTOTUNE)

    return tf.data.Dataset.range(1).flat_map(batches).prefetch(tf.data.AUTOTUNE)
