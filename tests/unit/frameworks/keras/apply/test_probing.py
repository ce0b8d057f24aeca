from contextlib import nullcontext

import keras
import pytest
from keras import layers, ops

from memfit.frameworks.keras.apply.probing import kind_of_loss, kinds_of_added
from memfit.frameworks.keras.apply.weights import Kind

SPEC = keras.KerasTensor((None, 4))


def kind(function, weight=None):
    loss = keras.src.losses.losses.LossFunctionWrapper(function)
    return kind_of_loss(nullcontext, loss, SPEC, SPEC, weight)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda y, y_pred: ops.mean(ops.square(y - y_pred)), Kind.SAMPLES),
        (lambda y, y_pred: ops.mean(ops.square(y - y_pred), axis=-1), Kind.SAMPLES),
        (lambda y, y_pred: ops.sum(ops.square(y - y_pred)), Kind.SUM),
        (lambda y, y_pred: ops.std(y - y_pred), Kind.NEITHER),
        (lambda y, y_pred: ops.mean(ops.matmul(y_pred, ops.transpose(y)), axis=-1), Kind.NEITHER),
        (lambda y, y_pred: y / 0, Kind.NEITHER),
        (lambda y, y_pred: ops.sum(ops.relu(ops.abs(y - y_pred) - 1.0)), Kind.SUM),
        (lambda y, y_pred: ops.mean(ops.relu(ops.abs(y - y_pred) - 5.0)), Kind.SAMPLES),
        (lambda y, y_pred: ops.maximum(ops.mean(ops.square(y - y_pred)), 1.0), Kind.NEITHER),
        (lambda y, y_pred: ops.mean(ops.square(y - y_pred)) + 1e-3 * ops.var(y_pred), Kind.NEITHER),
        (lambda y, y_pred: 0.0 * ops.sum(y_pred), Kind.NEITHER),
    ],
)
def test_a_loss_function_is_a_mean_a_sum_or_neither(function, expected):
    assert kind(function) is expected


def test_a_mean_is_none_of_weighted_samples():
    assert kind(lambda y, y_pred: ops.mean(ops.square(y - y_pred)), keras.KerasTensor((None,))) is Kind.NEITHER


def test_dice_relates_samples_unless_its_axes_keep_them_apart():
    spec = keras.KerasTensor((None, 4, 4, 1))
    assert kind_of_loss(nullcontext, keras.losses.Dice(), spec, spec, None) is Kind.NEITHER
    assert kind_of_loss(nullcontext, keras.losses.Dice(axis=(1, 2, 3)), spec, spec, None) is Kind.SAMPLES


class Adding(layers.Layer):
    def call(self, inputs):
        self.add_loss(ops.mean(inputs))
        self.add_loss(ops.sum(inputs))
        self.add_loss(ops.var(inputs))
        return inputs


def test_losses_that_layers_add_are_told_apart_in_their_order():
    inputs = layers.Input((4,))
    model = keras.Model(inputs, Adding()(layers.Dense(3, kernel_regularizer="l2")(inputs)))
    values = [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables]
    found = kinds_of_added(nullcontext, model, values, SPEC)
    assert found == [Kind.SAMPLES, Kind.SUM, Kind.NEITHER, Kind.SAMPLES]


class AddingAboveThreshold(layers.Layer):
    def call(self, inputs):
        self.add_loss(10.0 * ops.sum(ops.relu(ops.abs(inputs) - 3.0)))
        return inputs


def test_thresholds_and_weights_of_zero_hide_nothing():
    inputs = layers.Input((4,))
    dense = layers.Dense(3, kernel_initializer="ones", bias_regularizer="l2")
    model = keras.Model(inputs, AddingAboveThreshold()(dense(inputs)))
    values = [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables]

    assert kinds_of_added(nullcontext, model, values, SPEC) == [Kind.SUM, Kind.SAMPLES]


def test_an_added_loss_that_is_nothing_on_all_numbers_tells_nothing():
    inputs = layers.Input((4,))
    model = keras.Model(inputs, AddingAboveThreshold()(layers.Dense(3, kernel_initializer="zeros")(inputs)))
    values = [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables]

    assert kinds_of_added(nullcontext, model, values, SPEC) == [Kind.NEITHER]
