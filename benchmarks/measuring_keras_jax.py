"""The memory of a Keras training step on JAX, measured: resident memory while the compiled step runs.

Runs in a process whose allocator gives every large block back at once, so that nothing measured is a
leftover; see `benchmarks.measuring_jax`.
"""

import ctypes
import gc
from pathlib import Path
from typing import Any

import jax

from benchmarks.keras_models import Case
from benchmarks.measuring_jax import _status

HOW = "state and batch, and what resident memory rose above them while the second compiled step ran (VmHWM)"


def measure(case: Case) -> dict[str, Any]:
    """Bytes of state and batch, and what a step adds at most; call it in a fresh process."""
    model, batch = case.make(), case.batch(case.batch_size)
    model.optimizer.build(model.trainable_variables)
    model.make_train_function()
    data = jax.tree.map(jax.numpy.asarray, batch)
    state = model._get_jax_state(
        trainable_variables=True,
        non_trainable_variables=True,
        optimizer_variables=True,
        metrics_variables=True,
        purge_model_variables=True,
    )
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((state, data)))
    highest = before = 0
    for _ in range(2):
        jax.block_until_ready(state)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        logs, state = model.train_function(state, iter([data]))
        jax.block_until_ready((logs, state))
        highest = _status("VmHWM")
    return {"measured": held + highest - before}
