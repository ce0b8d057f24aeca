"""`memfit.estimate` on training steps of JAX: jax.jit, flax.nnx, equinox and optax."""

import importlib.util

import numpy as np
import pytest

import memfit
from memfit.core.errors import BadInput, MissingDependency, StepFailed

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy
Shape = jax.ShapeDtypeStruct
WEIGHTS = {f"layer{place}": Shape((128, 128), "float32") for place in range(3)}
BATCH = (Shape((64, 128), "float32"), Shape((64, 128), "float32"))
ADAM = optax.adam(1e-3)
PARAMETER_BYTES = 3 * 128 * 128 * 4


def loss(weights, x, y):
    for name, weight in weights.items():
        with jax.named_scope(name):
            x = jnp.tanh(x @ weight)
    return jnp.mean((x - y) ** 2)


def step(weights, state, x, y):
    value, gradients = jax.value_and_grad(loss)(weights, x, y)
    updates, state = ADAM.update(gradients, state, weights)
    return optax.apply_updates(weights, updates), state, value


def truth(function, *arguments):
    found = function.lower(*arguments).compile().memory_analysis()
    return (
        found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes - found.alias_size_in_bytes
    )


@pytest.fixture(scope="module")
def estimated():
    jitted = jax.jit(step, donate_argnums=(0, 1))
    arguments = (WEIGHTS, jax.eval_shape(ADAM.init, WEIGHTS), *BATCH)
    return jitted, arguments, memfit.estimate(jitted, *arguments, device="cpu")


def test_the_peak_is_xlas_own_figure_and_what_kernels_take(estimated):
    jitted, arguments, estimate = estimated
    workspaces = [block.size_bytes for block in estimate.timeline.blocks if block.category == "workspace"]

    # Scalars that are part of the program are a few bytes more; products that don't wait for each other run at once.
    laid_out = truth(jitted, *arguments)
    assert laid_out <= estimate.peak_bytes <= laid_out + sum(workspaces) + 256
    assert estimate.interval_bytes[0] <= estimate.peak_bytes <= estimate.interval_bytes[1]


def test_states_are_told_apart(estimated):
    _, _, estimate = estimated

    assert estimate.num_parameters == 3 * 128 * 128
    assert estimate.state_bytes["parameter"] == estimate.state_bytes["gradient"] == PARAMETER_BYTES
    assert estimate.state_bytes["optimizer state"] == 2 * PARAMETER_BYTES + 4
    assert {"layer0", "layer1", "layer2"} <= {block.module for block in estimate.timeline.blocks}
    assert any("test_estimate_jax.py" in block.source for block in estimate.timeline.blocks)


def test_other_batch_sizes_agree_with_compiling_for_them(estimated):
    jitted, arguments, estimate = estimated
    bigger = (*arguments[:2], Shape((400, 128), "float32"), Shape((400, 128), "float32"))

    asked = memfit.estimate(jitted, *bigger, device="cpu").peak_bytes

    assert estimate.at_batch(400).peak_bytes == pytest.approx(asked, rel=0.03)


def test_a_module_of_flax_and_its_optimizer_are_known():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(32, 64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def train(model, optimizer, x):
        value, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, gradients)
        return value

    estimate = memfit.estimate(train, model, optimizer, np.zeros((16, 32), np.float32), device="cpu")

    assert estimate.batch_size == 16
    assert estimate.num_parameters == 32 * 64 + 64
    assert estimate.state_bytes["optimizer state"] >= 2 * 4 * estimate.num_parameters
    # Nothing of the trace stays in the model.
    assert float(train(model, optimizer, jnp.ones((4, 32)))) > 0


def test_a_module_of_equinox_is_known():
    equinox = pytest.importorskip("equinox")
    model = equinox.nn.MLP(8, 4, 16, 1, key=jax.random.key(0))
    state = ADAM.init(equinox.filter(model, equinox.is_array))

    @equinox.filter_jit
    def train(model, state, x):
        value, gradients = equinox.filter_value_and_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)
        updates, state = ADAM.update(gradients, state)
        return equinox.apply_updates(model, updates), state, value

    estimate = memfit.estimate(train, model, state, Shape((32, 8), "float32"), device="cpu")

    assert estimate.batch_size == 32
    assert estimate.num_parameters == 8 * 16 + 16 + 16 * 4 + 4


def test_bad_steps_get_one_clear_message():
    def branching(weights, x):
        return weights if x.sum() > 0 else -weights

    weights, x = np.ones(4, np.float32), np.ones((8, 4), np.float32)
    with pytest.raises(StepFailed, match=r"use jnp\.where or jax\.lax\.cond"):
        memfit.estimate(branching, weights, x, device="cpu")
    with pytest.raises(BadInput, match="can't be called with the 1 arguments given"):
        memfit.estimate(branching, weights, device="cpu")


def test_without_jax_the_extra_to_install_is_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jax" else find(name))

    with pytest.raises(MissingDependency, match=r"pip install jax"):
        memfit.estimate(memfit.Job(step, None, (WEIGHTS,)), device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mlp", "mlp_not_donated", "transformer", "lstm", "autoencoder", "cnn"])
def test_measured_steps_take_what_was_predicted(case):
    from benchmarks.measuring_jax import measure

    found = measure(f"benchmarks.jax_steps:{case}")

    assert found["predicted"] == pytest.approx(found["measured"], rel=0.03)
