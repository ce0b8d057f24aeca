import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memfit.core.errors import BadInput
from memfit.frameworks.jax.apply.marked import block, count_flops, num_bytes, recomputing, recording


def layer(x, w, *, scale):
    return jnp.tanh(x @ w) * scale, {"sum": x.sum()}


class Module:
    def __init__(self, w):
        self.w = w

    def __call__(self, x):
        return jnp.tanh(x @ self.w)


X, W = np.ones((4, 3), "float32"), np.full((3, 3), 0.5, "float32")


def test_a_mark_does_nothing_by_itself():
    out, rest = block(layer)(X, W, scale=2)
    assert np.allclose(out, np.tanh(X @ W) * 2) and rest["sum"] == 12
    assert block(layer).__name__ == "layer"


def test_calls_are_numbered_by_name():
    with recording() as found:
        jax.eval_shape(lambda x: block(Module(W))(block(layer)(block(layer)(x, W, scale=1)[0], W, scale=1)[0]), X)
    assert [call.name for call in found] == ["layer.0", "layer.1", "Module.0"]
    assert all(call.flops == 2 * 4 * 3 * 3 and call.kept_bytes > 0 for call in found)


def test_what_is_named_is_computed_again_and_gives_the_same():
    def loss(w, names):
        with recomputing(names):
            out, rest = block(layer)(X, w, scale=2)
            return (block(Module(w), "own")(out) ** 2).sum() + rest["sum"]

    plain = jax.value_and_grad(loss)(W, ())
    for names in (("layer.0",), ("own.0",), ("layer.0", "own.0")):
        again = jax.value_and_grad(loss)(W, names)
        assert all(np.allclose(a, b, rtol=1e-6) for a, b in zip(plain, again, strict=True))
        program = str(jax.make_jaxpr(lambda w, names=names: jax.grad(loss)(w, names))(W))
        assert program.count("tanh") > str(jax.make_jaxpr(lambda w: jax.grad(loss)(w, ()))(W)).count("tanh")


def test_a_name_that_no_call_has_is_refused():
    def loss(w):
        with recomputing(("layer.0", "nope.0")):
            return block(layer)(X, w, scale=2)[0].sum()

    with pytest.raises(BadInput, match=r"no block 'nope.0' to recompute. It has layer.0"):
        jax.grad(loss)(W)


def test_integers_and_keys_pass_through():
    def noisy(key, count, x):
        return x * jax.random.uniform(key, x.shape) * count

    def loss(x):
        with recomputing(("noisy.0",)):
            return block(noisy)(jax.random.key(1), jnp.asarray(3), x).sum()

    expected = jax.random.uniform(jax.random.key(1), X.shape) * 3
    assert np.allclose(jax.grad(loss)(X), expected)


def test_bytes_of_a_tree():
    assert num_bytes({"a": X, "b": [np.zeros(2, "int8"), None, "text", 3]}) == 50


def flops(function, *shapes):
    return count_flops(jax.make_jaxpr(function)(*(jnp.zeros(shape) for shape in shapes)).jaxpr)


def test_products():
    assert flops(lambda a, b: a @ b, (3, 4), (4, 5)) == 2 * 3 * 4 * 5
    assert flops(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (7, 3, 4), (7, 4, 5)) == 7 * 2 * 3 * 4 * 5


def test_convolutions():
    def run(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert flops(run, (2, 8, 8, 3), (3, 3, 3, 16)) == 2 * (2 * 8 * 8 * 16) * 3 * 3 * 3


def test_loops_count_with_their_length_and_jitted_parts_count():
    def loop(x, w):
        return jax.lax.scan(lambda carry, _: (jax.jit(jnp.matmul)(carry, w), None), x, None, length=5)[0]

    assert flops(loop, (3, 4), (4, 4)) == 5 * 2 * 3 * 4 * 4


def test_sums_count_for_nothing():
    assert flops(lambda a: jnp.tanh(a).sum(), (3, 4)) == 0
