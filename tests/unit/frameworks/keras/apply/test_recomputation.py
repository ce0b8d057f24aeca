"""What can be named and what is refused; equality on all backends is in integration/test_keras_moves.py."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from memfit.core.errors import BadInput
from memfit.core.settings import Settings
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.apply import recomputation
from memfit.frameworks.keras.apply.recomputation import StatelessCall

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


class Codes(layers.Layer):
    """Keeps state as large as weights are, and changes it; gives on numbers of no seed."""

    def build(self, shape):
        self.codes = self.add_weight(shape=(shape[-1], 20_000), initializer="glorot_uniform", trainable=False)

    def call(self, x, training=None):
        made = ops.tanh(ops.matmul(x, 1.0 * self.codes))
        if training:
            self.codes.assign(0.5 * self.codes)
            made = made * keras.random.uniform(ops.shape(made))
        return made


@pytest.mark.parametrize(
    "make",
    [
        lambda: layers.LSTM(4, dropout=0.4, recurrent_dropout=0.4),
        lambda: layers.LSTM(4, dropout=0.4, recurrent_dropout=0.4, seed=3),
        lambda: layers.Bidirectional(layers.GRU(3, dropout=0.4)),
        lambda: layers.SpectralNormalization(layers.Dense(4)),
        Codes,
    ],
    ids=["drawn", "seeded", "both ways", "assigns a weight", "changes much"],
)
def test_what_layers_change_and_keep_while_they_run_is_that_of_one_run(make):
    found = []
    x = np.random.default_rng(0).normal(size=(5, 3, 4)).astype("float32")
    for paths in ((), ("special",)):
        # Keras's own generator is made when it is first drawn from.
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        inputs = layers.Input((3, 4))
        layer = make()
        layer.name = "special"
        model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(layer(layers.Dense(4)(inputs)))))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        recomputation.apply(Settings(checkpoint=paths), model)
        keras.utils.set_random_seed(1)
        losses = [float(model.train_on_batch(x, x[:, 0, :1])) for _ in range(3)]
        found.append(np.concatenate([losses, *(value.ravel() for value in model.get_weights())]))
    assert len(set(found[0][:3])) == 3
    assert np.abs(found[0] - found[1]).max() == 0


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


# Keras's variables on PyTorch, as NumPy 2 sees them.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


class Counting(layers.Layer):
    """Has weights, state, randomness and a loss, and passes on a mask."""

    def __init__(self, other=None):
        super().__init__()
        self.dropout = layers.Dropout(0.5, seed=1)
        self.other = [other]

    def build(self, shape):
        self.weight = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=None):
        self.count.assign(self.count + 1)
        self.add_loss(ops.sum(x))
        if self.other[0] is not None:
            x = x * self.other[0]
        return {"made": self.dropout(x * self.weight, training=True), "none": None}


def called(layer, x, times):
    """Calls the layer statelessly, several times over; returns what it gave each time."""
    results = []

    def repeat(function, weights, trained, inputs):
        inputs = [ops.copy(value) for value in inputs]
        for _ in range(times):
            results.append(function(list(weights), list(inputs)))
        return results[-1]

    return StatelessCall([layer])(lambda given: layer(given[0]), [x], repeat), results


def test_effects_are_those_of_one_call_and_every_call_is_the_same():
    layer = Counting()
    x = ops.ones((2, 64))
    layer(x)
    layer.count.assign(0)
    seed = ops.convert_to_numpy(layer.dropout.seed_generator.state)
    layer._clear_losses()
    outputs, results = called(layer, x, times=3)
    assert outputs["none"] is None
    assert float(layer.count) == 1
    assert (ops.convert_to_numpy(layer.dropout.seed_generator.state) - seed).tolist() == [0, 1]
    assert [float(loss) for loss in layer.losses] == [128.0]
    first, *rest = [ops.convert_to_numpy(result[0]) for result in results]
    assert 0 < (first == 0).sum() < first.size
    assert all((first == other).all() for other in rest)


def test_variables_of_others_are_found():
    elsewhere = keras.Variable(np.full(4, 3.0, "float32"))
    layer = Counting(elsewhere)
    x = ops.ones((2, 4))
    layer(x)
    outputs, _ = called(layer, x, times=1)
    assert set(np.unique(ops.convert_to_numpy(outputs["made"]))) <= {0.0, 6.0}


def test_masks_go_in_and_come_out():
    layer = layers.Masking()
    seen = []

    class Look(layers.Layer):
        supports_masking = True

        def call(self, x, mask=None):
            seen.append(mask)
            return x + 1.0

    look = Look()
    x = layer(ops.convert_to_tensor([[[1.0], [0.0]]]))
    outputs = StatelessCall([look])(lambda given: look(given), x, lambda function, w, _, i: function(list(w), list(i)))
    assert ops.convert_to_numpy(seen[0]).tolist() == [[True, False]]
    assert ops.convert_to_numpy(internals.get_mask(outputs)).tolist() == [[True, False]]
