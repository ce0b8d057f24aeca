"""Jobs from names: `keras:ResNet50`, any model of keras.applications, with new weights and made-up batches."""

import difflib
from collections.abc import Callable
from typing import Any

import keras

from memfit.core.errors import BadInput, BadTarget
from memfit.core.job import OPTIMIZERS, Job

_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "sgd-momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": keras.optimizers.Adam,
    "adamw": keras.optimizers.AdamW,
    "rmsprop": keras.optimizers.RMSprop,
    "adagrad": keras.optimizers.Adagrad,
    "adadelta": keras.optimizers.Adadelta,
    "adafactor": keras.optimizers.Adafactor,
}


def named_job(name: str, optimizer: str, image_size: int | None = None) -> Job:
    """The usual training job of a model of keras.applications: sparse cross entropy over its classes."""
    if optimizer not in OPTIMIZERS:
        raise BadInput(f"optimizer must be one of {', '.join(OPTIMIZERS)}, but {optimizer!r} was given.")
    if optimizer not in _OPTIMIZERS:
        raise BadInput(
            f"optimizer {optimizer!r} was given, but a Keras model trains with one. "
            f"Give one of {', '.join(_OPTIMIZERS)}."
        )
    model = _model(name, image_size)
    model.compile(optimizer=_OPTIMIZERS[optimizer](), loss="sparse_categorical_crossentropy")
    _, *sample = model.inputs[0].shape
    height, width = sample[:2] if keras.config.image_data_format() == "channels_last" else sample[1:]
    return Job(
        model,
        batch=lambda count: (keras.KerasTensor((count, *sample)), keras.KerasTensor((count,), "int32")),
        name=f"keras:{name} ({height} x {width} pixels)",
    )


def _model(name: str, image_size: int | None) -> Any:
    known = [key for key, value in vars(keras.applications).items() if key[:1].isupper() and callable(value)]
    if name not in known:
        lower = {key.lower(): key for key in known}
        close = [lower[key] for key in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.5)]
        hint = f" Did you mean {', '.join(close)}?" if close else f" It has {', '.join(known)}."
        raise BadTarget(f"keras.applications has no model {name!r}.{hint}")
    make = getattr(keras.applications, name)
    if image_size is None:
        return make(weights=None)
    channels_last = keras.config.image_data_format() == "channels_last"
    shape = (image_size, image_size, 3) if channels_last else (3, image_size, image_size)
    try:
        return make(weights=None, input_shape=shape)
    except ValueError as error:
        text = " ".join(str(error).split())
        raise BadInput(f"keras:{name} can't be made for images of {image_size} x {image_size}: {text}") from None
