"""KerasStream against what Keras does, played by hand; the three real backends are in integration/test_stream_keras.py.

Keras itself would load TensorFlow into the process of all tests, so a stand-in with its two base classes takes its
place.
"""

import importlib
import json
import pickle
import random
import sys
import threading
import types

import numpy as np
import pytest

from memfit.api.stream import StreamOptions, stream

NUM_SAMPLES, BATCH, NUM_BATCHES = 43, 4, 11


class PyDataset:
    def __init__(self, workers=1, use_multiprocessing=False, max_queue_size=10):
        self.workers, self.use_multiprocessing, self.max_queue_size = workers, use_multiprocessing, max_queue_size


class Callback:
    pass


@pytest.fixture
def streaming(monkeypatch):
    keras = types.ModuleType("keras")
    keras.utils = types.SimpleNamespace(PyDataset=PyDataset)
    keras.callbacks = types.SimpleNamespace(Callback=Callback)
    monkeypatch.setitem(sys.modules, "keras", keras)
    monkeypatch.delitem(sys.modules, "memfit.frameworks.keras.streaming", raising=False)
    yield importlib.import_module("memfit.frameworks.keras.streaming")
    sys.modules.pop("memfit.frameworks.keras.streaming", None)


@pytest.fixture
def opened(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(NUM_SAMPLES, dtype="float32")[:, None])
    return lambda seed=0: stream(
        str(tmp_path / "x.npy"), batch_size=BATCH, options=StreamOptions(seed=seed), memory="16MiB"
    )


@pytest.fixture
def data(streaming, opened):
    return streaming.KerasStream(opened())


@pytest.fixture
def expected(opened):
    plain = opened()
    return [[ids(batch) for batch in plain] for _ in range(3)]


def ids(batch):
    return batch[:, 0].astype(int).tolist()


class EpochIterator:
    """What Keras makes of a data set, in the order in which it calls it."""

    def __init__(self, data):
        self.data = data
        self.num_batches = data.num_batches
        self.current = None

    def generator(self):
        indices = list(range(self.data.num_batches))
        random.shuffle(indices)
        for index in indices:
            yield self.data[index]

    def reset(self):
        self.current = None
        self.num_batches = self.data.num_batches
        self.on_epoch_end()

    def on_epoch_end(self):
        self.data.on_epoch_end()

    def epoch(self, steps=None, after=lambda step: None):
        self.data.on_epoch_begin()
        if self.current is None or steps is None:
            self.current = self.generator()
        given = []
        for step in range(steps or self.num_batches):
            given.append(ids(next(self.current)))
            after(step)
        self.on_epoch_end()
        return given


def stream_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("memfit-stream")]


def test_epochs_come_in_the_streams_order_whatever_is_asked_for(data, expected):
    keras = EpochIterator(data)
    keras.reset()

    given = [keras.epoch() for _ in range(2)]

    assert given == expected[:2]
    assert sorted(sample for batch in given[0] for sample in batch) == list(range(NUM_SAMPLES))
    assert (data.epoch, len(data), data.num_batches) == (2, NUM_BATCHES, NUM_BATCHES)
    assert stream_threads() == []


def test_batches_that_are_only_looked_at_are_given_all_the_same(data, expected):
    # GIVEN the looks that TensorFlow takes for the types, and the one that builds a model
    looks = [ids(data[index]) for index in range(2)]
    keras = EpochIterator(data)
    data.on_epoch_begin()
    next(keras.generator())

    # WHEN Keras takes it back and trains
    keras.reset()

    # THEN the epoch is whole
    assert looks == expected[0][:2]
    assert keras.epoch() == expected[0]
    with pytest.raises(IndexError, match="batch 11 was asked for, and 11 are left of the epoch"):
        data[NUM_BATCHES]


def test_a_generator_that_was_left_takes_nothing_from_the_next(data, expected):
    keras = EpochIterator(data)
    left = keras.generator()
    first = [ids(next(left)) for _ in range(2)]
    keras.reset()

    data.on_epoch_begin()
    given, fetched = [], []
    current = keras.generator()
    for step in range(NUM_BATCHES):
        given.append(ids(next(current)))
        if step % 3 == 0:
            fetched.append(ids(next(left)))
    keras.on_epoch_end()

    assert given == expected[0]
    assert first + fetched == expected[0][:6]
    assert data.epoch == 1


def test_parts_of_an_epoch_go_on_where_the_last_one_ended(data, expected):
    keras = EpochIterator(data)
    assert keras.epoch(steps=4) == expected[0][:4]
    assert stream_threads() == []
    assert keras.epoch(steps=4) == expected[0][4:8]

    # Another call of fit.
    keras = EpochIterator(data)
    keras.reset()
    assert keras.epoch() == expected[0][8:]
    assert EpochIterator(data).epoch() == expected[1]


def test_a_generator_that_asks_for_more_than_an_epoch_gets_the_next(data, expected):
    def endless():
        while True:
            yield data[0]

    asked = endless()

    assert [ids(next(asked)) for _ in range(NUM_BATCHES + 2)] == expected[0] + expected[1][:2]


def test_it_can_be_iterated_over(data, expected):
    assert [[ids(batch) for batch in data] for _ in range(2)] == expected[:2]


@pytest.mark.parametrize("num_done", [0, 1, 5, 10, 11])
def test_the_position_of_training_is_resumed(streaming, opened, expected, num_done):
    # GIVEN a training that is followed, by a loop that fetches 3 batches ahead
    data = streaming.KerasStream(opened())
    position = streaming.StreamPosition(data)
    position.on_train_begin()
    data.on_epoch_begin()
    position.on_epoch_begin(0)
    asked = EpochIterator(data).generator()
    for _ in range(min(num_done + 3, NUM_BATCHES)):
        next(asked)
    for step in range(num_done):
        position.on_train_batch_end(step)

    # WHEN the state is taken and loaded elsewhere
    state = json.loads(json.dumps(data.state_dict()))
    resumed = streaming.KerasStream(opened(seed=7))
    resumed.load_state_dict(state)

    # THEN the rest follows, and then the next epoch
    rest = expected[0][num_done:]
    keras = EpochIterator(resumed)
    if rest:
        assert resumed.num_batches == len(rest)
        assert keras.epoch() == rest
    assert resumed.epoch == 1
    assert EpochIterator(resumed).epoch() == expected[1]


def test_the_position_without_a_callback_is_what_was_given(data, opened, expected):
    asked = EpochIterator(data).generator()
    for _ in range(3):
        next(asked)

    plain = opened()
    plain.load_state_dict(data.state_dict())

    assert [ids(batch) for batch in plain] == expected[0][3:]
    assert data.stream.state_dict()["samples"] == 0


def test_several_steps_at_once_are_counted(streaming, data):
    position = streaming.StreamPosition(data)
    position.on_train_begin()
    keras = EpochIterator(data)
    position.on_epoch_begin(0)
    keras.epoch(steps=8, after=lambda step: position.on_train_batch_end(step) if step % 4 == 3 else None)

    assert data.state_dict()["samples"] == 8 * BATCH
    position.on_train_end()


def test_a_call_of_fit_that_began_in_the_middle_is_warned_about(data):
    EpochIterator(data).epoch(steps=8)
    keras = EpochIterator(data)
    keras.epoch()

    with pytest.warns(UserWarning, match=r"when 3 batches were left of it, and Keras keeps .* though 11 batches come"):
        keras.epoch()


def test_a_left_epoch_begins_again_and_leaves_no_threads(data, expected):
    # Other tests leave epochs, too, whose threads end when they are collected.
    before = set(stream_threads())
    asked = EpochIterator(data).generator()
    next(asked)
    next(asked)
    assert set(stream_threads()) - before

    data.close()

    assert set(stream_threads()) <= before
    assert EpochIterator(data).epoch() == expected[0]


def test_worker_processes_give_the_same(streaming, opened, expected):
    data = streaming.KerasStream(opened(), num_workers=2)

    assert EpochIterator(data).epoch() == expected[0]


def test_a_file_that_became_shorter_is_an_error(streaming, opened, data, monkeypatch):
    monkeypatch.setattr(type(data.stream), "part", lambda self, worker, num_workers: (batch for batch in ()))

    with pytest.raises(RuntimeError, match="the stream ended after 0 of 11 batches"):
        EpochIterator(data).epoch()


def test_keras_gets_no_workers_of_its_own_and_a_short_queue(streaming, data):
    assert (data.workers, data.use_multiprocessing) == (1, False)
    assert 1 <= data.max_queue_size <= 10


def test_it_can_be_pickled(data, expected):
    asked = EpochIterator(data).generator()
    next(asked)

    twin = pickle.loads(pickle.dumps(data))

    assert EpochIterator(twin).epoch() == expected[0]
