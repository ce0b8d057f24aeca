import sysconfig

import keras
import numpy as np

from memfit.core.timeline import Category, Timeline
from memfit.core.trace import Trace
from memfit.frameworks.keras.script.loop_state import LoopState, handle_of, is_framework

EMPTY = Trace(Timeline((), 0, ()), (), 0, 0, 0)


def network(name, *sizes):
    return keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(size) for size in sizes)], name=name)


def settled(models, optimizers=(), touched=None):
    state = LoopState()
    state.optimizers = list(optimizers)
    variables = [v for model in models for v in model.variables] if touched is None else touched
    state.settle({handle_of(variable): variable for variable in variables})
    return state


def test_a_model_is_found_by_the_variables_that_a_turn_uses():
    model, other = network("model", 4), network("other", 4)

    state = settled([model])

    assert [one.variable for one in state.held] == model.variables
    assert {one.module for one in state.held} == {model.layers[0].name}
    assert other.name not in str(state.layers)
    assert state.trace(EMPTY).num_parameters == 36


def test_of_models_inside_of_models_the_outermost_counts():
    inner = network("inner", 4)
    outer = keras.Sequential([keras.Input((8,)), inner, keras.layers.Dense(2)], name="outer")

    state = settled([inner])

    assert len(state.held) == len(outer.variables)
    assert f"inner.{inner.layers[0].name}" in state.layers


def test_layers_of_several_models_are_told_apart():
    state = settled([network("first", 4), network("second", 4)])

    assert {module.partition(".")[0] for module in state.layers} == {"first", "second"}


def test_optimizers_bring_their_state_and_the_gradients_of_what_they_update():
    model, optimizer = network("model", 4), keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)

    sizes = settled([model], [optimizer]).trace(EMPTY).state_bytes

    assert sizes[Category.PARAMETER] == sizes[Category.GRADIENT] == 4 * 36
    assert sizes[Category.OPTIMIZER_STATE] >= 2 * 4 * 36


def test_arguments_are_told_by_identity_then_by_shape():
    model = network("model", 4)
    kernel, bias = (variable._value for variable in model.variables)
    state = settled([model])
    stand_in = np.zeros(4, "float32")

    known = state.described([kernel, stand_in, np.zeros(4, "float32")])

    layer = model.layers[0].name
    assert known == [(Category.PARAMETER, layer), (Category.PARAMETER, layer), (Category.BATCH, "")]
    assert state.described([bias])[0] == (Category.PARAMETER, layer)


def test_what_belongs_to_no_model_is_left_over():
    alone = keras.Variable(np.zeros(3, "float32"))

    assert settled([], touched=[alone]).rest == [alone]


def test_files_of_packages_are_told_from_scripts(tmp_path):
    assert is_framework(sysconfig.get_path("purelib") + "/keras/layer.py")
    assert not is_framework(str(tmp_path / "train.py"))
