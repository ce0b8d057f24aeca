import keras
import numpy as np

from memfit.catalogue import find_device
from memfit.frameworks.keras.batch import read
from memfit.frameworks.keras.trace.planning import facts_of, loop_factor, time_forward

layers = keras.layers
GPU = find_device("t4")


def make(*middle, **options):
    model = keras.Sequential([keras.Input((8,)), layers.Dense(16, activation="relu"), *middle, layers.Dense(2)])
    model.compile("adam", "mse", **options)
    return model, read((np.zeros((6, 8), "float32"), np.zeros((6, 2), "float32")))


def values(model):
    return [keras.ops.convert_to_tensor(variable).tolist() for variable in model.variables]


def test_a_plain_model_can_be_split():
    found = facts_of(*make(), GPU)
    assert (found.not_split, found.approximate, found.draws_random_numbers) == ("", "", False)


def test_statistics_and_random_numbers_are_told():
    found = facts_of(*make(layers.BatchNormalization(name="norm"), layers.Dropout(0.5)), GPU)
    assert "'norm'" in found.approximate and found.draws_random_numbers and not found.not_split


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        return {}


def test_a_train_step_of_its_own_is_refused():
    model = OwnStep()
    model.compile("adam", "mse")
    batch = read((np.zeros((6, 8), "float32"), np.zeros((6, 2), "float32")))
    assert "train_step of its own" in facts_of(model, batch, GPU).not_split
    assert not model.dense.built, "the model was left built"


def test_parts_that_can_be_recomputed_come_in_order():
    found = facts_of(*make(*(layers.Dense(64, activation="gelu", name=f"wide{n}") for n in range(4))), GPU)
    assert bool(found.parts) is not bool(found.not_recomputed)
    assert all(part.kept_bytes > 0 and ("wide" in part.path or "dense" in part.path) for part in found.parts)


def test_the_forward_pass_is_timed_and_the_model_left_as_it_was():
    model, batch = make(layers.Dropout(0.5))
    weights = values(model)
    sample, call = time_forward(model, batch)
    assert sample > 0 and call >= 0
    assert model.predict_function is None
    assert weights == values(model)


def test_a_model_that_fails_has_no_time(monkeypatch):
    def fail(x):
        raise RuntimeError("not today")

    model, batch = make()
    monkeypatch.setattr(model, "predict_on_batch", fail)
    assert time_forward(model, batch) is None


def test_convolutions_in_loops_are_slow_on_the_host_with_jax(monkeypatch):
    model, _ = make(layers.Reshape((8, 2)), layers.Conv1D(2, 2), layers.Flatten())
    plain, _ = make()
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    assert loop_factor(model, on_host=True) > 10
    assert loop_factor(model, on_host=False) == loop_factor(plain, on_host=True) == 1
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    assert loop_factor(model, on_host=True) == 1
