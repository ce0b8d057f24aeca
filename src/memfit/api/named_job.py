"""`memfit.named_job`: the usual job of a model that is known by its name."""

import importlib.util

from memfit.api.jobs import keras_adapter, torch_adapter
from memfit.core.errors import BadInput, MissingDependency, how_to_install
from memfit.core.job import Job

_PACKAGES = {"hf": "transformers", "timm": "timm", "torchvision": "torchvision"}


def named_job(
    target: str, *, optimizer: str = "adamw", sequence_length: int | None = None, image_size: int | None = None
) -> Job:
    """The usual job of a named model: "timm:resnet50", "torchvision:vgg16", "keras:VGG16", "hf:GPT2LMHeadModel".

    Args:
        target: kind and name of the model.
        optimizer: "none", "sgd", "sgd-momentum", "adam", "adamw", "rmsprop", "adagrad", "adadelta" or "adafactor".
        sequence_length: tokens per sample, for language models.
        image_size: height and width, for vision models.
    """
    for option, value in (("sequence_length", sequence_length), ("image_size", image_size)):
        if value is not None and value < 1:
            raise BadInput(f"{option} must be at least 1, but {value} was given.")
    package = _PACKAGES.get(target.partition(":")[0])
    if package is not None and importlib.util.find_spec("torch") is None:
        raise MissingDependency(
            f"{target!r} is a model of {package}, which is not installed, nor is PyTorch. Install them with "
            f"{how_to_install(package)}."
        )
    adapter = keras_adapter() if target.startswith("keras:") else torch_adapter()
    job: Job = adapter.named_job(target, optimizer, sequence_length, image_size)
    return job
