"""The epochs and types that tf.data is given; TensorFlow itself is in integration/test_stream_keras.py.

It would add seconds and threads to the process of all tests, so a stand-in takes its place.
"""

import importlib
import sys
import types

import numpy as np
import pytest

from memfit.api.stream import stream
from memfit.core.errors import BadInput

NUM_SAMPLES, BATCH, NUM_BATCHES = 23, 4, 6


class Dataset:
    def __init__(self, generator, output_signature):
        self.generator, self.signature = generator, output_signature
        self.num_batches = self.buffer = None

    @classmethod
    def from_generator(cls, generator, output_signature):
        return cls(generator, output_signature)

    def apply(self, change):
        return change(self)

    def prefetch(self, size):
        self.buffer = size
        return self


def assert_cardinality(count):
    def change(dataset):
        dataset.num_batches = count
        return dataset

    return change


def map_structure(function, tree):
    if isinstance(tree, tuple):
        return tuple(map_structure(function, item) for item in tree)
    if isinstance(tree, dict):
        return {key: map_structure(function, item) for key, item in tree.items()}
    return function(tree)


@pytest.fixture
def as_tf_dataset(monkeypatch):
    tf = types.ModuleType("tensorflow")
    tf.data = types.SimpleNamespace(
        Dataset=Dataset, experimental=types.SimpleNamespace(assert_cardinality=assert_cardinality)
    )
    tf.nest = types.SimpleNamespace(map_structure=map_structure)
    tf.TensorSpec = lambda shape, dtype: (shape, dtype)
    tf.as_dtype = lambda dtype: dtype.name
    monkeypatch.setitem(sys.modules, "tensorflow", tf)
    monkeypatch.delitem(sys.modules, "memfit.frameworks.tensorflow.streaming", raising=False)
    yield importlib.import_module("memfit.frameworks.tensorflow.streaming").as_tf_dataset
    sys.modules.pop("memfit.frameworks.tensorflow.streaming", None)


@pytest.fixture
def opened(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(NUM_SAMPLES * 2, dtype="float64").reshape(-1, 2))
    np.save(tmp_path / "y.npy", np.arange(NUM_SAMPLES, dtype="int64"))
    source = (str(tmp_path / "x.npy"), str(tmp_path / "y.npy"))
    return lambda: stream(source, batch_size=BATCH, memory="16MiB")


def labels(batches):
    return [batch[1].tolist() for batch in batches]


def test_types_and_number_of_batches_are_known(as_tf_dataset, opened):
    dataset = as_tf_dataset(opened())

    assert dataset.signature == (((None, 2), "float32"), ((None,), "int64"))
    assert dataset.num_batches == NUM_BATCHES
    assert dataset.buffer == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_iteration_is_an_epoch(as_tf_dataset, opened, num_workers):
    plain = opened()
    expected = [labels(plain) for _ in range(3)]
    dataset = as_tf_dataset(opened(), num_workers)

    assert labels(dataset.generator()) == expected[0]

    # An iteration that is left, before the next one begins or after.
    left = dataset.generator()
    assert next(left)[1].tolist() == expected[1][0]
    following = dataset.generator()
    assert next(following)[1].tolist() == expected[2][0]
    left.close()
    assert labels(following) == expected[2][1:]


def test_the_number_of_batches_is_open_in_the_middle_of_an_epoch(as_tf_dataset, opened):
    source = opened()
    source.load_state_dict(source.state_after(2))

    dataset = as_tf_dataset(source)

    assert dataset.num_batches is None
    assert len(labels(dataset.generator())) == NUM_BATCHES - 2
    assert len(labels(dataset.generator())) == NUM_BATCHES


def test_an_empty_stream_is_refused(as_tf_dataset, opened):
    source = opened()
    source.load_state_dict(source.state_after(NUM_BATCHES))

    with pytest.raises(BadInput, match="has no batches"):
        as_tf_dataset(source)
