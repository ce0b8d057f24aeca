import pytest

from memfit.adapters.keras.named import named_job
from memfit.core.errors import BadInput, BadTarget


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
