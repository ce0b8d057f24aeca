import random

import keras
import numpy as np
import pytest

from memfit.frameworks.keras.internals import global_seed_generator
from memfit.frameworks.keras.trace.restoration import untouched

layers = keras.layers


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.parts = [layers.Dense(4), layers.Dense(2)]
        self.settings = {"scale": 1.0, "seen": []}

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


def made():
    model = Subclassed()
    model.compile("adam", "mse", metrics=["mae"])
    return model


def test_an_unbuilt_model_is_unbuilt_again_and_can_be_trained():
    model = made()
    with untouched(model):
        model(np.zeros((2, 8), "float32"))
        model.optimizer.build(model.trainable_variables)
        model.settings["seen"].append(1)
        model.extra = 3
        model.train_step = None
        assert len(model.variables) >= 4

    assert not model.optimizer.built
    assert len(model.optimizer.variables) == 2
    assert not any(part.built for part in model.parts)
    assert model.settings == {"scale": 1.0, "seen": []}
    assert "extra" not in vars(model)
    assert "train_step" not in vars(model)
    model.fit(np.zeros((2, 8)), np.zeros((2, 2)), verbose=0)
    assert len(model.optimizer.variables) == 2 + 2 * 4


def test_everything_comes_back_after_a_failure_too():
    model = made()
    with pytest.raises(ZeroDivisionError), untouched(model):
        model.jit_compile = "changed"
        raise ZeroDivisionError

    assert model.jit_compile != "changed"


def test_random_states_are_kept():
    model = made()
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.random()
    random.seed(1)
    np.random.seed(1)

    with untouched(model):
        random.random()
        np.random.random()

    assert (random.random(), np.random.random()) == expected


def test_there_need_not_be_seeds_of_all_layers():
    keras.utils.clear_session()
    assert global_seed_generator() is None
    keras.random.normal((2,))
    assert isinstance(global_seed_generator(), keras.random.SeedGenerator)
