from contextlib import nullcontext

import keras
import numpy as np
import pytest
from keras import layers, ops

from memfit.core.errors import BadBatch, BadModel
from memfit.core.settings import Settings
from memfit.frameworks.keras.apply.split_step import (
    SplitStep,
    check_first_dimensions,
    kind_of_loss,
    kinds_of_added,
)
from memfit.frameworks.keras.apply.weights import LossKind


class Spread(layers.Layer):
    def call(self, inputs):
        self.add_loss(ops.std(inputs))
        return inputs


class BackendSplitStep(SplitStep):
    concrete = staticmethod(nullcontext)

    def __call__(self, data):
        raise NotImplementedError

    def numbers_of(self, variables):
        return [variable.value for variable in variables]


def opened(approximate=False):
    inputs = layers.Input((3,))
    model = keras.Model(inputs, Spread()(layers.Dense(2, kernel_regularizer="l2")(inputs)))
    model.compile("sgd", "mse")
    return model, BackendSplitStep(Settings(micro_batches=2), model, model.train_step, approximate)


def test_an_added_loss_that_does_not_add_up_is_refused_unless_allowed():
    data = (np.zeros((4, 3)), np.zeros((4, 2)), None)
    model, step = opened()
    model(data[0])
    with pytest.raises(BadModel, match="is neither a mean nor a sum over samples, so that micro-batches don't add up"):
        step.prepare(data, model.losses)
    model, step = opened(approximate=True)
    model(data[0])
    step.prepare(data, model.losses)


def test_a_batch_is_taken_apart_into_what_keras_takes_it_for():
    _, step = opened()
    x, y, weight, samples = step.open((np.zeros((4, 3)), np.zeros((4, 2))))
    assert (x.shape, y.shape, weight, samples) == ((4, 3), (4, 2), None, 4)


def test_arrays_of_a_batch_must_agree():
    x = {"a": np.zeros((4, 2)), "b": keras.KerasTensor((None, 3))}
    assert check_first_dimensions((x, np.zeros(4), None)) == 4
    assert check_first_dimensions((keras.KerasTensor((None, 3)), None, None)) is None
    with pytest.raises(BadBatch, match=r"shapes \(4, 2\), \(5,\). Give arrays that all have one row for each sample"):
        check_first_dimensions((x, np.zeros(5), None))
    with pytest.raises(BadBatch, match="a number without dimensions"):
        check_first_dimensions((x, np.float64(1), None))


SPEC = keras.KerasTensor((None, 4))


def kind(function, weight=None):
    loss = keras.src.losses.losses.LossFunctionWrapper(function)
    return kind_of_loss(nullcontext, loss, SPEC, SPEC, weight)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda y, y_pred: ops.mean(ops.square(y - y_pred)), LossKind.SAMPLES),
        (lambda y, y_pred: ops.mean(ops.square(y - y_pred), axis=-1), LossKind.SAMPLES),
        (lambda y, y_pred: ops.sum(ops.square(y - y_pred)), LossKind.SUM),
        (lambda y, y_pred: ops.std(y - y_pred), LossKind.NEITHER),
        (lambda y, y_pred: ops.mean(ops.matmul(y_pred, ops.transpose(y)), axis=-1), LossKind.NEITHER),
        (lambda y, y_pred: y / 0, LossKind.NEITHER),
        (lambda y, y_pred: ops.sum(ops.relu(ops.abs(y - y_pred) - 1.0)), LossKind.SUM),
        (lambda y, y_pred: ops.mean(ops.relu(ops.abs(y - y_pred) - 5.0)), LossKind.SAMPLES),
        (lambda y, y_pred: ops.maximum(ops.mean(ops.square(y - y_pred)), 1.0), LossKind.NEITHER),
        (lambda y, y_pred: ops.mean(ops.square(y - y_pred)) + 1e-3 * ops.var(y_pred), LossKind.NEITHER),
        (lambda y, y_pred: 0.0 * ops.sum(y_pred), LossKind.NEITHER),
    ],
)
def test_a_loss_function_is_a_mean_a_sum_or_neither(function, expected):
    assert kind(function) is expected


def test_a_mean_is_none_of_weighted_samples():
    assert kind(lambda y, y_pred: ops.mean(ops.square(y - y_pred)), keras.KerasTensor((None,))) is LossKind.NEITHER


def test_dice_relates_samples_unless_its_axes_keep_them_apart():
    spec = keras.KerasTensor((None, 4, 4, 1))
    assert kind_of_loss(nullcontext, keras.losses.Dice(), spec, spec, None) is LossKind.NEITHER
    assert kind_of_loss(nullcontext, keras.losses.Dice(axis=(1, 2, 3)), spec, spec, None) is LossKind.SAMPLES


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
    assert found == [LossKind.SAMPLES, LossKind.SUM, LossKind.NEITHER, LossKind.SAMPLES]


class AddingAboveThreshold(layers.Layer):
    def call(self, inputs):
        self.add_loss(10.0 * ops.sum(ops.relu(ops.abs(inputs) - 3.0)))
        return inputs


def test_thresholds_and_weights_of_zero_hide_nothing():
    inputs = layers.Input((4,))
    dense = layers.Dense(3, kernel_initializer="ones", bias_regularizer="l2")
    model = keras.Model(inputs, AddingAboveThreshold()(dense(inputs)))
    values = [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables]

    assert kinds_of_added(nullcontext, model, values, SPEC) == [LossKind.SUM, LossKind.SAMPLES]


def test_an_added_loss_that_is_nothing_on_all_numbers_tells_nothing():
    inputs = layers.Input((4,))
    model = keras.Model(inputs, AddingAboveThreshold()(layers.Dense(3, kernel_initializer="zeros")(inputs)))
    values = [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables]

    assert kinds_of_added(nullcontext, model, values, SPEC) == [LossKind.NEITHER]
