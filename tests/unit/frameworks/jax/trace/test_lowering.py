"""Steps lowered for shapes, and their failures."""

import functools

import pytest

from memfit.core.errors import BadInput, StepFailed
from memfit.frameworks.jax.trace import lowering

jax = pytest.importorskip("jax")
jnp = jax.numpy
VECTOR = jax.ShapeDtypeStruct((4,), "float32")


def test_plain_functions_hold_what_is_no_array():
    def step(x, training, name):
        assert name == "a"
        return x if training else 2 * x

    lowered = lowering.lower(step, (VECTOR, True, "a"))

    assert lowered.out_info.shape == (4,)


def test_steps_of_equinox_take_shapes():
    equinox = pytest.importorskip("equinox")

    @equinox.filter_jit(donate="all")
    def step(model, x):
        return equinox.tree_at(lambda m: m.weight, model, model.weight * x[0])

    model = equinox.nn.Linear(3, 4, key=jax.random.key(0))

    lowered = lowering.lower(step, (model, VECTOR))

    assert all(info.donated for info in jax.tree.leaves(lowered.args_info))


def test_values_that_are_needed_are_explained():
    def step(x):
        if x.sum() > 0:
            return x
        return -x

    with pytest.raises(StepFailed) as caught:
        lowering.lower(step, (VECTOR,))

    text = str(caught.value)
    assert "TracerBoolConversionError" in text
    assert "test_lowering.py" in text
    assert "if x.sum() > 0:" in text
    assert "use jnp.where or jax.lax.cond" in text


@pytest.mark.parametrize("jit", [lambda step: step, jax.jit])
def test_arrays_that_are_kept_are_explained(jit):
    kept = []

    def step(x):
        total = x.sum()
        kept.append(total)
        return total

    with pytest.raises(StepFailed, match="must not keep arrays anywhere but in its results"):
        lowering.check_leaks(jit(step), (VECTOR,))
    lowering.check_leaks(jit(jnp.sum), (VECTOR,))


def test_leaked_arrays_that_are_used_are_explained():
    kept = []
    jax.eval_shape(kept.append, VECTOR)

    with pytest.raises(StepFailed, match="must not keep arrays anywhere but in its results"), lowering.explained():
        jnp.sin(kept[0])


def test_other_failures_show_the_line():
    def step(x):
        return x @ jnp.ones((3, 3))

    with pytest.raises(StepFailed, match=r"test_lowering\.py:\d+ in step: TypeError"):
        lowering.lower(step, (VECTOR,))


def test_arguments_that_a_step_does_not_take_are_refused():
    def step(x, y):
        return x + y

    with pytest.raises(BadInput, match=r"step\(x, y\) can't be called with the 1 arguments given: missing a required"):
        lowering.check_call(step, (VECTOR,))
    lowering.check_call(step, (VECTOR, VECTOR))


def test_steps_and_arguments_have_names():
    def step(x, *rest):
        return x

    assert lowering.name_of(jax.jit(step)) == "step"
    assert lowering.name_of(functools.partial(step, 1)) == "step"
    assert lowering.argument_names(step, 3) == ["x", "argument 2", "argument 3"]


def test_numbers_are_arrays_to_a_jitted_step():
    step = jax.jit(lambda x, rate: x * rate.astype(x.dtype))
    arguments = (jax.ShapeDtypeStruct((3,), "float32"), 0.1)
    lowering.check_leaks(step, arguments)
    assert lowering.lower(step, arguments).out_info.shape == (3,)
