"""The data of a fit: its order, and the way back to a position."""

import itertools
import random

import numpy as np
import pytest
import torch

keras = pytest.importorskip("keras")

from memfit.frameworks.keras.guard import data as data_module  # noqa: E402
from memfit.frameworks.keras.guard.data import (  # noqa: E402
    Data,
    found_in_fit,
    order_seed,
    random_states,
    restore_random,
    restore_torch,
)


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
    data.count(10)
    data.end_epoch()
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
    data.count(4)
    data.end_epoch()
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
    data.count(4)
    data.end_epoch()
    position = data.position(at_end=True)
    following, expected = next(batches), np.random.random()
    np.random.seed(5)

    other = Data(Iterator(steps_per_epoch=4), is_ordered=True)
    other.go_to(position, 0)
    other.begin_epoch(1)

    assert next(iter(other._iterator._get_iterator())) == following
    assert (np.random.random() == expected) == (keras.backend.backend() != "tensorflow")


class Fit:
    """Epochs as Keras's own iterator gives them, in parts of passes or in whole ones."""

    def __init__(self, steps_per_epoch):
        from keras.src.trainers.epoch_iterator import EpochIterator

        class Ten:
            num_batches = 10

            def on_epoch_begin(self): ...

            def on_epoch_end(self): ...

        self.iterator = EpochIterator.__new__(EpochIterator)
        self.iterator.data_adapter = Ten()
        self.iterator.steps_per_epoch = steps_per_epoch
        self.iterator.steps_per_execution = 1
        self.iterator._current_iterator = None
        self.iterator._num_batches = 10
        self.iterator._steps_seen = 0
        self.iterator._get_iterator = lambda: iter(np.random.permutation(10).tolist())
        self.data = Data(self.iterator, is_ordered=True)

    def epochs(self, first, last, skip=0, position=None):
        """Batches of each epoch, and the positions after each of them."""
        drawn, positions = [], []
        for epoch in range(first, last):
            if position is not None:
                self.data.go_to(position, skip)
            self.data.begin_epoch(epoch)
            batches = []
            for done, (_, _, source) in enumerate(self.iterator._enumerate_iterator(), 1):
                batches.append(next(source))
                self.data.count()
                if position is not None and done == skip:
                    self.data.caught_up(position)
                positions.append((epoch, done, self.data.position(at_end=False)))
            self.data.end_epoch()
            positions.append((epoch + 1, 0, self.data.position(at_end=True)))
            drawn.append(batches)
            position, skip = None, 0
        return drawn, positions


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.skipif(keras.backend.backend() == "tensorflow", reason="orders there follow from a number")
@pytest.mark.parametrize("steps_per_epoch", [None, 3, 4, 5, 10])
def test_all_positions_of_a_fit_can_be_come_back_to(steps_per_epoch):
    """Where an epoch ends with the data, in the midst of them, and where the data end an epoch early."""
    np.random.seed(1)
    expected, positions = Fit(steps_per_epoch).epochs(0, 5)
    for epoch, done, position in positions[:-1]:
        np.random.seed(9)
        found, _ = Fit(steps_per_epoch).epochs(epoch, 5, done, position)
        assert found == expected[epoch:], (epoch, done)


def test_a_pass_that_begins_with_the_end_of_an_epoch_has_an_order_of_its_own():
    fit = Fit(10)
    fit.epochs(0, 1)
    assert fit.data._pass["epoch"] == 1


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


def test_each_pass_has_the_order_that_it_was_given(on_tensorflow):
    assert on_tensorflow["order"] == [[[6, 5, 4], [3, 2, 1], [0]], [[0, 2, 4], [6, 1, 3], [5]]]


def test_the_last_batch_may_be_smaller(on_tensorflow):
    assert on_tensorflow["shapes"] == ["(None,)", "(None, 2)"]


def draw():
    return random.random(), np.random.rand(), float(torch.rand(()))


def test_all_generators_go_back():
    found = random_states()
    first = draw()
    assert draw() != first

    restore_random(found)

    assert draw() == first


def test_what_layers_draw_from_goes_back_alone():
    found = random_states()
    first = draw()

    restore_torch(found)

    again = draw()
    assert again[2] == first[2]
    assert again[0] != first[0] and again[1] != first[1]


def test_a_seed_follows_from_those_of_the_script_and_draws_nothing(monkeypatch):
    def seeds(number):
        monkeypatch.setattr(data_module, "_count", itertools.count())
        random.seed(number)
        np.random.seed(number)
        return order_seed(), order_seed()

    first = seeds(1)
    drawn = draw()

    assert seeds(1) == first
    assert draw()[:2] == drawn[:2]
    assert len({*first, *seeds(2)}) == 4
