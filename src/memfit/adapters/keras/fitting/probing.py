"""What a loss does to a batch that is split, found out on numbers of our own.

A loss function of the user's, a loss that a layer adds, or a `compute_loss` may be a mean over samples, a sum over
them, or neither. Their code doesn't say, so they are computed for a small batch and for two unequal parts of it: one
weighting of the parts gives the value for the whole, or none does. The batch that trains isn't touched: in a graph
there are no numbers yet, and random states and metrics must not move.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
from keras import ops

from memfit.adapters.keras.fitting.weights import Kind, Part, share_of

_FIRST, _SECOND = 2, 3
_UNKNOWN_SIZE = 6
_TOLERANCE = 1e-4

Concrete = Callable[[], AbstractContextManager[Any]]


def kind_of_loss(concrete: Concrete, loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> Kind:
    """How the values of a loss for parts of a batch make up that of the batch.

    Args:
        concrete: within it, operations are computed at once.
        loss: a loss of Keras or the user's.
        y: targets, of which only shapes and types count.
        y_pred: predictions, likewise.
        sample_weight: likewise; None: no weights.
    """
    random = np.random.default_rng(0)
    made = [_made(spec, random, low=0.05) for spec in (y, y_pred, sample_weight)]
    with concrete():
        try:
            whole = _number(loss(*_rows(made, slice(None))))
            for kind in (Kind.SAMPLES, Kind.SUM):
                parts = [
                    share_of(loss, Part(size, _FIRST + _SECOND), 0, kind, *_rows(made, rows)) for size, rows in _parts()
                ]
                if _is_equal(whole, sum(map(_number, parts))):
                    return kind
        except Exception:  # whatever the user's own code raises on numbers that aren't theirs
            return Kind.NEITHER
    return Kind.NEITHER


def kinds_of_added(
    concrete: Concrete, model: Any, values: tuple[list[Any], list[Any]], x: Any, training: bool = True
) -> list[Kind]:
    """How the losses that layers add, and regularizers, count; in the order of `model.losses`.

    Args:
        concrete: within it, operations are computed at once.
        model: built.
        values: of its trainable and its other variables.
        x: inputs, of which only shapes and types count.
        training: whether layers are called as in training; random layers then tell nothing.
    """
    made = _made(x, np.random.default_rng(1), low=-1.0)

    def losses(rows: slice) -> list[float]:
        keywords = {"training": training} if model._call_has_training_arg else {}
        found = model.stateless_call(*values, *_rows([made], rows), return_losses=True, **keywords)[2]
        return [_number(model._aggregate_additional_loss(loss)) for loss in found]

    with concrete():
        try:
            whole = losses(slice(None))
            parts = [(size, losses(rows)) for size, rows in _parts()]
        except Exception:  # whatever the user's own code raises on numbers that aren't theirs
            return []
    if any(len(part) != len(whole) for _, part in parts):
        return []
    kinds = [_kind(value, [(size, part[index]) for size, part in parts]) for index, value in enumerate(whole)]
    if Kind.NEITHER in kinds and training:
        return kinds_of_added(concrete, model, values, x, training=False)
    return kinds


def kind_of_step(
    concrete: Concrete, model: Any, values: tuple[list[Any], list[Any]], data: tuple[Any, Any, Any]
) -> Kind:
    """How the values of a `compute_loss` of the user's own count."""
    random = np.random.default_rng(2)
    made = [_made(spec, random, low) for spec, low in zip(data, (-1.0, 0.05, 0.05), strict=True)]
    metrics = [np.zeros(variable.shape, variable.dtype) for variable in model.metrics_variables]

    def loss(rows: slice) -> float:
        x, y, sample_weight = _rows(made, rows)
        keywords = {"training": False} if model._call_has_training_arg else {}
        y_pred, others, added = model.stateless_call(*values, x, return_losses=True, **keywords)
        before, model._losses_override = model._losses_override, list(added)
        try:
            arguments = {"x": x, "y": y, "y_pred": y_pred, "sample_weight": sample_weight, "training": True}
            found, _ = model.stateless_compute_loss(
                values[0], others, list(map(ops.convert_to_tensor, metrics)), **arguments
            )
        finally:
            model._losses_override = before
        return _number(found)

    with concrete():
        try:
            return _kind(loss(slice(None)), [(size, loss(rows)) for size, rows in _parts()])
        except Exception:  # whatever the user's own code raises on numbers that aren't theirs
            return Kind.NEITHER


def _parts() -> list[tuple[int, slice]]:
    return [(_FIRST, slice(0, _FIRST)), (_SECOND, slice(_FIRST, None))]


def _kind(whole: float, parts: list[tuple[int, float]]) -> Kind:
    if _is_equal(whole, sum(size * value for size, value in parts) / (_FIRST + _SECOND)):
        return Kind.SAMPLES
    return Kind.SUM if _is_equal(whole, sum(value for _, value in parts)) else Kind.NEITHER


def _is_equal(found: float, expected: float) -> bool:
    return bool(np.isfinite(found)) and abs(found - expected) <= _TOLERANCE * max(abs(found), abs(expected), 1e-6)


def _number(value: Any) -> float:
    return float(ops.stop_gradient(ops.sum(value)))


def _made(specs: Any, random: np.random.Generator, low: float) -> Any:
    """Arrays of a few samples, of the types and otherwise the shapes of a batch's."""

    def made(spec: Any) -> Any:
        shape = [_FIRST + _SECOND, *(size if size is not None else _UNKNOWN_SIZE for size in spec.shape[1:])]
        dtype = keras.backend.standardize_dtype(spec.dtype)
        if "float" in dtype:
            # float32 would hide a difference of weightings behind rounding where a loss is a large sum.
            return random.uniform(low, 0.95, shape).astype(dtype if dtype in ("float16", "float64") else "float32")
        # Zeros and ones are labels and tokens that every model has, and zeros are masked.
        values = random.integers(0, 2, shape)
        values.flat[0] = 1
        return values.astype(dtype)

    return keras.tree.map_structure(lambda spec: None if spec is None else made(spec), specs)


def _rows(values: list[Any], rows: slice) -> list[Any]:
    def taken(value: Any) -> Any:
        return None if value is None else ops.convert_to_tensor(value[rows])

    return [keras.tree.map_structure(taken, value) for value in values]
