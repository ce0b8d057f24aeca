import keras
import numpy as np
from keras import layers

from memfit.frameworks.keras.apply.workload import recorded


def work(*parts, shape=(6, 4)):
    model = keras.Sequential([layers.Input(shape), *parts])
    call = recorded(model, np.zeros((3, *shape), "float32"))
    one = call.calls[-1]
    return one.made_bytes, one.inner_bytes, one.flops


def test_known_kinds_of_layers():
    assert work(layers.Dense(5)) == (6 * 5 * 4, 0, 2 * 6 * 4 * 5)
    assert work(layers.Dense(5, activation="gelu")) == (6 * 5 * 4, 6 * 5 * 4, 2 * 6 * 4 * 5)
    assert work(layers.EinsumDense("abc,cd->abd", (6, 5))) == (6 * 5 * 4, 0, 2 * 6 * 4 * 5)
    assert work(layers.Conv1D(5, 3, padding="same")) == (6 * 5 * 4, 0, 2 * 6 * 5 * 3 * 4)
    assert work(layers.DepthwiseConv1D(3, padding="same")) == (6 * 4 * 4, 0, 2 * 6 * 4 * 3)
    assert work(layers.Conv1DTranspose(5, 3, padding="same")) == (6 * 5 * 4, 0, 2 * 6 * 4 * 3 * 5)
    assert work(layers.LSTM(5, return_sequences=True)) == (6 * 5 * 4, 6 * 5 * 10 * 4, 2 * 6 * 4 * 5 * 9)
    assert work(layers.Flatten()) == (0, 0, 0)
    assert work(layers.LayerNormalization()) == (6 * 4 * 4, 0, 0)


def test_attention_counts_its_scores():
    inputs = layers.Input((6, 4))
    model = keras.Model(inputs, layers.MultiHeadAttention(2, 3)(inputs, inputs))
    one = recorded(model, np.zeros((3, 6, 4), "float32")).calls[-1]
    assert one.inner_bytes == 4 * (4 * 6 * 2 * 3 + 2 * 2 * 6 * 6)
    assert one.flops == 2 * (4 * 6 * 2 * 3) * 4 + 4 * (2 * 6 * 6) * 3


def test_layers_of_layers_keep_what_these_make():
    inner = keras.Sequential([layers.Dense(5), layers.Dense(7)])
    assert work(inner) == (6 * 7 * 4, 4 * 6 * (5 + 7), 2 * 6 * (4 * 5 + 5 * 7))


def test_what_cannot_be_followed_is_none_and_layers_are_as_before():
    class Odd(keras.Model):
        def call(self, x):
            raise RuntimeError("only with numbers")

    plain = layers.Layer.__call__
    assert recorded(Odd(), np.zeros((3, 4), "float32")) is None
    assert layers.Layer.__call__ is plain
