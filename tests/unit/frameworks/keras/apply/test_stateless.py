import keras
import numpy as np
import pytest
from keras import layers, ops

from memfit.frameworks.keras import internals
from memfit.frameworks.keras.apply.stateless import StatelessCall

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
