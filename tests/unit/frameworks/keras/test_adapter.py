"""The planner against a model on the backend of this process; integration/test_plan_keras.py has all of them."""

import json
import os

import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

import memfit
from memfit import BadInput, PlanNotFound
from memfit.commands import main
from memfit.core.errors import BadTarget
from memfit.core.settings import Keeps
from memfit.frameworks.keras.adapter import named_job

layers = keras.layers


def make(*more):
    inputs = keras.Input((32,))
    x = inputs
    for number in range(3):
        x = layers.Dense(128, activation="gelu", name=f"wide{number}")(x)
    for layer in more:
        x = layer(x)
    model = keras.Model(inputs, layers.Dense(2)(x), name="net")
    model.compile("adam", "mse")
    return model, (np.zeros((4096, 32), "float32"), np.zeros((4096, 2), "float32"))


def plan(model, batch, budget, **options):
    options = {"allow": ["exact", "rounding", "-checkpoint"], "options": memfit.PlanOptions(measure=False), **options}
    return memfit.plan(model, batch=batch, device="cpu", budget=budget, **options)


def test_micro_batches_make_a_model_fit_and_can_be_applied():
    model, batch = make()
    whole = memfit.estimate(model, batch=batch, device="cpu").peak_bytes
    found = plan(model, batch, whole * 6 // 10)
    assert found.fits and found.settings.micro_batches > 1 and found.settings.micro_batch_size < 4096
    assert found.keeps is Keeps.ROUNDING and found.framework == f"keras:{keras.backend.backend()}"
    assert found.seconds_after.seconds is None
    assert "MicroBatched" in found.code() and "micro-batches" in str(found)
    assert model.train_function is None
    with found.apply(model) as fitted:
        assert fitted.settings == found.settings
        assert np.isfinite(float(model.train_on_batch(*batch)))


def test_what_fits_is_left_alone():
    model, batch = make()
    found = plan(model, batch, "1GiB")
    assert not found.moves and found.code().startswith("# The step fits as it is")


def test_batch_norm_is_split_only_where_that_is_allowed():
    model, batch = make(layers.BatchNormalization(name="norm"))
    whole = memfit.estimate(model, batch=batch, device="cpu").peak_bytes
    with pytest.raises(PlanNotFound, match=r"Try to allow approximate \(micro-batch\)") as refused:
        plan(model, batch, whole * 8 // 10)
    assert any("'norm'" in one.reason for one in refused.value.smallest.refused)
    found = plan(model, batch, whole * 8 // 10, allow=["rounding", "approximate"])
    assert found.moves[0].keeps is Keeps.CHANGES and "'norm'" in found.moves[0].caveat
    with found.apply(model):
        assert np.isfinite(float(model.train_on_batch(*batch)))


class Reconstruction(keras.Model):
    """Two parts that only its own step puts together, as in Keras's examples; on PyTorch."""

    def __init__(self):
        super().__init__(name="reconstruction")
        self.parts = [layers.Dense(256), layers.Dense(32)]
        self.parts[0].build((None, 32))
        self.parts[1].build((None, 256))

    def train_step(self, data):
        loss = keras.ops.mean(keras.ops.square(self.parts[1](self.parts[0](data[0])) - data[0]))
        self.zero_grad()
        loss.backward()
        self.optimizer.apply([v.value.grad for v in self.trainable_variables], self.trainable_variables)
        return {"loss": loss}


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="the step is PyTorch's")
def test_a_model_without_call_is_left_as_it_is_or_refused_with_its_reason():
    # GIVEN a model whose training step is its own, and which has no call()
    model = Reconstruction()
    model.compile("adam")
    batch = (np.zeros((4096, 32), "float32"),)
    whole = memfit.estimate(model, batch=batch, device="cpu").peak_bytes

    # WHEN what it needs is there, THEN nothing changes
    assert plan(model, batch, 2 * whole).settings.micro_batches == 1

    # WHEN it isn't, THEN it is said why its batch can't be split
    with pytest.raises(PlanNotFound, match=r"(?s)no plan fits `reconstruction`.*train_step of its own"):
        plan(model, batch, whole * 9 // 10)


def test_an_effective_batch_replaces_the_size():
    model, batch = make()
    assert plan(model, batch, "1GiB", options=memfit.PlanOptions(effective_batch=64)).batch_size == 64


@pytest.mark.parametrize(("text", "options"), [("keep, auto, amp-fp16 or amp-bf16, but 'fp16'", {"precision": "fp16"})])
def test_bad_input_is_told(text, options):
    model, batch = make()
    with pytest.raises(BadInput, match=text):
        plan(model, batch, "1GiB", **options)


def test_a_model_is_made_with_its_optimizer_and_batches():
    job = named_job("MobileNetV2", "sgd-momentum", image_size=32)

    assert job.name == "keras:MobileNetV2 (32 x 32 pixels)"
    assert type(job.model.optimizer).__name__ == "SGD"
    assert job.model.optimizer.momentum == 0.9
    x, y = job.batch(3)
    assert (tuple(x.shape), tuple(y.shape), y.dtype) == ((3, 32, 32, 3), (3,), "int32")
    assert job.loss is None


@pytest.mark.parametrize(
    ("name", "options", "error", "text"),
    [
        ("resnet50", {}, BadTarget, "keras.applications has no model 'resnet50'. Did you mean ResNet50"),
        ("Zzzz", {}, BadTarget, "keras.applications has no model 'Zzzz'. It has .*ResNet50"),
        ("ResNet50", {"optimizer": "adagard"}, BadInput, "optimizer must be one of none, sgd"),
        ("ResNet50", {"optimizer": "none"}, BadInput, "optimizer 'none' was given, but a Keras model trains with one"),
        ("MobileNetV2", {"image_size": 8}, BadInput, "keras:MobileNetV2 can't be made for images of 8 x 8: .*32"),
    ],
)
def test_what_has_no_model_is_refused(name, options, error, text):
    with pytest.raises(error, match=text):
        named_job(name, **{"optimizer": "adam", **options})


def test_the_command_takes_names_of_applications(capsys):
    options = ["-b", "2", "-d", "t4", "--image-size", "32", "--optimizer", "sgd-momentum", "--json"]

    assert main(["estimate", "keras:MobileNetV2", *options]) == 0

    found = json.loads(capsys.readouterr().out)
    assert (found["subject"], found["batch_size"]) == ("keras:MobileNetV2 (32 x 32 pixels)", 2)


def test_the_command_refuses_names_that_are_none(capsys):
    assert main(["estimate", "keras:MobileNetV9", "-d", "t4"]) == 2

    assert "keras.applications has no model 'MobileNetV9'. Did you mean MobileNet" in capsys.readouterr().err
