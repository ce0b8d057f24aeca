"""One epoch is taken once, and all workers of a group find out which."""

import copy
import multiprocessing
import os
import threading

import pytest

from memfit.core.errors import MemfitError
from memfit.frameworks.torch import shared_epochs
from memfit.frameworks.torch.shared_epochs import SharedEpochs


def test_each_iteration_takes_the_next_epoch():
    shared = SharedEpochs()
    shared.set_next(3)

    assert [shared.take(), shared.take(group=7), shared.take()] == [3, 4, 5]
    assert shared.next_epoch == 6


def test_an_epoch_that_is_held_is_taken_again():
    shared = SharedEpochs()
    shared.set_next(3, is_held=True)

    assert [shared.take(), shared.take(group=7)] == [3, 3]
    shared.set_next(4)
    assert [shared.take(), shared.take()] == [4, 5]


def test_whether_workers_have_begun():
    shared = SharedEpochs()
    assert not shared.is_taken
    shared.take(group=7)
    assert shared.is_taken
    shared.set_next(0)
    assert not shared.is_taken


def test_workers_find_the_epoch_of_their_own_iterator():
    shared = SharedEpochs()
    for iteration in range(3):
        for group in (7, 9):
            shared.take(group, iteration)

    assert [shared.taken_by(7, iteration) for iteration in range(3)] == [0, 2, 4]
    assert [shared.taken_by(9, iteration) for iteration in range(3)] == [1, 3, 5]


def test_old_groups_make_room_for_new_ones():
    shared = SharedEpochs()
    for group in range(1, 101):
        assert shared.take(group) == group - 1
        assert shared.taken_by(group, 0) == group - 1


def test_workers_wait_for_the_first_one():
    shared = SharedEpochs()
    found = []
    waiting = threading.Thread(target=lambda: found.append(shared.taken_by(7, 0)))
    waiting.start()
    shared.set_next(5)
    shared.take(7)
    waiting.join()

    assert found == [5]


def test_but_not_for_ever(monkeypatch):
    monkeypatch.setattr(shared_epochs, "_BEGIN_SECONDS", 0.01)
    with pytest.raises(MemfitError, match=r"the first worker of the DataLoader has not begun the epoch\. If other"):
        SharedEpochs().taken_by(7, 0)


def test_a_state_is_kept_as_it_is():
    shared = SharedEpochs()
    for state in ({"a": 1, "b": "x" * 1000}, {"a": 2}):
        shared.state = state
        assert shared.state == state


def test_a_state_that_is_being_written_is_waited_for():
    shared = SharedEpochs()
    shared.state = {"a": 1}
    shared._numbers[shared._VERSION] += 1
    found = []
    waiting = threading.Thread(target=lambda: found.append(shared.state))
    waiting.start()
    waiting.join(0.05)
    assert found == []
    shared._numbers[shared._VERSION] += 1
    waiting.join()

    assert found == [{"a": 1}]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_processes_share_it_and_copies_do_not():
    shared = SharedEpochs()
    twin = copy.deepcopy(shared)
    process = multiprocessing.get_context("fork").Process(target=shared.take)
    process.start()
    process.join()
    process.close()

    assert (shared.next_epoch, twin.next_epoch) == (1, 0)
