"""Keras on JAX: the model's own stateless training step, compiled for shapes as `fit` compiles it.

XLA lays out the memory of the whole step ahead of time. Its arguments are the state of the model, which is donated, and
the batch; each leaf of them is a variable whose layer is known.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import keras

from memfit.core.device import Device, Kind
from memfit.core.estimate import Note
from memfit.core.layer_scopes import with_layers
from memfit.core.settings import Settings
from memfit.core.timeline import Category, Timeline
from memfit.core.trace import Trace
from memfit.core.user_code import SourceNames, caller_lines
from memfit.frameworks.jax.trace.compiled import Compiled, compile_step
from memfit.frameworks.jax.trace.job import SIMULATED, explained
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.apply.fitted import applied
from memfit.frameworks.keras.batch import Batch, Spec, mapped
from memfit.frameworks.keras.model import paths_of, trace_of, variables_of
from memfit.frameworks.keras.trace.job import ModelSnapshot

_EAGER = Note("eager", "the model runs eagerly; its step is counted as if it were compiled (jit_compile=True)")


def trace(model: Any, batch: Batch, device: Device, *, training: bool, settings: Settings | None) -> Trace:
    """Compiles the model's own step for the shapes of its state and a batch; see `job.traced`."""
    with applied(model, settings, training=training):
        if training and model.optimizer is not None and not model.optimizer.built:
            before = ModelSnapshot(model.optimizer)
            try:
                with as_shapes():
                    model.optimizer.build(model.trainable_variables)
            except ValueError:
                # Some optimizers, Adafactor for one, make variables from values.
                before.restore()
                model.optimizer.build(model.trainable_variables)
        groups = [model.trainable_variables, model.non_trainable_variables]
        if training:
            groups += [getattr(model.optimizer, "variables", []), model.metrics_variables]
        # The variables as `fit` passes them.
        state = tuple(
            [jax.ShapeDtypeStruct(tuple(v.shape), jax.numpy.dtype(str(v.dtype))) for v in group] for group in groups
        )
        data = mapped(_spec, batch.data)
        internals.leave_shardings(model)
        step = model.train_step

        def predict_step(state: Any, data: Any) -> Any:
            outputs, non_trainable_variables = model.predict_step(state, data)
            return outputs, (state[0], non_trainable_variables)

        if not training:
            step, data = predict_step, (data[0],) if isinstance(data, tuple) else (data,)
        on_gpu = device.kind is Kind.CUDA
        with explained(), internals.layers_as_scopes(jax.named_scope):
            compiled = compile_step(step, (state, data), donate_argnums=(0,), as_on_gpu=on_gpu)
        variables = variables_of(model, training=training)
        by_variable = {id(one.variable): (one.category, one.module) for one in variables}
        known = [by_variable.get(id(variable), (Category.BUFFER, "")) for group in groups for variable in group]
        notes = (_EAGER,) if training and (model.run_eagerly or not model.jit_compile) else ()
        timeline = step_timeline(compiled, paths_of(model), known)
        step = compiled.trace(timeline, (*notes, *SIMULATED) if on_gpu else notes, batch.size_bytes)
        return trace_of(step, variables, model.trainable_variables if training else ())


@contextmanager
def as_shapes() -> Iterator[None]:
    """Variables made while this lasts have shapes and no values."""
    with keras.StatelessScope():
        try:
            yield
        finally:
            # They would get their values at the end of the scope.
            internals.forget_new_variables()


def _spec(spec: Spec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, jax.dtypes.canonicalize_dtype(jax.numpy.dtype(spec.dtype)))


def step_timeline(
    compiled: Compiled,
    layers: Sequence[str],
    known: list[tuple[Category, str]],
    results: list[tuple[Category, str]] | None = None,
) -> Timeline:
    """Every buffer of the program, with layers named as Keras names them.

    `known` says what the first arguments are for, the others are the batch; `results` the same of what the step gives
    back beside what takes an argument's place, None where that is all.
    """

    def describe(number: int) -> tuple[Category, str]:
        return known[number] if number < len(known) else (Category.BATCH, "")

    def describe_result(number: int) -> tuple[Category, str]:
        category, module = (results or known)[number]
        return (Category.TEMPORARY, module) if category is Category.BATCH else (category, module)

    # Lines of whoever asked for the trace are on JAX's stack too, but no part of the step.
    callers, names = caller_lines(), SourceNames()
    made = compiled.timeline(
        describe, None if results is None else describe_result, lambda _, stack: names.innermost(stack, callers)
    )
    return with_layers(made, layers)
