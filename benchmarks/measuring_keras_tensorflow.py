"""The memory of a Keras training step on TensorFlow, measured: every allocation and free, by its profiler.

Runs in a process in which TensorFlow's allocator reports all that it gives; see
`benchmarks.measuring_tensorflow`. Operators run in parallel, so that steps of one model differ: the median of several
counts, and how far they are apart is given beside it.
"""

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.keras_models import Case
from benchmarks.measuring_tensorflow import recorded

NUM_STEPS = 8
HOW = (
    f"median of the peaks of {NUM_STEPS - 1} training steps: the greatest sum of what TensorFlow's CPU allocator was "
    "asked for and had not got back, by its profiler"
)


def measure(case: Case) -> dict[str, Any]:
    """The median of the peaks, and the least and the greatest; call it in a fresh process."""

    def run(step: Callable[[int], Any]) -> None:
        model, (x, y) = case.make(), case.batch(case.batch_size)
        for number in range(1, NUM_STEPS + 1):
            with step(number):
                model.train_on_batch(x, y)

    peaks = recorded(run).step_bytes
    return {"measured": round(statistics.median(peaks)), "least": min(peaks), "greatest": max(peaks)}
