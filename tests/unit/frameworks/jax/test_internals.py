import jax
import jax.numpy as jnp

from memfit.frameworks.jax import internals


def test_arguments_that_a_program_leaves_out_are_known():
    compiled = jax.jit(lambda used, unused: used + 1).lower(jnp.ones(2), jnp.ones(3)).compile()

    assert internals.used_arguments(compiled, 2) == (0,)
    assert internals.used_arguments(object(), 2) == (0, 1)


def test_arrays_of_a_trace_are_told_from_others():
    seen = []
    jax.eval_shape(lambda array: seen.append(internals.trace_of(array) is None) or array, jnp.ones(2))

    assert seen == [False]
    assert internals.trace_of(2.0) is None
