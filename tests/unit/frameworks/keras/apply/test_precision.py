"""Policies and optimizers; training on all backends is in integration/test_keras_moves.py."""

import keras
import pytest
from keras import layers

from memfit.core.errors import BadInput, BadModel
from memfit.core.settings import Settings
from memfit.frameworks.keras.apply import precision


def made(**options):
    inner = keras.Sequential([layers.Input((4,)), layers.Dense(4, name="a"), layers.Dense(2, name="b")], name="inner")
    inputs = layers.Input((4,))
    model = keras.Model(inputs, inner(layers.Dense(4, name="first", **options)(inputs)))
    model.compile("adam", "mse")
    return model


def policies(model):
    return {
        layer.name: layer.dtype_policy.name for layer in model._flatten_layers() if layer.name in ("first", "a", "b")
    }


def test_layers_are_switched_but_those_of_the_output_and_back():
    model = made()
    model.make_predict_function()
    undo = precision.apply(Settings(precision="amp-bf16"), model)
    assert policies(model) == {"first": "mixed_bfloat16", "a": "mixed_bfloat16", "b": "float32"}
    # Traced in float32.
    assert model.predict_function is None
    undo()
    assert set(policies(model).values()) == {"float32"}
    precision.apply(Settings(), model)()
    assert set(policies(model).values()) == {"float32"}


def test_float16_scales_the_loss_around_the_optimizer_that_is_there():
    model = made()
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    undo = precision.apply(Settings(precision="amp-fp16"), model)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert model.optimizer.inner_optimizer is optimizer
    undo()
    assert model.optimizer is optimizer
    model.compile(keras.optimizers.SGD(loss_scale_factor=8.0), "mse")
    own = model.optimizer
    precision.apply(Settings(precision="amp-fp16"), model)
    assert model.optimizer is own


def test_layers_with_a_loss_of_their_own_stay():
    model = made(activity_regularizer="l2")
    precision.apply(Settings(precision="amp-bf16"), model)
    assert policies(model) == {"first": "float32", "a": "mixed_bfloat16", "b": "float32"}


def test_layers_with_a_policy_of_their_own_keep_it():
    model = made(dtype="float64")
    precision.apply(Settings(precision="amp-bf16"), model)
    assert policies(model)["first"] == "float64"


def test_output_layers_without_a_graph():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.head = layers.Dense(3), layers.Dense(2, activation="softmax")

    model = Own()
    assert precision.output_layers(model) == [model.head]


def test_what_is_refused():
    with pytest.raises(
        BadInput, match="precision is 'fp8', but Keras models can be switched to 'amp-bf16' or 'amp-fp16'"
    ):
        precision.apply(Settings(precision="fp8"), made())
    model = keras.Sequential([layers.Input((4,), dtype="float64"), layers.Dense(4, dtype="float64")], name="wide")
    with pytest.raises(BadModel, match="'wide' can't be switched to mixed_bfloat16: its layers compute in"):
        precision.apply(Settings(precision="amp-bf16"), model)


def test_words():
    assert precision.difference(Settings()) == ""
    assert precision.difference(Settings(precision="amp-bf16")).startswith("layers compute in bfloat16, which rounds")
    assert "overflow" in precision.difference(Settings(precision="amp-fp16"))
