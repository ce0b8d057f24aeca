"""The callback that tells a guard where Keras is."""

import pytest

pytest.importorskip("keras")
from memfit.frameworks.keras.guard.callback import FitCallback
from tests.unit.frameworks.keras.guard.models import build, data


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
