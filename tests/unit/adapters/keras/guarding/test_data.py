"""The data of a fit: its order, and the way back to a position."""

import itertools

import numpy as np
import pytest

keras = pytest.importorskip("keras")

from memfit.adapters.keras.guarding.data import Data, found_in_fit  # noqa: E402


class Iterator:
    """Keras's, as far as it is used; draws its order from numpy's generator."""

    def __init__(self, steps_per_epoch=None):
        self.data_adapter = object()
        self.steps_per_epoch = steps_per_epoch
        self._steps_seen = 0

    def _get_iterator(self):
        return iter(np.random.permutation(10).tolist())


def test_a_pass_has_the_same_order_again():
    first = Data(Iterator(), is_ordered=True)
    first.begin_epoch(0)
    order = list(first._iterator._get_iterator())
    position = first.position(at_end=False)
    np.random.seed(5)

    second = Data(Iterator(), is_ordered=True)
    second.go_to(position, 3)
    second.begin_epoch(0)
    assert list(second._iterator._get_iterator()) == order
    assert list(second._iterator._get_iterator()) != order


def test_after_an_epoch_the_next_order_is_the_same():
    data = Data(Iterator(), is_ordered=True)
    data.begin_epoch(0)
    list(data._iterator._get_iterator())
    data.end_epoch(10)
    position = data.position(at_end=True)
    data.begin_epoch(1)
    expected = list(data._iterator._get_iterator())
    np.random.seed(5)

    other = Data(Iterator(), is_ordered=True)
    other.go_to(position, 0)
    other.begin_epoch(1)
    assert list(other._iterator._get_iterator()) == expected


def test_epochs_that_are_parts_of_a_pass_go_on_in_it():
    data = Data(Iterator(steps_per_epoch=4), is_ordered=True)
    data.begin_epoch(0)
    batches = data._iterator._get_iterator()
    drawn = list(itertools.islice(batches, 4))
    data.end_epoch(4)
    data.begin_epoch(1)
    drawn += list(itertools.islice(batches, 2))
    position = data.position(at_end=False)
    left = list(batches)

    other = Data(Iterator(steps_per_epoch=4), is_ordered=True)
    other.go_to(position, 2)
    other.begin_epoch(1)
    again = list(other._iterator._get_iterator())
    other.count()

    assert again == drawn[4:] + left
    assert other._iterator._steps_seen == 4


def test_between_two_epochs_of_a_pass_random_numbers_go_on():
    data = Data(Iterator(steps_per_epoch=4), is_ordered=True)
    data.begin_epoch(0)
    batches = data._iterator._get_iterator()
    list(itertools.islice(batches, 4))
    # As a model does that drops out by the same generator.
    np.random.random(7)
    data.end_epoch(4)
    position = data.position(at_end=True)
    following, expected = next(batches), np.random.random()
    np.random.seed(5)

    other = Data(Iterator(steps_per_epoch=4), is_ordered=True)
    other.go_to(position, 0)
    other.begin_epoch(1)

    assert next(iter(other._iterator._get_iterator())) == following
    assert (np.random.random() == expected) == (keras.backend.backend() != "tensorflow")


def test_orders_of_tensorflow_follow_from_the_seed_and_the_epoch():
    data = Data(None, is_ordered=True)
    data._shuffle = "all"
    first = data._order(10, 4).tolist()
    assert data._order(10, 4).tolist() == first
    data._pass["epoch"] = 1
    assert data._order(10, 4).tolist() != first
    data._shuffle = "batch"
    found = data._order(10, 4).tolist()
    assert sorted(found[:4]) == [0, 1, 2, 3]
    assert sorted(found[8:]) == [8, 9]


def test_keras_is_found_in_the_frame_of_fit():
    def fit():
        epoch_iterator = Iterator()
        callbacks = type("List", (), {"callbacks": [1, 2]})()
        return found_in_fit(), epoch_iterator, callbacks

    (iterator, callbacks), expected, _ = fit()

    assert iterator is expected
    assert callbacks == [1, 2]
    assert found_in_fit() == (None, [])
