import jax
import jax.numpy as jnp

from memfit.frameworks.jax.apply.operations import count_flops


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
