"""Keras on TensorFlow: the model's own training step, traced into a graph as `fit` traces it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import tensorflow as tf

from memfit.core.device import Device, Kind
from memfit.core.errors import MemfitError, StepFailed
from memfit.core.estimate import Note
from memfit.core.printing import text_of
from memfit.core.settings import Settings
from memfit.core.trace import Trace
from memfit.core.user_code import user_line
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.apply.fitted import applied
from memfit.frameworks.keras.batch import Batch, mapped
from memfit.frameworks.keras.model import has_own_step, optimizers_of, paths_of, trace_of, variables_of
from memfit.frameworks.tensorflow.trace.tracing import StepVariable, XlaRefused, trace_step

_ASSUMED = Note(
    "jit-assumed",
    "on a machine with a GPU Keras compiles the step with XLA unless compile() has jit_compile=False; this machine has "
    "none, so that Keras didn't: XLA is assumed",
)
_REFUSED = Note("jit-refused", "XLA can't compile the step here, as Keras would on a GPU: it is counted as a graph")
_EAGER = Note("eager", "the model runs eagerly; its step is counted as a graph (run_eagerly=False)")


def trace(model: Any, batch: Batch, device: Device, *, training: bool, settings: Settings | None) -> Trace:
    """Traces the model's own step for the shapes of a batch; see `job.traced`."""
    given: dict[str, Any] = {"training": training, "settings": settings}
    if not compiles_on(model, device, settings):
        return _trace(model, batch, device, **given)
    model.jit_compile = True
    try:
        made, note = _trace(model, batch, device, **given), _ASSUMED
    except XlaRefused:
        model.jit_compile = False
        made, note = _trace(model, batch, device, **given), _REFUSED
    return replace(made, notes=(*made.notes, note))


def compiles_on(model: Any, device: Device, settings: Settings | None) -> bool:
    """Whether Keras would have the step compiled on the device, other than here: it looks for a GPU in `compile`."""
    if device.kind is not Kind.CUDA or model.jit_compile or model.run_eagerly:
        return False
    if settings is not None and settings.jit_compile is not None:
        return False
    if tf.config.list_physical_devices("GPU") or getattr(model, "_distribute_strategy", None):
        return False
    return bool(internals.model_supports_jit(model))


def _trace(model: Any, batch: Batch, device: Device, *, training: bool, settings: Settings | None) -> Trace:
    with applied(model, settings, training=training):
        # A step of the model's own makes the variables of the optimizers that it really uses, as in `fit`.
        if training and not has_own_step(model) and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        data = mapped(lambda spec: tf.TensorSpec(spec.shape, spec.dtype), batch.data)
        step = model.train_step
        if not training:
            step, data = model.predict_step, (data[0],) if isinstance(data, tuple) else (data,)
        jit_compile = model.jit_compile is True
        # Its own function, as `fit` has one: what is bound to an instance is traced for each anew.
        plain = tf.autograph.experimental.do_not_convert(lambda data: step(data))
        with _explained():
            function = tf.function(plain, jit_compile=jit_compile).get_concrete_function(data)
        variables = variables_of(model, training=training)
        traced = trace_step(
            function,
            [StepVariable(internals.tensor_of(one.variable), one.category, one.module) for one in variables],
            jit_compile=jit_compile,
            on_gpu=device.kind is Kind.CUDA,
            optimizers=[str(optimizer.name) for optimizer in optimizers_of(model)] if training else (),
            layers=paths_of(model),
        )
        if training and model.run_eagerly:
            traced = replace(traced, notes=(*traced.notes, _EAGER))
        trained = model.trainable_variables if training else ()
        return trace_of(replace(traced, batch_bytes=batch.size_bytes), variables, trained)


@contextmanager
def _explained() -> Iterator[None]:
    """Turns any exception of the step into `StepFailed` with the line that raised it."""
    try:
        yield
    except MemfitError:
        raise
    except Exception as error:
        what = f"{user_line(error)[0]}: {type(error).__name__}: {text_of(error)}"
        raise StepFailed(f"the step failed as TensorFlow traced it{what}") from error
