import keras
import numpy as np
import pytest

from memfit.core.errors import BadBatch, BadInput, BadModel, MissingDependency, StepFailed
from memfit.core.timeline import Category
from memfit.frameworks.keras.batch import read
from memfit.frameworks.keras.model import (
    build,
    check_inputs,
    check_known,
    check_model,
    layer_paths,
    state_bytes,
    variables_of,
)
from memfit.frameworks.keras.trace.job import restoring

layers = keras.layers


class Block(layers.Layer):
    def __init__(self):
        super().__init__(name="block")
        self.first = layers.Dense(4, name="dense")
        self.second = layers.Dense(3, name="dense")

    def call(self, x):
        return self.second(self.first(x))


def network():
    made = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(4, name="wide"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.5, name="drop"),
            keras.Sequential([layers.Dense(2, name="inner")], name="nested"),
        ],
        name="network",
    )
    made.compile(keras.optimizers.Adam(use_ema=True), "mse", metrics=["mae"])
    return made


def batch(x=(2, 8), y=(2, 2)):
    return read((np.zeros(x, "float32"), np.zeros(y, "float32")))


@pytest.fixture
def built():
    made = network()
    build(made, batch(), training=True)
    made.optimizer.build(made.trainable_variables)
    return made


def test_a_model_that_was_not_compiled_is_refused_for_training_only():
    plain = keras.Sequential([keras.Input((8,)), layers.Dense(1)], name="plain")

    check_model(plain, training=False)
    with pytest.raises(BadModel, match=r"'plain' isn't compiled.*Compile it first: model.compile\(optimizer=..., loss"):
        check_model(plain, training=True)


def test_an_optimizer_is_needed_for_training():
    plain = keras.Sequential([keras.Input((8,)), layers.Dense(1)], name="plain")
    plain.compile(optimizer=None, loss="mse")

    with pytest.raises(BadModel, match="was compiled with the optimizer None"):
        check_model(plain, training=True)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((2, 7), r"'.*' of 'network' takes arrays of shape \(batch, 8\), but \(2, 7\) was given"),
        ((2, 8, 3), r"takes arrays of shape \(batch, 8\), but \(2, 8, 3\) was given"),
    ],
)
def test_a_batch_of_other_shapes_is_refused_with_both(shape, text):
    with pytest.raises(BadBatch, match=text):
        check_inputs(network(), batch(shape))


def test_the_number_of_inputs_counts():
    a, b = keras.Input((3,), name="a"), keras.Input((None, 5), name="b")
    made = keras.Model([a, b], layers.Dense(1)(a), name="two")
    x = np.zeros((2, 3), "float32")

    check_inputs(made, read(([x, np.zeros((2, 9, 5))], x)))
    with pytest.raises(BadBatch, match=r"has 2 inputs, 'a' of shape \(batch, 3\), 'b' of shape \(batch, any, 5\)"):
        check_inputs(made, read((x, x)))
    named = keras.Model({"a": a, "b": b}, layers.Dense(1)(a), name="two")
    check_inputs(named, read(({"b": np.zeros((2, 9, 5)), "a": x}, x)))
    with pytest.raises(BadBatch, match="the model's inputs are a, b, but the batch's x has a: b is missing"):
        check_inputs(named, read(({"a": x}, x)))


def test_a_missing_last_dimension_of_one_is_fine_as_it_is_for_keras():
    made = keras.Sequential([keras.Input((1,)), layers.Dense(1)])

    check_inputs(made, read(np.zeros((2,), "float32")))


def test_layers_are_named_from_the_outside_in():
    inputs = keras.Input((8,))
    made = keras.Model(inputs, Block()(keras.Sequential([layers.Dense(8, name="inner")], name="nested")(inputs)))

    paths = set(layer_paths(made).values())

    assert {"", "nested", "nested.inner", "block", "block.dense", "block.dense#2"} <= paths


def test_variables_are_sorted_by_what_they_are_for(built):
    found = variables_of(built, training=True)

    by_category = {}
    for one in found:
        by_category.setdefault(one.category, []).append(one)
    assert len(by_category[Category.PARAMETER]) == 6
    assert {one.module for one in by_category[Category.PARAMETER]} == {"wide", "norm", "nested.inner"}
    assert {one.module for one in by_category[Category.BUFFER]} == {"norm", "drop", "(metrics)"}
    # Two moments and an average for each parameter; a counter and the learning rate belong to no layer.
    state = by_category[Category.OPTIMIZER_STATE]
    assert len(state) == 3 * 6 + 2
    assert sum(one.module == "(optimizer)" for one in state) == 2
    assert sum(one.module == "nested.inner" for one in state) == 6
    assert len({id(one.variable) for one in found}) == len(found)


def test_the_bytes_of_the_state_are_those_of_the_shapes(built):
    parameters = 8 * 4 + 4 + 2 * 4 + 4 * 2 + 2

    sizes = state_bytes(variables_of(built, training=True), built.trainable_variables)

    assert sizes[Category.PARAMETER] == sizes[Category.GRADIENT] == 4 * parameters
    assert sizes[Category.OPTIMIZER_STATE] == 3 * 4 * parameters + 4 + 4
    # Two moving statistics, a seed, and (sum, count) of the loss and of a metric.
    assert sizes[Category.BUFFER] == 4 * (2 * 4 + 2 + 2 * 2)
    assert Category.GRADIENT not in state_bytes(variables_of(built, training=False), ())


def test_frozen_parameters_stay_parameters_without_gradients(built):
    before = state_bytes(variables_of(built, training=True), built.trainable_variables)
    built.get_layer("wide").trainable = False

    after = state_bytes(variables_of(built, training=True), built.trainable_variables)

    assert after[Category.PARAMETER] == before[Category.PARAMETER]
    assert after[Category.GRADIENT] == before[Category.GRADIENT] - 4 * (8 * 4 + 4)


def test_a_model_is_built_for_the_batch_but_for_its_optimizer():
    made = keras.Sequential([layers.Dense(3)])
    made.compile("adam", "mse")

    build(made, batch(y=(2, 3)), training=True)

    assert made.built
    assert not made.optimizer.built


class WithoutCall(keras.Model):
    def __init__(self, inner):
        super().__init__(name="own")
        self.inner = inner


def test_a_guard_is_refused_for_variables_that_come_with_the_first_step():
    with pytest.raises(BadModel, match=r"'own' has no call\(\).* layers aren't built: later\. A guard has to know"):
        check_known(WithoutCall(layers.Dense(2, name="later")))
    made = WithoutCall(keras.Sequential([keras.Input((3,)), layers.Dense(2)]))
    made.compile("adam")
    check_known(made)

    made.second_optimizer = keras.optimizers.Adam(name="second")
    with pytest.raises(BadModel, match=r"optimizers of its own that aren't built yet: second\..*optimizer\.build\("):
        check_known(made)
    made.second_optimizer.build(made.trainable_variables)
    check_known(made)


def test_what_keras_cannot_build_is_told_with_the_shapes():
    class Strange(keras.Model):
        def call(self, x):
            raise KeyError("no way")

    made = Strange(name="strange")
    made.compile("adam", "mse")

    with (
        restoring(made),
        pytest.raises(StepFailed, match=r"can't build the model 'strange' .*\(2, 8\), \(2, 2\): .*no way"),
    ):
        build(made, batch(), training=True)


def test_the_backend_must_be_one_that_is_known_and_there(monkeypatch):
    model = keras.Sequential([keras.Input((8,)), layers.Dense(2)])
    monkeypatch.setattr(keras.backend, "backend", lambda: "openvino")
    with pytest.raises(BadInput, match=r"runs on openvino, which doesn't train. Set KERAS_BACKEND to one of"):
        check_model(model, training=True)
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow")
    monkeypatch.setattr("memfit.frameworks.keras.model.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"isn't installed. .* `pip install tensorflow`"):
        check_model(model, training=True)
