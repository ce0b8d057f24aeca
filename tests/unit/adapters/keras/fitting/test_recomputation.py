"""What can be named and what is refused; equality on all backends is in integration/test_keras_moves.py."""

import keras
import numpy as np
import pytest
from keras import layers

from memfit.adapters.keras.fitting import recomputation
from memfit.core.errors import BadInput
from memfit.core.settings import Settings

# Keras's variables on PyTorch, as NumPy 2 sees them.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


def made():
    keras.utils.set_random_seed(0)
    x = inputs = layers.Input((4,))
    for index in range(2):
        y = layers.Dense(8, activation="gelu", name=f"up{index}")(x)
        y = layers.Dropout(0.5, seed=index, name=f"dropout{index}")(y)
        x = layers.Add(name=f"add{index}")([x, layers.Dense(4, name=f"down{index}")(y)])
    inner = keras.Sequential([layers.Input((4,)), layers.Dense(3, name="a"), layers.Dense(3, name="b")], name="inner")
    model = keras.Model(inputs, inner(x))
    model.compile("sgd", "mse")
    return model


def trained(model, *paths):
    undo = recomputation.apply(Settings(checkpoint=paths), model)
    x = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")
    model.train_on_batch(x, x[:, :3])
    return undo, np.concatenate([value.ravel() for value in model.get_weights()])


@pytest.mark.parametrize(
    "paths",
    [("up0:add0", "up1:add1"), ("up0",), ("inner",), ("inner.a:inner.b",), ("inner.a", "up0:add1"), ("dropout0:up1",)],
)
def test_named_parts_run_and_training_is_the_same(paths):
    _, plain = trained(made())
    model = made()
    calls = []
    up = model.get_layer("up0")
    original = up.call
    up.call = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    undo, fitted = trained(model, *paths)
    assert np.abs(plain - fitted).max() == 0
    before = len(calls)
    undo()
    trained(model)
    assert len(calls) - before == 1


def test_layers_are_computed_twice():
    model = made()
    trained(model)
    calls = []
    up = model.get_layer("up1")
    original = up.call
    up.call = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    trained(model)
    assert len(calls) == 1
    trained(model, "up1:add1")
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("",), "checkpoint names '' \\(the whole model\\), which would save nothing"),
        (
            ("nothing",),
            "there is no layer 'nothing'. There are, for example: .*up0.* Was the plan made for another model?",
        ),
        (("up0:nothing",), "there is no layer 'nothing'"),
        (("add0:up0",), "'up0' runs before 'add0'. Name them in order."),
        (("up0:inner.a",), "whose ends belong to different models"),
        (("up0.x:up0.y",), "'up0' is no Functional or Sequential model"),
        (("up0", "up0"), "checkpoint names 'up0' twice"),
        (("up0:add0", "add0:add1"), "which share the layer 'add0'. Name only one of them"),
        (("inner", "inner.a"), "which share the layer 'a'"),
    ],
)
def test_what_cannot_be_named(paths, message):
    model = made()
    with pytest.raises(BadInput, match=message):
        recomputation.apply(Settings(checkpoint=paths), model)
    assert "_run_through_graph" not in model.__dict__
    assert "call" not in model.get_layer("up0").__dict__
