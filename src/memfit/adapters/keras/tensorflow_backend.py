"""Keras on TensorFlow: the model's own training step, traced into a graph as `fit` traces it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tensorflow as tf
from keras.src.trainers.trainer import model_supports_jit

from memfit.adapters.keras.batch import Batch, mapped
from memfit.adapters.keras.model import (
    Held,
    LayerNames,
    build,
    fitted,
    has_own_step,
    held,
    number_of,
    optimizers_of,
    state_bytes,
)
from memfit.adapters.keras.untouched import untouched
from memfit.adapters.tensorflow.tracing import StepVariable, XlaRefused, trace_step
from memfit.core.device import Device, Kind
from memfit.core.errors import MemfitError, StepFailed
from memfit.core.estimate import Note
from memfit.core.settings import Settings
from memfit.core.timeline import Category
from memfit.core.trace import Serving, Trace

_ASSUMED = Note(
    "jit-assumed",
    "on a machine with a GPU Keras compiles the step with XLA unless compile() has jit_compile=False; this machine has "
    "none, so that Keras didn't: XLA is assumed",
)
_REFUSED = Note("jit-refused", "XLA can't compile the step here, as Keras would on a GPU: it is counted as a graph")
_EAGER = Note("eager", "the model runs eagerly; its step is counted as a graph (run_eagerly=False)")


def trace(model: Any, batch: Batch, device: Device, *, training: bool, settings: Settings | None = None) -> Trace:
    """Traces the model's own step for the shapes of a batch.

    Args:
        model: compiled, where it is to be trained.
        batch: its shapes.
        device: the target.
        training: `train_step` rather than `predict_step`.
        settings: how the step is run; None: as it is.
    """
    if not compiles_on(model, device, settings):
        return _traced(model, batch, device, training=training, settings=settings)
    model.jit_compile = True
    try:
        traced = _traced(model, batch, device, training=training, settings=settings)
        return replace(traced, notes=(*traced.notes, _ASSUMED))
    except XlaRefused:
        model.jit_compile = False
        traced = _traced(model, batch, device, training=training, settings=settings)
        return replace(traced, notes=(*traced.notes, _REFUSED))
    finally:
        model.jit_compile = False


def compiles_on(model: Any, device: Device, settings: Settings | None) -> bool:
    """Whether Keras would have the step compiled on the device, other than here: it looks for a GPU in `compile`.

    Args:
        model: compiled.
        device: the target.
        settings: how the step is run; None: as it is.
    """
    if device.kind is not Kind.CUDA or model.jit_compile or model.run_eagerly:
        return False
    if settings is not None and settings.jit_compile is not None:
        return False
    if tf.config.list_physical_devices("GPU") or getattr(model, "_distribute_strategy", None):
        return False
    return bool(model_supports_jit(model))


def _traced(model: Any, batch: Batch, device: Device, *, training: bool, settings: Settings | None) -> Trace:
    # Its step makes the variables of the optimizers that it really uses, as in `fit`.
    builds_itself = not training or has_own_step(model)
    with untouched(model):
        build(model, batch, training=training)
        with fitted(model, settings, training=training):
            if not builds_itself and not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            return _trace(model, batch, device, training=training)


def _trace(model: Any, batch: Batch, device: Device, *, training: bool) -> Trace:
    data = mapped(_spec, batch.data)
    jit_compile = model.jit_compile is True
    if training:
        function = _concrete(model.train_step, data, jit_compile=jit_compile)
    else:
        data = (data[0],) if isinstance(data, tuple) else (data,)
        function = _concrete(model.predict_step, data, jit_compile=jit_compile)
    variables = held(model, training=training)
    traced = trace_step(
        function,
        [StepVariable(_handle(one), one.category, one.module) for one in variables],
        jit_compile=jit_compile,
        on_gpu=device.kind is Kind.CUDA,
        optimizers=[str(optimizer.name) for optimizer in optimizers_of(model)] if training else (),
        layers=LayerNames(model).paths,
    )
    sizes = state_bytes(model, variables, training=training)
    parameters = [one for one in variables if one.category is Category.PARAMETER]
    return Trace(
        traced.timeline,
        (*traced.notes, _EAGER) if training and model.run_eagerly else traced.notes,
        sum(number_of(one.variable) for one in parameters),
        sizes.get(Category.PARAMETER, 0),
        batch.size_bytes,
        serving=Serving.BEST_FIT,
        assigned_bytes=traced.assigned_bytes,
        state_bytes=sizes,
        spread=traced.spread,
    )


def _concrete(step: Callable[[Any], Any], data: Any, *, jit_compile: bool) -> Any:
    """The graph of a step."""

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def one_step_on_data(data: Any) -> Any:
        return step(data)

    try:
        function = tf.function(one_step_on_data, jit_compile=jit_compile)
        return function.get_concrete_function(data)
    except MemfitError:
        raise
    except Exception as error:
        text = " ".join(str(error).split()) or "no message"
        raise StepFailed(f"the step failed while TensorFlow traced it: {type(error).__name__}: {text}") from error


def _spec(spec: Any) -> Any:
    return None if spec is None else tf.TensorSpec(spec.shape, tf.as_dtype(spec.dtype))


def _handle(one: Held) -> Any:
    """The variable of TensorFlow inside of one of Keras."""
    return one.variable._value
