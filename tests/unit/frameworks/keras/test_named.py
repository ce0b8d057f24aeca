import json

import pytest

from memfit.commands import main
from memfit.core.errors import BadInput, BadTarget
from memfit.frameworks.keras.named import named_job


def test_a_model_is_made_with_its_optimizer_and_batches():
    job = named_job("MobileNetV2", "sgd-momentum", 32)

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
