from contextlib import nullcontext

import keras
import numpy as np
import pytest
from keras import layers, ops

from memfit.core.errors import BadBatch, BadModel
from memfit.core.settings import Settings
from memfit.frameworks.keras.apply.split_step import SplitStep, check_first_dimensions, part_size, splits


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


def test_settings_ask_for_parts_by_number_or_by_size():
    assert not splits(Settings())
    assert splits(Settings(micro_batches=2))
    assert splits(Settings(micro_batch_size=8))


@pytest.mark.parametrize(("parts", "samples", "size"), [(3, 10, 4), (3, 9, 3), (20, 5, 1), (2, 1, 1)])
def test_as_many_parts_as_asked_for_or_one_for_each_sample(parts, samples, size):
    assert part_size(Settings(micro_batches=parts), samples) == size


def test_the_size_of_a_part_holds_whatever_the_batch():
    assert part_size(Settings(micro_batches=2, micro_batch_size=3), 100) == 3


def test_arrays_of_a_batch_must_agree():
    x = {"a": np.zeros((4, 2)), "b": keras.KerasTensor((None, 3))}
    assert check_first_dimensions((x, np.zeros(4), None)) == 4
    assert check_first_dimensions((keras.KerasTensor((None, 3)), None, None)) is None
    with pytest.raises(BadBatch, match=r"shapes \(4, 2\), \(5,\). Give arrays that all have one row for each sample"):
        check_first_dimensions((x, np.zeros(5), None))
    with pytest.raises(BadBatch, match="a number without dimensions"):
        check_first_dimensions((x, np.float64(1), None))
