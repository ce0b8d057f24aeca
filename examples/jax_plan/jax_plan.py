"""A plan for a loss function of JAX and an optimizer of optax, and the step that runs it.

Run it with `python examples/jax_plan/jax_plan.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import memfit

WIDTH, NUM_LAYERS, BATCH = 64, 4, 512


def layer(weights, x):
    return x + jax.nn.gelu(x @ weights["inner"]) @ weights["outer"]


def loss(params, batch):
    x, y = batch
    for weights in params:
        # A plan may have each of these calls computed again in the backward pass.
        x = memfit.jax.block(layer)(weights, x)
    return jnp.mean((x - y) ** 2)


rng = np.random.default_rng(0)
params = [
    {"inner": rng.normal(size=(WIDTH, 4 * WIDTH)) * 0.05, "outer": rng.normal(size=(4 * WIDTH, WIDTH)) * 0.05}
    for _ in range(NUM_LAYERS)
]
params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
batch = (rng.normal(size=(BATCH, WIDTH)).astype("float32"), np.zeros((BATCH, WIDTH), "float32"))
optimizer = optax.adam(1e-3)

plan = memfit.plan(loss, params, batch, optimizer=optimizer, device="cpu", budget="6MiB", measure=False)
print(plan)
print()
print(plan.code())

# With guard=True, a step that still runs out of memory is run again on the same batch, in more parts.
step = memfit.jax.train_step(loss, optimizer, plan=plan, guard=True)
state = step.init(params)
values = []
for _ in range(3):
    params, state, value = step(params, state, batch)
    values.append(float(value))
print("the loss falls:", values[-1] < values[0])
