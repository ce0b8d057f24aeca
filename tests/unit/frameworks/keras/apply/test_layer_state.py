import keras
from keras import layers

from memfit.frameworks.keras.apply.layer_state import listed, with_random_numbers, with_statistics


def model():
    inputs = layers.Input((4, 4))
    hidden = layers.BatchNormalization(name="norm")(inputs)
    frozen = layers.BatchNormalization(name="frozen")
    frozen.trainable = False
    hidden = layers.Dropout(0.5, name="drop")(layers.Dropout(0.0, name="none")(frozen(hidden)))
    return keras.Model(inputs, layers.Dense(1)(layers.LSTM(3, dropout=0.1, name="lstm")(hidden)))


def test_layers_that_keep_statistics_are_those_that_train_them():
    assert with_statistics(model()) == ["norm"]


def test_layers_that_draw_are_those_with_a_rate():
    assert next(iter(with_random_numbers(model()))) == "drop"
    assert "none" not in with_random_numbers(model())


def test_spectral_normalization_changes_its_vector():
    inputs = layers.Input((4,))
    assert with_statistics(keras.Model(inputs, layers.SpectralNormalization(layers.Dense(2), name="sn")(inputs))) == [
        "sn"
    ]


def test_a_long_list_is_cut():
    assert listed(["a", "b"]) == "'a', 'b'"
    assert listed(list("abcde")) == "'a', 'b', 'c' and 2 more"
