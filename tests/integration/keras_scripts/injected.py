"""Errors for want of memory, as each backend raises them, in steps of a guarded training that would have fitted."""

import importlib
from contextlib import contextmanager


def out_of_memory(backend):
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor with shape[9,9] and type float")
    if backend == "jax":
        import jax

        return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 800000000 bytes.")
    return RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory")


def kind_of_steps(backend):
    """The class whose `run` is one step."""
    module = importlib.import_module(f"memfit.frameworks.keras.guard.{backend}_steps")
    return next(value for name, value in vars(module).items() if name.endswith("Steps") and name != "Steps")


@contextmanager
def faults(backend, first, number):
    """Steps from `first` on, so many of them, run out of memory."""
    kind = kind_of_steps(backend)
    plain, count = kind.run, [0]

    def run(self, batch):
        count[0] += 1
        if first <= count[0] < first + number:
            raise out_of_memory(backend)
        return plain(self, batch)

    kind.run = run
    try:
        yield
    finally:
        kind.run = plain
