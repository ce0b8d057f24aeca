"""The memory of a Keras training step on TensorFlow, measured: every allocation and free, by its profiler.

Runs in a process in which TensorFlow's allocator reports all that it gives; see
`benchmarks.measuring_tensorflow`. Operators run in parallel, so that steps of one model differ: the median of several
counts, and how far they are apart is given beside it.
The batch is made of TensorFlow's tensors: it takes an array of NumPy as it is where that lies on a boundary of 64
bytes, and copies it otherwise, so that the sum would depend on where arrays happen to lie.
"""

import statistics
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from benchmarks.keras_models import Case
from benchmarks.measuring_tensorflow import recorded

NUM_STEPS = 8
HOW = (
    f"median of the peaks of {NUM_STEPS - 1} training steps: the greatest sum of what TensorFlow's CPU allocator was "
    "asked for and had not got back, by its profiler"
)


def _owned(array: Any) -> Any:
    return tf.constant(array) + tf.zeros((), array.dtype)


def measure(case: Case) -> dict[str, Any]:
    """The median of the peaks, and the least and the greatest; call it in a fresh process."""

    def run(step: Callable[[int], Any]) -> None:
        model, (x, y) = case.make(), keras.tree.map_structure(_owned, case.batch(case.batch_size))
        for number in range(1, NUM_STEPS + 1):
            with step(number):
                model.train_on_batch(x, y)

    peaks = recorded(run).step_bytes
    return {"measured": round(statistics.median(peaks)), "least": min(peaks), "greatest": max(peaks)}
