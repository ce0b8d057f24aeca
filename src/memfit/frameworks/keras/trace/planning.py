"""What a plan asks of a Keras model before it searches: what can be split and recomputed, and how fast it is."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from memfit.core.errors import MemfitError
from memfit.core.step_facts import Part
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.apply.fitted import check_split, listed, with_random_numbers, with_statistics
from memfit.frameworks.keras.apply.units import units
from memfit.frameworks.keras.batch import Batch, Spec, mapped
from memfit.frameworks.keras.model import build
from memfit.frameworks.keras.trace.restoration import untouched

_TIMED_SAMPLES = 8
_NUM_TIMED = 3
# XLA for CPU has no library compute convolutions inside of a loop: they took 20 times as long.
_SLOW_CONVOLUTIONS = 20.0


@dataclass(frozen=True, slots=True)
class Splitting:
    """What micro-batches do to a model."""

    refused: str  # why batches can't be split, or ""
    approximate: str  # why the parts only approximate the batch, or ""
    random: bool  # layers draw random numbers, which are others for parts


def splitting(model: Any, batch: Batch) -> Splitting:
    """What micro-batches do to a compiled model."""
    with untouched(model):
        # Layers of a model that was never called aren't there yet.
        build(model, batch, training=True)
        try:
            check_split(model, approximate=True)
        except MemfitError as error:
            return Splitting(str(error), "", False)
        statistics = with_statistics(model)
        words = f"{listed(statistics)} use the statistics of each micro-batch" if statistics else ""
        return Splitting("", words, bool(with_random_numbers(model)))


def recomputable(model: Any, batch: Batch) -> tuple[tuple[Part, ...], str]:
    """(parts that can be computed again in order of execution, why there are none or "")."""
    with untouched(model):
        build(model, batch, training=True)
        try:
            found = units(model, batch.x)
        except MemfitError as error:
            return (), str(error)
    return found, "" if found else "the model has no part that keeps more than its inputs"


def loop_factor(model: Any, *, on_host: bool) -> float:
    """Time of a sample in a loop over micro-batches over that in a whole batch (assumed)."""
    if not on_host or keras.backend.backend() != "jax":
        return 1.0
    has_convolutions = any("Conv" in type(layer).__name__ for layer in internals.layers_of(model))
    return _SLOW_CONVOLUTIONS if has_convolutions else 1.0


def time_forward(model: Any, batch: Batch) -> tuple[float, float] | None:
    """(seconds of one sample, seconds of a call however small) of the forward pass; None where it can't be run."""
    size = batch.batch_size or 1
    many = min(size, max(_TIMED_SAMPLES, size // _TIMED_SAMPLES))
    with untouched(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build(model, batch, training=True)
        try:
            long = _timed(model, batch.resized(many) if batch.batch_size else batch)
            if many == 1 or keras.backend.backend() == "jax":
                # Another size would have to be compiled.
                return long / many, 0.0
            short = _timed(model, batch.resized(1))
        except Exception:
            # Only the times are lost: what the model makes of zeros is its own affair.
            return None
    sample = max(long - short, 0.1 * long) / (many - 1)
    return sample, max(0.0, short - sample)


def _timed(model: Any, batch: Batch) -> float:
    forward = _forward(model, mapped(_zeros, batch.x))
    forward()
    times = []
    for _ in range(_NUM_TIMED):
        started = time.perf_counter()
        forward()
        times.append(time.perf_counter() - started)
    return min(times)


def _forward(model: Any, x: Any) -> Callable[[], Any]:
    """One prediction that leaves the variables as they are."""
    if keras.backend.backend() != "jax":
        return lambda: model.predict_on_batch(x)
    import jax

    # Keras's own compiled function takes over the memory of the variables, which would be gone afterwards.
    keywords = internals.training_keyword(model, False)
    call = jax.jit(lambda *values: model.stateless_call(*values, **keywords)[0])
    trainable = [variable.value for variable in model.trainable_variables]
    others = [variable.value for variable in model.non_trainable_variables]
    return lambda: jax.block_until_ready(call(trainable, others, x))


def _zeros(spec: Spec | None) -> Any:
    return None if spec is None else np.zeros(spec.shape, "float32" if spec.dtype == "bfloat16" else spec.dtype)
