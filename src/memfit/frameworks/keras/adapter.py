"""Keras, on whichever backend, behind the interface that all frameworks share."""

import difflib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import keras

from memfit.core.device import Device
from memfit.core.errors import BadInput, BadTarget
from memfit.core.job import AUTOCASTS, OPTIMIZERS, Job
from memfit.core.plan import Plan
from memfit.core.printing import text_of
from memfit.core.settings import Keeps
from memfit.core.stack import Stack
from memfit.core.step_facts import StepFacts
from memfit.frameworks.keras.trace.job import OpenModel
from memfit.frameworks.torch.stack import installed_stack

if TYPE_CHECKING:
    from memfit.frameworks.keras.guard.loop import KerasLoop

name = "keras"
title = "Keras"


def stack() -> Stack | None:
    """The versions of PyTorch and its libraries where Keras runs on PyTorch; None elsewhere."""
    return installed_stack() if keras.backend.backend() == "torch" else None


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


def open_job(job: Job, device: Device, batch_size: int | None = None) -> OpenModel:
    """The job, checked and ready to be traced, at its own batch size or the given one."""
    return OpenModel(job, device, batch_size)


def planned_job(job: Job, precision: str) -> Job:
    """The job with the mixed precision that must be used."""
    if precision not in ("keep", "auto", *AUTOCASTS):
        raise BadInput(
            f"a Keras model can be planned with precision keep, auto, {' or '.join(AUTOCASTS)}, but {precision!r} was "
            "given. Its own dtype comes from the policy that it was made under."
        )
    forced = precision if precision in AUTOCASTS else job.precision
    return replace(job, precision=forced if forced in AUTOCASTS else None)


def planning(tracer: OpenModel, target: Device) -> StepFacts:
    """What can be split and recomputed, and how fast the model is."""
    from memfit.frameworks.keras.trace.planning import facts_of

    return facts_of(tracer.model, tracer.batch, target)


def apply(plan: Plan, model: Any, optimizer: Any) -> Any:
    """A compiled model, run as a plan says."""
    from memfit.frameworks.keras.apply.fitted import FittedModel

    # Whoever planned has allowed it.
    approximate = any(move.name == "micro-batch" and move.keeps is Keeps.CHANGES for move in plan.moves)
    return FittedModel(plan.settings, model, approximate=approximate)


def named_job(name: str, optimizer: str, sequence_length: int | None = None, image_size: int | None = None) -> Job:
    """The usual job of a model of keras.applications, "keras:ResNet50": sparse cross entropy over its classes."""
    name = name.removeprefix("keras:")
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
        size = f"{image_size} x {image_size}"
        raise BadInput(f"keras:{name} can't be made for images of {size}: {text_of(error)}") from None


def guarded_loop(*subject: Any, **options: Any) -> "KerasLoop":
    """The training loop of a compiled model; see `KerasLoop`."""
    from memfit.frameworks.keras.guard.loop import KerasLoop

    return KerasLoop(*subject, **options)
