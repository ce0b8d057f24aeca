"""Measures how much memory a training step of Keras on TensorFlow really takes on the CPU.

TensorFlow's allocators report every allocation and free to its profiler, with the operator and the size that it asked
for. The default allocators of the CPU report nothing or large blocks only; `TF_CPU_ALLOCATOR_USE_BFC` puts the one of
GPUs in their place, which reports all. Recording begins before the model is built, so that variables, optimizer state,
batch and constants are part of the sum, and ends after a few steps. What oneDNN takes from the system by itself, past
TensorFlow, is no part of it.

Steps differ: operators run in parallel, and which of them meet is up to the threads.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "memfit step"
Builder = Callable[[int], tuple[Any, Any, Any]]
"""Takes a batch size, gives (compiled model, inputs, targets); importable by name."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Peaks of the steps after the first, and what lives between them, in bytes."""

    step_bytes: tuple[int, ...]
    resting_bytes: int


def measure(build: Builder, batch_size: int, *, num_steps: int = 3, onednn: bool = True) -> Measured:
    """The memory of `train_on_batch`, in a process of its own.

    Args:
        build: makes the model and its batch.
        batch_size: samples of a step.
        num_steps: steps to run; the first one makes the optimizer's state and isn't counted.
        onednn: whether oneDNN's kernels run.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(build, batch_size, num_steps, onednn, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()  # type: ignore[no-any-return]
    except EOFError:
        process.join()
        raise RuntimeError(f"the measuring process ended with {process.exitcode}") from None
    finally:
        process.join()


def _measure(build: Builder, batch_size: int, num_steps: int, onednn: bool, sender: Any) -> None:
    os.environ.update(KERAS_BACKEND="tensorflow", TF_CPU_ALLOCATOR_USE_BFC="1", TF_ENABLE_ONEDNN_OPTS=str(int(onednn)))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

    def run(step: Callable[[int], Any]) -> None:
        model, inputs, targets = build(batch_size)
        for number in range(1, num_steps + 1):
            with step(number):
                model.train_on_batch(inputs, targets)

    sender.send(recorded(run))


def recorded(run: Callable[[Callable[[int], Any]], None]) -> Measured:
    """The memory of marked steps in this process, which must have `TF_CPU_ALLOCATOR_USE_BFC` from its start.

    Args:
        run: takes a function that gives a context for step number n, from 1 on, and runs steps in such contexts.
    """
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as directory:
        tf.profiler.experimental.start(directory)
        try:
            run(lambda number: tf.profiler.experimental.Trace(MARK, step=number))
        finally:
            tf.profiler.experimental.stop()
        events = sorted(_events(Path(directory)), key=lambda event: event[0])
    return _peaks(events)


def _peaks(events: list[tuple[int, str, dict[str, Any]]]) -> Measured:
    live: dict[int, int] = {}
    peaks: dict[int, int] = {}
    total = step = resting = 0
    for _, name, details in events:
        if name == MARK:
            step = int(details["step"])
            peaks[step] = resting = total
        elif name == "MemoryAllocation":
            live[details["addr"]] = size = details["requested_bytes"]
            total += size
            peaks[step] = max(peaks.get(step, 0), total)
        elif name == "MemoryDeallocation":
            total -= live.pop(details["addr"], 0)
    return Measured(tuple(peak for number, peak in sorted(peaks.items()) if number > 1), resting)


def _events(directory: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(time, name, details) of what the profiler recorded."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    for path in directory.rglob("*.xplane.pb"):
        space = xplane_pb2.XSpace()
        space.ParseFromString(path.read_bytes())
        for plane in space.planes:
            texts = plane.stat_metadata
            for line in plane.lines:
                for event in line.events:
                    name = plane.event_metadata[event.metadata_id].name
                    if name not in (MARK, "MemoryAllocation", "MemoryDeallocation"):
                        continue
                    details = {}
                    for one in event.stats:
                        kind = one.WhichOneof("value")
                        value = getattr(one, kind)
                        details[texts[one.metadata_id].name] = texts[value].name if kind == "ref_value" else value
                    yield line.timestamp_ns * 1000 + event.offset_ps, name, details
