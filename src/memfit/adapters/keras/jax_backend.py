"""Keras on JAX: the model's own stateless training step, compiled for shapes as `fit` compiles it.

XLA lays out the memory of the whole step ahead of time. Its arguments are the state of the model, which is donated, and
the batch; each leaf of them is a variable whose layer is known.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from traceback import walk_stack
from typing import Any

import jax
import keras

# Not exported: variables that were made where their values can't be, and wait for them.
from keras.src.backend.common import global_state

from memfit.adapters.jax.compiled import Compiled, compile_step
from memfit.adapters.jax.job import SIMULATED
from memfit.adapters.keras.batch import Batch, mapped
from memfit.adapters.keras.model import Held, LayerNames, build, fitted, held, number_of, state_bytes
from memfit.adapters.keras.untouched import Snapshot, untouched
from memfit.core.device import Device, Kind
from memfit.core.errors import MemfitError, StepFailed
from memfit.core.estimate import Note
from memfit.core.settings import Settings
from memfit.core.timeline import Block, Category, Phase, Timeline
from memfit.core.trace import Serving, Trace

_EAGER = Note("eager", "the model runs eagerly; its step is counted as if it were compiled (jit_compile=True)")
_UNINITIALIZED = "uninitialized_variables"


def trace(model: Any, batch: Batch, device: Device, *, training: bool, settings: Settings | None = None) -> Trace:
    """Compiles the model's own step for the shapes of its state and a batch.

    Args:
        model: compiled, where it is to be trained.
        batch: its shapes.
        device: the target.
        training: `train_step` rather than `predict_step`.
        settings: how the step is run; None: as it is.
    """
    with untouched(model):
        build(model, batch, training=training)
        with fitted(model, settings, training=training):
            if training and model.optimizer is not None and not model.optimizer.built:
                _build_optimizer(model)
            return _trace(model, batch, device, training=training)


def _trace(model: Any, batch: Batch, device: Device, *, training: bool) -> Trace:
    variables = held(model, training=training)
    state = _state(model, training=training)
    data = mapped(_spec, batch.data)
    on_gpu = device.kind is Kind.CUDA
    try:
        if training:
            compiled = compile_step(model.train_step, (state, data), donate_argnums=(0,), as_on_gpu=on_gpu)
        else:
            compiled = compile_step(_prediction(model), (state, _x(data)), donate_argnums=(0,), as_on_gpu=on_gpu)
    except MemfitError:
        raise
    except Exception as error:
        text = " ".join(str(error).split()) or "no message"
        raise StepFailed(f"the step failed while JAX traced it: {type(error).__name__}: {text}") from error
    sizes = state_bytes(model, variables, training=training)
    parameters = [one for one in variables if one.category is Category.PARAMETER]
    notes = (_EAGER,) if training and (model.run_eagerly or not model.jit_compile) else ()
    return Trace(
        step_timeline(compiled, LayerNames(model), _described(model, variables, training=training)),
        (*notes, *SIMULATED) if on_gpu else notes,
        sum(number_of(one.variable) for one in parameters),
        sizes.get(Category.PARAMETER, 0),
        batch.size_bytes,
        serving=Serving.BEST_FIT,
        assigned_bytes=compiled.assigned_bytes,
        spread=compiled.spread,
        state_bytes=sizes,
    )


def _build_optimizer(model: Any) -> None:
    """Makes the optimizer's variables, without memory for them where that can be."""
    before = Snapshot(model.optimizer)
    try:
        with as_shapes():
            model.optimizer.build(model.trainable_variables)
    except ValueError:
        # Some optimizers, Adafactor for one, make variables from values.
        before.restore()
        model.optimizer.build(model.trainable_variables)


@contextmanager
def as_shapes() -> Iterator[None]:
    """Variables made while this lasts have shapes and no values."""
    with keras.StatelessScope():
        try:
            yield
        finally:
            waiting = global_state.get_global_attribute(_UNINITIALIZED)
            if waiting is not None:
                # They would get their values at the end of the scope.
                waiting.clear()


def _state(model: Any, *, training: bool) -> tuple[list[Any], ...]:
    """The variables as `fit` passes them, as shapes."""
    return tuple([_variable_spec(variable) for variable in group] for group in _groups(model, training=training))


def _groups(model: Any, *, training: bool) -> list[list[Any]]:
    groups = [model.trainable_variables, model.non_trainable_variables]
    if training:
        groups += [getattr(model.optimizer, "variables", []), model.metrics_variables]
    return groups


def _variable_spec(variable: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(variable.shape), jax.numpy.dtype(str(variable.dtype)))


def _spec(spec: Any) -> Any:
    if spec is None:
        return None
    return jax.ShapeDtypeStruct(spec.shape, jax.dtypes.canonicalize_dtype(jax.numpy.dtype(spec.dtype)))


def _x(data: Any) -> tuple[Any]:
    return (data[0],) if isinstance(data, tuple) else (data,)


def _prediction(model: Any) -> Any:
    def predict_step(state: Any, data: Any) -> Any:
        outputs, non_trainable_variables = model.predict_step(state, data)
        return outputs, (state[0], non_trainable_variables)

    return predict_step


def _described(model: Any, variables: list[Held], *, training: bool) -> list[tuple[Category, str]]:
    """What each leaf of the state is for, and its layer."""
    by_variable = {id(one.variable): (one.category, one.module) for one in variables}
    known = [variable for group in _groups(model, training=training) for variable in group]
    return [by_variable.get(id(variable), (Category.BUFFER, "")) for variable in known]


def step_timeline(
    compiled: Compiled,
    layers: LayerNames,
    known: list[tuple[Category, str]],
    results: list[tuple[Category, str]] | None = None,
) -> Timeline:
    """Every buffer of the program, with layers named as Keras names them.

    Args:
        compiled: the step.
        layers: of its models.
        known: what the first arguments are for, and their layers; the others are the batch.
        results: the same of what the step gives back beside what takes an argument's place; None where that is all.
    """

    def describe(number: int) -> tuple[Category, str]:
        return known[number] if number < len(known) else (Category.BATCH, "")

    def describe_result(number: int) -> tuple[Category, str]:
        category, module = (results or known)[number]
        return (Category.TEMPORARY, module) if category is Category.BATCH else (category, module)

    made = compiled.timeline(describe, None if results is None else describe_result)
    callers = _callers()
    named = {module for _, module in (*known, *(results or ()))}

    def own(block: Block) -> Block:
        source = "" if any(_is_line(block.source, caller) for caller in callers) else block.source
        module = block.module if block.phase is Phase.SETUP or block.module in named else layers.of(block.module)
        return replace(block, module=module, source=source)

    return Timeline(tuple(map(own, made.blocks)), made.num_ticks, made.marks)


def _callers() -> list[tuple[str, int]]:
    """(file, line) of whoever asked for the trace: their lines are on JAX's stack too, but no part of the step."""
    return [(frame.f_code.co_filename, line) for frame, line in walk_stack(None)]


def _is_line(source: str, caller: tuple[str, int]) -> bool:
    name, _, line = source.rpartition(":")
    return bool(name) and line == str(caller[1]) and caller[0].endswith(name)
