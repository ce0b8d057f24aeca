import jax
import jax.numpy as jnp
import numpy as np

from memfit.frameworks.jax.apply.recomputation import recomputed


def block(weights, inputs):
    x, key = inputs
    mask = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.5, x.shape)
    h = jnp.tanh(x @ weights[0] + weights[1])
    return [x + jnp.where(mask, jnp.tanh(h @ weights[0]), 0.0), key + 1]


def loss(weights, x, call):
    key = jnp.zeros((2,), "uint32")
    for weight in weights:
        x, key = call(weight, [x, key])
    return (x**2).sum()


def recomputing(weights, inputs):
    return recomputed(block, weights, [True, False], inputs)


def test_gradients_are_the_same_and_memory_falls():
    random = np.random.default_rng(0)
    weights = [[jnp.asarray(random.normal(size=(64, 64)) / 8, "float32"), jnp.ones((64,))] for _ in range(8)]
    x = jnp.asarray(random.normal(size=(512, 64)), "float32")
    plain, again = (
        jax.jit(jax.grad(lambda w, x, call=call: loss(w, x, call), argnums=(0, 1))).lower(weights, x).compile()
        for call in (block, recomputing)
    )
    for (kernel, _), (other, bias) in zip(plain(weights, x)[0], again(weights, x)[0], strict=True):
        assert jnp.allclose(kernel, other, rtol=1e-5, atol=1e-5)
        # It isn't trained.
        assert not bias.any()
    sizes = [compiled.memory_analysis().temp_size_in_bytes for compiled in (plain, again)]
    assert sizes[1] < 0.7 * sizes[0]


def test_results_without_gradients():
    x = jnp.ones((2, 4))
    weights = [jnp.ones((4, 4)), jnp.zeros((4,))]
    inputs = [x, jnp.zeros((2,), "uint32")]
    for one, other in zip(recomputed(block, weights, [True, True], inputs), block(weights, inputs), strict=True):
        assert (one == other).all()


def test_without_floating_inputs_only_weights_have_gradients():
    table = jnp.arange(6.0).reshape(3, 2)

    def total(table):
        return recomputed(lambda w, i: [w[0][i[0]] ** 2], [table], [True], [jnp.array([0, 2])])[0].sum()

    assert jax.grad(total)(table).tolist() == [[0.0, 2.0], [0.0, 0.0], [8.0, 10.0]]
