"""What callbacks have found out."""

import keras
import numpy as np
import pytest

from memfit.core import tensor_file
from memfit.core.state_tree import Decoder, Encoder
from memfit.frameworks.keras.guard.callbacks import CallbackStates, FitCallback
from tests.unit.frameworks.keras.guard.models import build, data


def decoder_of(encoder, path):
    tensor_file.write(path, [tensor_file.array_entry(name, array) for name, array in encoder.tensors.items()])
    return Decoder(tensor_file.TensorFile(path))


class Stopping:
    def __init__(self, patience):
        self.patience = patience
        self.wait = 0
        self.best = float("inf")
        self.best_weights = None
        self.model = object()
        self.function = len
        self.seen = []


def test_what_changed_is_kept_and_options_are_not(tmp_path):
    one = Stopping(patience=3)
    states = CallbackStates([one])
    one.wait, one.best, one.best_weights = 2, np.float32(0.5), [np.ones(2)]
    one.seen.append(1)
    encoder = Encoder()
    found = states.to_json(encoder)

    assert set(found[0][1]) == {"wait", "best", "best_weights", "seen"}

    other = Stopping(patience=7)
    CallbackStates([object.__new__(type("Other", (), {})), other]).load(found, decoder_of(encoder, tmp_path / "x"))

    assert (other.patience, other.wait, other.best, other.seen) == (7, 2, 0.5, [1])
    assert np.array_equal(other.best_weights[0], np.ones(2))


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
def test_the_least_change_that_counts_is_the_same_after_a_resume(tmp_path):
    def made():
        callback = keras.callbacks.ReduceLROnPlateau(monitor="loss", min_delta=0.5)
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        callback.set_model(model)
        callback.on_train_begin()
        return callback

    one, other = made(), made()
    states, encoder = CallbackStates([one]), Encoder()
    one.on_epoch_end(0, {"loss": 2.0})
    found = states.to_json(encoder)
    decoder = decoder_of(encoder, tmp_path / "x")
    CallbackStates([other]).load(found, decoder)
    for callback in (one, other):
        callback.on_epoch_end(1, {"loss": 1.7})
    assert one.wait == other.wait == 1
    # As an earlier version stored it.
    found[0][1]["min_delta"] = -0.5
    again = made()
    CallbackStates([again]).load(found, decoder)
    assert again.min_delta == 0.5


class Keeper:
    def __init__(self):
        self.told = []

    def train_begins(self, model, iterator, callbacks, params):
        self.told.append(("begins", iterator.num_batches, params["epochs"], len(callbacks)))

    def epoch_begins(self, epoch):
        self.told.append(("epoch", epoch))

    def epoch_ends(self, epoch, logs):
        self.told.append(("ended", epoch, sorted(logs)))

    def train_ends(self):
        self.told.append("ends")


def test_a_fit_is_told():
    keeper = Keeper()
    build().fit(*data(), batch_size=4, verbose=0, callbacks=[FitCallback(keeper)])

    assert keeper.told == [("begins", 3, 1, 1), ("epoch", 0), ("ended", 0, ["loss", "mae"]), "ends"]
