"""The memory of a Keras training step on JAX, measured: resident memory while the compiled step runs.

Runs in a process whose allocator gives every large block back at once, so that nothing measured is a
leftover; see `benchmarks.measuring_jax`. XLA runs instructions that don't wait for each other side by side, so that
steps of one program may differ: the median of several counts, and how far they are apart is given beside it.
"""

import ctypes
import gc
import statistics
from pathlib import Path
from typing import Any

import jax

from benchmarks.keras_models import Case
from benchmarks.measuring_jax import _status

HOW = (
    "state and batch, and what resident memory rose above them while a compiled step ran (VmHWM), the median of five "
    "steps after the first"
)
_NUM_STEPS = 5


def measure(case: Case) -> dict[str, Any]:
    """Bytes of state and batch, and what steps add at most; call it in a fresh process."""
    model, batch = case.make(), case.batch(case.batch_size)
    data = jax.tree.map(jax.numpy.asarray, batch)
    # As `fit` begins: the layers of a subclassed model have no variables before.
    model._symbolic_build(data_batch=data)
    model.make_train_function()
    state = model._get_jax_state(
        trainable_variables=True,
        non_trainable_variables=True,
        optimizer_variables=True,
        metrics_variables=True,
        purge_model_variables=True,
    )
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((state, data)))
    found = []
    for _ in range(1 + _NUM_STEPS):
        jax.block_until_ready(state)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        logs, state = model.train_function(state, iter([data]))
        jax.block_until_ready((logs, state))
        found.append(held + _status("VmHWM") - before)
    # The first one compiles.
    steps = found[1:]
    return {"measured": int(statistics.median(steps)), "least": min(steps), "greatest": max(steps)}
