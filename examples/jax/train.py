"""A JAX training step: its memory before it runs, a plan for a budget, and the step that keeps to it.

Run it with `python examples/jax/train.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import memfit

WIDTH, NUM_LAYERS, BATCH = 64, 4, 512
optimizer = optax.adam(1e-3)


def layer(weights, x):
    return x + jax.nn.gelu(x @ weights["inner"]) @ weights["outer"]


def loss(params, batch):
    x, y = batch
    for weights in params:
        # A plan may recompute each of these calls in the backward pass.
        x = memfit.jax.block(layer)(weights, x)
    return jnp.mean((x - y) ** 2)


@jax.jit
def step(params, state, batch):
    value, gradients = jax.value_and_grad(loss)(params, batch)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value


rng = np.random.default_rng(0)
params = [
    {"inner": rng.normal(size=(WIDTH, 4 * WIDTH)) * 0.05, "outer": rng.normal(size=(4 * WIDTH, WIDTH)) * 0.05}
    for _ in range(NUM_LAYERS)
]
params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
batch = (rng.normal(size=(BATCH, WIDTH)).astype("float32"), np.zeros((BATCH, WIDTH), "float32"))

# Any step, plain or jitted, is estimated from the shapes of its arguments; nothing runs.
state = jax.eval_shape(optimizer.init, params)
estimate = memfit.estimate(step, params, state, batch, device="cpu")
print(estimate)
donating = jax.jit(step.__wrapped__, donate_argnums=(0, 1))
saved = estimate.peak_bytes - memfit.estimate(donating, params, state, batch, device="cpu").peak_bytes
print(f"\nWith donate_argnums=(0, 1) the step needs {saved / 2**20:.1f} MiB less.\n")

options = memfit.PlanOptions(measure=False)
plan = memfit.plan(loss, params, batch, optimizer=optimizer, device="cpu", budget="6MiB", options=options)
print(plan)
print()
print(plan.code())

# With guard=True, a step that runs out of memory all the same is run again in more micro-batches.
step = memfit.jax.train_step(loss, optimizer, plan=plan, guard=True)
state = step.init(params)
values = []
for _ in range(3):
    params, state, value = step(params, state, batch)
    values.append(float(value))
print("the loss falls:", values[-1] < values[0])
