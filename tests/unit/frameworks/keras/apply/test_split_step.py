from contextlib import nullcontext

import keras
import numpy as np
import pytest
from keras import layers, ops

from memfit.core.errors import BadModel
from memfit.core.settings import Settings
from memfit.frameworks.keras.apply.split_step import SplitStep


class Spread(layers.Layer):
    def call(self, inputs):
        self.add_loss(ops.std(inputs))
        return inputs


class Step(SplitStep):
    concrete = staticmethod(nullcontext)

    def __call__(self, data):
        raise NotImplementedError

    def numbers_of(self, variables):
        return [variable.value for variable in variables]


def opened(approximate=False):
    inputs = layers.Input((3,))
    model = keras.Model(inputs, Spread()(layers.Dense(2, kernel_regularizer="l2")(inputs)))
    model.compile("sgd", "mse")
    return model, Step(Settings(micro_batches=2), model, model.train_step, approximate)


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
