"""The memory of a plain training step of JAX, before anything runs: `python examples/jax/estimate.py`."""

import jax
import jax.numpy as jnp
import optax

import memfit

WIDTH, NUM_LAYERS, BATCH = 512, 6, 1024
optimizer = optax.adam(1e-3)


def loss(parameters, x, y):
    for name, weight in parameters.items():
        with jax.named_scope(name):
            x = jax.nn.gelu(x @ weight)
    return jnp.mean((x - y) ** 2)


@jax.jit
def step(parameters, state, x, y):
    value, gradients = jax.value_and_grad(loss)(parameters, x, y)
    updates, state = optimizer.update(gradients, state, parameters)
    return optax.apply_updates(parameters, updates), state, value


def main():
    # Shapes are enough: no array is made, and nothing is run.
    shape = jax.ShapeDtypeStruct
    parameters = {f"layer{place}": shape((WIDTH, WIDTH), "float32") for place in range(NUM_LAYERS)}
    state = jax.eval_shape(optimizer.init, parameters)
    batch = (shape((BATCH, WIDTH), "float32"),) * 2

    estimate = memfit.estimate(step, parameters, state, *batch, device="cpu")
    print(estimate)

    donating = jax.jit(step.__wrapped__, donate_argnums=(0, 1))
    less = memfit.estimate(donating, parameters, state, *batch, device="cpu")
    saved = (estimate.peak_bytes - less.peak_bytes) / 2**20
    print(f"\nWith donate_argnums=(0, 1) the step needs {saved:.1f} MiB less.")


if __name__ == "__main__":
    main()
