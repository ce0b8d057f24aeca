import random

import keras
import numpy as np
import pytest

from memfit.catalogue import find_device
from memfit.core.errors import BadBatch, BadInput, BadModel
from memfit.core.job import Job
from memfit.core.settings import Settings
from memfit.frameworks.keras.internals import global_seed_generator
from memfit.frameworks.keras.trace import job as jobs
from memfit.frameworks.keras.trace.job import OpenModel, restoring

layers = keras.layers
CPU = find_device("cpu")


@pytest.fixture
def model():
    made = keras.Sequential([keras.Input((8,)), layers.Dense(2)], name="small")
    made.compile("adam", "mse")
    return made


@pytest.fixture
def asked(monkeypatch):
    """What the backend is asked to trace."""
    calls = []

    class Backend:
        @staticmethod
        def trace(model, batch, device, *, training, settings):
            calls.append((batch, training, settings))
            return "traced"

    monkeypatch.setattr(jobs, "build", lambda model, batch, training: None)
    monkeypatch.setattr(jobs, "import_module", lambda name: Backend if name.endswith("_backend") else None)
    return calls


def batch(samples=4):
    return np.zeros((samples, 8), "float32"), np.zeros((samples, 2), "float32")


def test_a_model_is_traced_at_any_batch_size(model, asked):
    opened = OpenModel(Job(model, None, batch()), CPU)

    assert (opened.name, opened.batch_size, opened.notes) == ("small", 4, ())
    assert opened.trace(None) == "traced"
    opened.trace(16)
    assert [call[0].batch_size for call in asked] == [4, 16]
    assert asked[0][1:] == (True, None)
    assert OpenModel(Job(model, None, batch(), name="mine"), CPU, 32).batch_size == 32


def test_x_alone_is_a_batch(model, asked):
    OpenModel(Job(model, None, batch()[0]), CPU).trace(2)

    assert [spec.shape for spec in asked[0][0].data] == [(2, 8)]


def test_predictions_need_no_loss(asked):
    plain = keras.Sequential([keras.Input((8,)), layers.Dense(2)])

    OpenModel(Job(plain, None, batch()[0], mode="inference"), CPU).trace(None)

    assert asked[0][1] is False


def test_precision_is_a_setting(model, asked):
    opened = OpenModel(Job(model, None, batch(), precision="amp-bf16"), CPU)

    opened.trace(None)
    opened.trace(None, Settings(micro_batches=2))
    opened.trace(None, Settings(precision="amp-fp16"))

    assert [call[2] for call in asked] == [
        Settings(precision="amp-bf16"),
        Settings(micro_batches=2, precision="amp-bf16"),
        Settings(precision="amp-fp16"),
    ]
    OpenModel(Job(model, None, batch(), precision="fp32"), CPU).trace(None)
    assert asked[-1][2] is None


def test_what_a_policy_decides_is_no_precision(model):
    with pytest.raises(BadInput, match="precision='fp16' was given, but a Keras model has its own dtype policy"):
        OpenModel(Job(model, None, batch(), precision="fp16"), CPU)


def test_the_optimizer_comes_from_compile(model):
    with pytest.raises(BadInput, match="a Keras model brings its optimizer from compile"):
        OpenModel(Job(model, None, batch(), optimizer="adam"), CPU)


def test_what_cannot_be_traced_is_refused(model):
    with pytest.raises(BadModel, match="isn't compiled"):
        OpenModel(Job(keras.Sequential([keras.Input((8,)), layers.Dense(2)]), None, batch()), CPU)
    with pytest.raises(BadBatch, match="a batch is missing"):
        OpenModel(Job(model, None, None), CPU)
    with pytest.raises(BadBatch, match=r"\(batch, 8\), but \(4, 7\) was given"):
        OpenModel(Job(model, None, (np.zeros((4, 7)), np.zeros((4, 2)))), CPU)
    with pytest.raises(BadBatch, match="at least 1, but 0"):
        OpenModel(Job(model, None, batch()), CPU, 0)


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
    with restoring(model):
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
    with pytest.raises(ZeroDivisionError), restoring(model):
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

    with restoring(model):
        random.random()
        np.random.random()

    assert (random.random(), np.random.random()) == expected


def test_there_need_not_be_seeds_of_all_layers():
    keras.utils.clear_session()
    assert global_seed_generator() is None
    keras.random.normal((2,))
    assert isinstance(global_seed_generator(), keras.random.SeedGenerator)
