import keras
import numpy as np
import pytest
import torch
from keras import layers

from memfit.core.errors import BadInput, BadModel
from memfit.core.settings import Settings
from memfit.frameworks.keras.apply.fitted import FittedModel, applied, in_words, with_random_numbers, with_statistics


def made(*middle, compiled=True, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([layers.Input((3,)), layers.Dense(4), *middle, layers.Dense(2)])
    if compiled:
        model.compile("adam", "mse", **options)
    return model


def fit(model):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(10, 3)), random.normal(size=(10, 2))
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    return [variable.value.detach().clone() for variable in model.variables]


def test_settings_can_be_changed_and_undone():
    untouched, model = made(), made()
    attributes = set(model.__dict__)
    fitted = FittedModel(Settings(micro_batches=2), model)
    assert fitted.settings == Settings(micro_batches=2)
    fitted.change(Settings(micro_batch_size=1))
    assert (fitted.settings.micro_batch_size, fitted.approximate, fitted.model) == (1, "", model)
    fitted.undo()
    fitted.undo()
    assert (set(model.__dict__), fitted.settings) == (attributes, Settings())
    assert all(torch.equal(a, b) for a, b in zip(fit(model), fit(untouched), strict=True))


def test_a_with_statement_undoes():
    model = made()
    with FittedModel(Settings(micro_batches=2), model):
        assert "train_step" in model.__dict__
    assert "train_step" not in model.__dict__


def test_without_micro_batches_the_step_is_kept():
    model = made()
    FittedModel(Settings(), model)
    assert "train_step" not in model.__dict__


def test_random_layers_are_named_and_allowed():
    fitted = FittedModel(Settings(micro_batches=2), made(layers.Dropout(0.5, name="drop")))
    assert fitted.approximate == "'drop' draw other random numbers than for the whole batch"


def test_statistics_are_refused_until_the_model_is_built_later_too():
    model = keras.Sequential([layers.Dense(4), layers.BatchNormalization(name="norm"), layers.Dense(2)])
    model.compile("adam", "mse")
    with pytest.raises(BadModel, match="without changing what it learns: 'norm'"):
        FittedModel(Settings(micro_batches=2), model)
        fit(model)


class Late(keras.Model):
    def build(self, shape):
        self.norm = layers.BatchNormalization(name="norm")
        self.out = layers.Dense(2)

    def call(self, inputs, training=False):
        return self.out(self.norm(inputs, training=training))


def test_layers_that_are_made_late_are_found_when_the_step_is_run():
    model = Late()
    model.compile("adam", "mse")
    FittedModel(Settings(micro_batches=2), model)
    with pytest.raises(BadModel, match="'norm' keeps statistics of each batch"):
        fit(model)


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


def test_what_has_no_batch_of_keras_is_refused():
    model = OwnStep([layers.Input((3,)), layers.Dense(2)])
    model.compile("adam", "mse")
    with pytest.raises(BadModel, match="OwnStep has a train_step of its own, whose batches can't be split"):
        FittedModel(Settings(micro_batches=2), model)
    FittedModel(Settings(), model)
    with pytest.raises(BadModel, match="isn't compiled"):
        FittedModel(Settings(), made(compiled=False))
    with pytest.raises(BadModel, match=r"a compiled keras.Model was expected, but list was given"):
        FittedModel(Settings(), [])


def test_a_refused_change_leaves_the_model_as_it_was():
    model = made(run_eagerly=True)
    with pytest.raises(BadInput, match="jit_compile=True was asked for, but the model was compiled with run_eagerly"):
        FittedModel(Settings(micro_batches=2, jit_compile=True), model)
    assert "train_step" not in model.__dict__
    assert not model.jit_compile


def test_settings_are_undone_at_the_end(monkeypatch):
    done, model = [], made()

    class FittedModel:
        def __init__(self, settings, given, approximate):
            done.append((settings, given is model, approximate))

        def undo(self):
            done.append("undone")

    monkeypatch.setattr("memfit.frameworks.keras.apply.fitted.FittedModel", FittedModel)

    with applied(model, None, training=True):
        pass
    assert done == []
    with pytest.raises(ZeroDivisionError), applied(model, "settings", training=True):
        raise ZeroDivisionError
    assert done == [("settings", True, True), "undone"]


def model():
    inputs = layers.Input((4, 4))
    hidden = layers.BatchNormalization(name="norm")(inputs)
    frozen = layers.BatchNormalization(name="frozen")
    frozen.trainable = False
    hidden = layers.Dropout(0.5, name="drop")(layers.Dropout(0.0, name="none")(frozen(hidden)))
    return keras.Model(inputs, layers.Dense(1)(layers.LSTM(3, dropout=0.1, name="lstm")(hidden)))


def test_layers_that_keep_statistics_are_those_that_train_them():
    assert with_statistics(model()) == ["norm"]


def test_layers_that_draw_are_those_with_a_rate():
    assert next(iter(with_random_numbers(model()))) == "drop"
    assert "none" not in with_random_numbers(model())


def test_spectral_normalization_changes_its_vector():
    inputs = layers.Input((4,))
    assert with_statistics(keras.Model(inputs, layers.SpectralNormalization(layers.Dense(2), name="sn")(inputs))) == [
        "sn"
    ]


def test_a_long_list_is_cut():
    assert in_words(["a", "b"]) == "'a', 'b'"
    assert in_words(list("abcde")) == "'a', 'b', 'c' and 2 more"
