"""The layout against XLA's own figures, on programs that JAX compiles here."""

import pytest

from memfit.frameworks.xla.hlo import parse
from memfit.frameworks.xla.layout import lay_out
from memfit.frameworks.xla.liveness import lives_of
from tests.unit.frameworks.xla.programs import LOOP, STEP

jax = pytest.importorskip("jax")
jnp = jax.numpy
Shape = jax.ShapeDtypeStruct
WEIGHTS = [Shape((128, 128), "float32")] * 3
IMAGES = Shape((16, 16, 16, 3), "float32")
MATRIX = Shape((256, 128), "float32")


def dense(weights, x, y):
    for weight in weights:
        x = jax.nn.relu(x @ weight)
    return jnp.mean((x - y) ** 2)


def scanned(weights, x, y):
    x, _ = jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight) + x, None), x, weights)
    return jnp.mean((x - y) ** 2)


def recomputed(weights, x, y):
    x, _ = jax.lax.scan(jax.checkpoint(lambda x, weight: (jnp.tanh(x @ weight) + x, None)), x, weights)
    return jnp.mean((x - y) ** 2)


def convolved(weight, x):
    x = jax.lax.conv_general_dilated(x, weight, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.mean(jax.nn.relu(x) ** 2)


def sgd(loss):
    return lambda weights, *batch: jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, *batch))


def momentum(weights, velocity, x, y):
    value, gradients = jax.value_and_grad(dense)(weights, x, y)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradients)
    return jax.tree.map(lambda w, v: w - 0.1 * v, weights, velocity), velocity, value


def looped(x):
    return jax.lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, jnp.tanh(s[1] @ s[1].T @ s[1])), (0, x))[1]


STACK = Shape((6, 128, 128), "float32")
PROGRAMS = {
    "sgd, donated": (sgd(dense), (0,), (WEIGHTS, MATRIX, MATRIX)),
    "sgd, kept": (sgd(dense), (), (WEIGHTS, MATRIX, MATRIX)),
    "momentum": (momentum, (0, 1), (WEIGHTS, WEIGHTS, MATRIX, MATRIX)),
    "scan": (sgd(scanned), (0,), (STACK, MATRIX, MATRIX)),
    "scan, recomputed": (sgd(recomputed), (0,), (STACK, MATRIX, MATRIX)),
    "convolution": (sgd(convolved), (0,), (Shape((3, 3, 3, 8), "float32"), IMAGES)),
    "while": (looped, (), (MATRIX,)),
    "sort and sums": (lambda x: jax.vmap(jnp.sort)(x) + jnp.cumsum(x, 0), (), (MATRIX,)),
    "scatter": (lambda t, i, u: t.at[i].add(u) * 2, (0,), (MATRIX, Shape((9,), "int32"), Shape((9, 128), "float32"))),
    "condition": (lambda x: jax.lax.cond(x.sum() > 0, lambda x: jnp.sin(x) @ x.T, lambda x: x @ x.T, x), (), (MATRIX,)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_layout_is_xlas_own(name):
    function, donated, arguments = PROGRAMS[name]
    compiled = jax.jit(function, donate_argnums=donated).lower(*arguments).compile()
    truth = compiled.memory_analysis()

    layout = lay_out(lives_of(parse(compiled.as_text())))

    assert layout.argument_bytes == truth.argument_size_in_bytes
    assert layout.output_bytes == truth.output_size_in_bytes - truth.alias_size_in_bytes
    assert layout.temporary_bytes == pytest.approx(truth.temp_size_in_bytes, rel=0.03, abs=1024)


def test_results_that_take_an_arguments_place_cost_nothing():
    layout = lay_out(lives_of(parse(STEP)))

    assert layout.argument_bytes == 16 * 16 * 4 + 64 * 16 * 4
    # The sum, and the table of two pointers.
    assert layout.output_bytes == 4 + 16
    # The activation, over which the slope is written, and the gradient.
    assert layout.temporary_bytes == 64 * 16 * 4 + 16 * 16 * 4
    assert layout.constant_bytes == 4


def test_a_loops_own_temporaries_are_counted_once():
    layout = lay_out(lives_of(parse(LOOP)))

    # The array that is twice as long; the counter, in which the loop counts on; and what is compared fits beside.
    assert layout.temporary_bytes == 512 * 4 + 64
