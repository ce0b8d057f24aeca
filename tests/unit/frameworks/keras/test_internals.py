import threading

import keras
import numpy as np
import pytest
from keras import layers

from memfit.frameworks.keras import internals

# Keras's variables on PyTorch, as NumPy 2 sees them.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


def test_graphs_and_their_calls_in_order():
    inputs = layers.Input((3,))
    model = keras.Model(inputs, layers.Dense(1, name="second")(layers.Dense(2, name="first")(inputs)))
    chain = keras.Sequential([layers.Input((3,)), layers.Dense(2, name="only")])
    assert internals.graph_of(model) is model
    assert [node.operation.name for node in internals.nodes_of(model)] == ["first", "second"]
    assert [node.operation.name for node in internals.nodes_of(internals.graph_of(chain))] == ["only"]
    assert internals.graph_of(layers.Dense(1)) is None


def test_surroundings_are_entered_again_on_another_thread():
    seen = []

    class Look(layers.Layer):
        def call(self, x, training=None):
            seen.append(training)
            return x

    class Outer(layers.Layer):
        def __init__(self):
            super().__init__()
            self.look = Look()

        def call(self, x):
            self.surroundings = internals.Surroundings()
            return self.look(x)

    outer, x = Outer(), np.ones((1, 1), "float32")
    outer(x)
    seen.clear()
    outer(x, training=True)

    def later():
        outer.look(x)
        with outer.surroundings.entered():
            outer.look(x)
        outer.look(x)

    thread = threading.Thread(target=later)
    thread.start()
    thread.join()
    assert [bool(value) for value in seen] == [True, False, True, False]


def test_values_are_as_stored_whatever_layers_cast_to():
    kinds = []

    class Look(layers.Layer):
        def build(self, shape):
            self.weight = self.add_weight(shape=(1,))

        def call(self, x):
            kinds.extend(
                str(value.dtype).rpartition(".")[2] for value in (self.weight.value, internals.value_of(self.weight))
            )
            return x

    Look(dtype="mixed_bfloat16")(np.ones((1, 1), "float32"))
    assert [kind.strip("<>'").rpartition("'")[2] or kind for kind in kinds][-2:] == ["bfloat16", "float32"]
    assert internals.collects_losses()
    with keras.StatelessScope():
        assert not internals.collects_losses()
