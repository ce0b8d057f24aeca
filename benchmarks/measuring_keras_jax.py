"""The memory of a Keras training step on JAX, measured: resident memory while the compiled step runs.

Runs in a process whose allocator gives every large block back at once, so that nothing measured is a leftover; see
`benchmarks.measuring_jax`, which also says why the first steps don't count. XLA runs instructions that don't wait for
each other side by side, so that steps of one program may differ: the median of several counts, and how far they are
apart is given beside it.
"""

import statistics
from typing import Any

import jax

from benchmarks.keras_models import Case
from benchmarks.measuring_jax import NUM_FIRST, rise

HOW = (
    "state and batch, and what resident memory rose above them while a compiled step ran (VmHWM), the median of nine "
    "steps after the first two"
)
_NUM_STEPS = 9


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
    steps = []
    for number in range(NUM_FIRST + _NUM_STEPS):
        jax.block_until_ready(state)

        def step() -> None:
            nonlocal state
            logs, state = model.train_function(state, iter([data]))
            jax.block_until_ready((logs, state))

        steps.append(held + rise(step, number))
    steps = steps[NUM_FIRST:]
    return {"measured": int(statistics.median(steps)), "least": min(steps), "greatest": max(steps)}
