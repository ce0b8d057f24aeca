"""Shares of losses against Keras's own values for the whole batch, on PyTorch."""

import keras
import numpy as np
import pytest
from keras import ops

from memfit.frameworks.keras.apply.weights import BatchPart, LossKind, NeedsWeights, is_elementwise, share_of

RANDOM = np.random.default_rng(0)
Y, Y_PRED = RANDOM.uniform(0.1, 0.9, (10, 3, 2)), RANDOM.uniform(0.1, 0.9, (10, 3, 2))
BY_SAMPLE, BY_STEP = RANDOM.uniform(0, 2, 10), RANDOM.uniform(0, 2, (10, 3))
MASK = RANDOM.uniform(size=(10, 3)) > 0.4
SPANS = ((0, 4), (4, 8), (8, 10))


def masked(values, mask):
    tensor = ops.convert_to_tensor(values)
    if mask is not None:
        keras.src.backend.set_keras_mask(tensor, ops.convert_to_tensor(mask))
    return tensor


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean", "sum", "mean_with_sample_weight"])
@pytest.mark.parametrize("weight", [None, BY_STEP])
@pytest.mark.parametrize("mask", [None, MASK, np.zeros_like(MASK)])
def test_shares_of_unequal_parts_add_up_to_the_loss(reduction, weight, mask):
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    expected = float(loss(Y, masked(Y_PRED, mask), weight))
    if reduction == "mean_with_sample_weight":
        counted = (np.ones_like(MASK) if mask is None else mask) * (1.0 if weight is None else weight)
    else:
        counted = np.ones_like(MASK) if mask is None else mask
    total = 0.0
    for start, stop in SPANS:
        part = BatchPart(stop - start, 10, [counted.sum()])
        given = None if weight is None else weight[start:stop]
        y_pred = masked(Y_PRED[start:stop], None if mask is None else mask[start:stop])
        total += float(share_of(loss, part, 0, LossKind.SAMPLES, Y[start:stop], y_pred, given))
    assert total == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_weights_of_samples_need_no_counting():
    loss = keras.losses.MeanSquaredError()
    parts = [
        share_of(loss, BatchPart(b - a, 10), 0, LossKind.SAMPLES, Y[a:b, 0], Y_PRED[a:b, 0], BY_SAMPLE[a:b])
        for a, b in SPANS
    ]
    assert sum(map(float, parts)) == pytest.approx(float(loss(Y[:, 0], Y_PRED[:, 0], BY_SAMPLE)), rel=1e-6)


@pytest.mark.parametrize(
    ("reduction", "weight", "mask"), [("mean", None, MASK), ("mean_with_sample_weight", BY_STEP, None)]
)
def test_what_the_model_masks_must_be_counted_first(reduction, weight, mask):
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    with pytest.raises(NeedsWeights):
        share_of(loss, BatchPart(10, 10), 0, LossKind.SAMPLES, Y, masked(Y_PRED, mask), weight)


def test_a_single_number_counts_as_it_is_told_to():
    loss = keras.src.losses.losses.LossFunctionWrapper(lambda y, y_pred: ops.sum(y - y_pred))
    whole = float(loss(Y[:4], Y_PRED[:4]))
    assert float(share_of(loss, BatchPart(4, 10), 0, LossKind.SUM, Y[:4], Y_PRED[:4], None)) == pytest.approx(whole)
    assert float(share_of(loss, BatchPart(4, 10), 0, LossKind.SAMPLES, Y[:4], Y_PRED[:4], None)) == pytest.approx(
        0.4 * whole
    )


def test_the_loss_itself_is_left_alone():
    loss = keras.losses.MeanSquaredError()
    before = dict(loss.__dict__)
    share_of(loss, BatchPart(4, 10), 0, LossKind.SAMPLES, Y[:4], Y_PRED[:4], None)
    assert loss.__dict__ == before


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (keras.losses.MeanSquaredError(), True),
        (keras.src.losses.losses.LossFunctionWrapper(keras.losses.mean_absolute_error), True),
        (keras.losses.Dice(), False),
        (keras.src.losses.losses.LossFunctionWrapper(keras.losses.dice), False),
        (keras.src.losses.losses.LossFunctionWrapper(lambda y, y_pred: ops.mean(y - y_pred)), False),
    ],
)
def test_losses_that_relate_samples_are_told_apart(loss, expected):
    assert is_elementwise(loss) is expected
