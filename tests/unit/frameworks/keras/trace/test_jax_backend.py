"""A step written in JAX stands in for that of Keras, which runs on PyTorch here; integration/ has the real one."""

import jax
import keras
import numpy as np
import pytest

from memfit.catalogue import find_device
from memfit.core.errors import StepFailed
from memfit.core.timeline import Category, Phase
from memfit.core.trace import Serving
from memfit.frameworks.keras.batch import Spec, read
from memfit.frameworks.keras.model import build
from memfit.frameworks.keras.trace import jax_backend
from memfit.frameworks.keras.trace.jax_backend import as_shapes
from memfit.frameworks.keras.trace.job import restoring

layers = keras.layers
BATCH = (np.zeros((4, 8), "float32"), np.zeros((4, 2), "float32"))


def step(state, data):
    weights, *others = state
    x, y = data

    def loss(weights):
        with jax.named_scope("network"), jax.named_scope("dense"):
            return ((x @ weights[0] + weights[1] - y) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(weights)
    return {"loss": value}, ([w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], *others)


@pytest.fixture
def model():
    made = keras.Sequential([keras.Input((8,)), layers.Dense(2, name="dense")], name="network")
    made.compile(keras.optimizers.SGD(momentum=0.9), "mse")
    made.train_step = step
    made.predict_step = lambda state, data: (data[0] @ state[0][0], state[1])
    made.jit_compile = True
    return made


def traced(model, device="cpu", training=True, batch=BATCH):
    with restoring(model):
        build(model, read(batch), training=training)
        return jax_backend.trace(model, read(batch), find_device(device), training=training, settings=None)


def test_the_state_and_the_batch_are_the_arguments(model):
    found = traced(model)

    size = 4 * (8 * 2 + 2)
    assert found.state_bytes == {
        Category.PARAMETER: size,
        Category.GRADIENT: size,
        Category.BUFFER: 8,
        Category.OPTIMIZER_STATE: size + 8,
    }
    assert (found.num_parameters, found.batch_bytes) == (18, 4 * 4 * (8 + 2))
    assert found.serving is Serving.BEST_FIT
    assert found.assigned_bytes >= 2 * size + found.batch_bytes
    held = {(b.category, b.module) for b in found.timeline.blocks if b.phase is Phase.SETUP}
    assert {(Category.PARAMETER, "dense"), (Category.OPTIMIZER_STATE, "dense"), (Category.BATCH, "")} <= held
    assert found.notes == ()


def test_the_model_is_left_as_it_was(model):
    attributes = dict(vars(model))

    traced(model)

    assert vars(model) == attributes
    assert not model.optimizer.built
    model.optimizer.build(model.trainable_variables)
    assert all(variable.value is not None for variable in model.optimizer.variables)


def test_who_asked_for_the_trace_is_no_source(model):
    assert all("test_the" not in block.source for block in traced(model).timeline.blocks)
    lines = {block.source for block in traced(model).timeline.blocks}
    assert all(not line or int(line.rpartition(":")[2]) < 40 for line in lines)


def test_predictions_take_neither_optimizer_nor_metrics(model):
    found = traced(model, training=False)

    assert Category.OPTIMIZER_STATE not in found.state_bytes
    assert found.assigned_bytes < traced(model).assigned_bytes


def test_what_was_assumed_is_said(model):
    expected = ["xla-cpu-layout", "xla-library-workspaces", "xla-preallocation"]
    assert [note.code for note in traced(model, "t4").notes] == expected
    model.jit_compile = False
    assert [note.code for note in traced(model).notes] == ["eager"]


def test_a_step_that_fails_is_told(model):
    def broken(state, data):
        raise TypeError("not\n  like this")

    model.train_step = broken

    with pytest.raises(StepFailed, match=r"JAX traced it at \S+\.py:\d+ in broken: TypeError: not like this"):
        traced(model)


def test_wide_numbers_are_as_wide_as_jax_makes_them():
    assert jax_backend._spec(Spec((2, 3), "int64")).dtype == np.int32


def test_variables_have_shapes_without_values():
    with as_shapes():
        made = keras.Variable(lambda shape, dtype: pytest.fail("no values"), shape=(3, 4))

    assert tuple(made.shape) == (3, 4)
    assert made._value is None
