"""What a plan asks of a Keras model before it searches: what can be split and recomputed, and how fast it is."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from memfit.core.device import Device, Kind
from memfit.core.errors import MemfitError
from memfit.core.job import AUTOCASTS
from memfit.core.progress import doing
from memfit.core.step_facts import StepFacts, forward_seconds
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.apply.fitted import check_split, in_words, with_random_numbers, with_statistics
from memfit.frameworks.keras.apply.units import units
from memfit.frameworks.keras.batch import Batch, Spec, mapped
from memfit.frameworks.keras.model import build
from memfit.frameworks.keras.trace.job import restoring

# XLA for CPU has no library compute convolutions inside of a loop: they took 20 times as long.
_SLOW_CONVOLUTIONS = 20.0


def facts_of(model: Any, batch: Batch, target: Device) -> StepFacts:
    """What of a compiled model can be split and recomputed, and how fast it is."""
    backend = str(keras.backend.backend())
    not_split, approximate, is_random = "", "", False
    with restoring(model):
        with doing("checking whether the batch can be split"):
            # Layers of a model that was never called aren't there yet.
            build(model, batch, training=True)
            try:
                check_split(model, approximate=True)
                statistics, is_random = with_statistics(model), bool(with_random_numbers(model))
                approximate = f"{in_words(statistics)} use the statistics of each micro-batch" if statistics else ""
            except MemfitError as error:
                not_split = str(error)
        with doing("finding what can be recomputed"):
            try:
                parts = units(model, batch.x)
                not_recomputed = "" if parts else "the model has no part that keeps more than its inputs"
            except MemfitError as error:
                parts, not_recomputed = (), str(error)
    if not not_split and batch.batch_size is None:
        not_split = "the arrays of the batch have no common first dimension"
    moves = {"lora", "qlora"}
    if backend == "tensorflow" and target.kind is Kind.CUDA:
        from memfit.frameworks.keras.trace.tensorflow_backend import compiles_on

        # Whether compiling the step as a whole would be a change that helps.
        if not model.jit_compile and not model.run_eagerly and not compiles_on(model, target, None):
            moves.add("jit-compile")
    return StepFacts(
        framework=f"keras:{backend}",
        precisions=AUTOCASTS,
        moves=frozenset(moves),
        parts=parts,
        not_recomputed=not_recomputed,
        not_split=not_split,
        approximate=approximate,
        draws_random_numbers=is_random,
        loop_factor=loop_factor(model, on_host=target.kind is Kind.HOST),
        time_forward=lambda: time_forward(model, batch),
    )


def loop_factor(model: Any, *, on_host: bool) -> float:
    """Time of a sample in a loop over micro-batches over that in a whole batch (assumed)."""
    if not on_host or keras.backend.backend() != "jax":
        return 1.0
    has_convolutions = any("Conv" in type(layer).__name__ for layer in internals.layers_of(model))
    return _SLOW_CONVOLUTIONS if has_convolutions else 1.0


def time_forward(model: Any, batch: Batch) -> tuple[float, float] | None:
    """(seconds of one sample, seconds of a call however small) of the forward pass; None where it can't be run."""
    is_on_jax = keras.backend.backend() == "jax"
    with restoring(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build(model, batch, training=True)
        try:
            return forward_seconds(
                lambda size: _forward(model, batch.resized(size if batch.batch_size else None)),
                batch.batch_size or 1,
                is_compiled=is_on_jax,
            )
        except Exception:
            # Only the times are lost: what the model makes of zeros is its own affair.
            return None


def _forward(model: Any, batch: Batch) -> Callable[[], object]:
    """One prediction, of zeros, that leaves the variables as they are."""

    def zeros(spec: Spec) -> Any:
        return np.zeros(spec.shape, "float32" if spec.dtype == "bfloat16" else spec.dtype)

    x = mapped(zeros, batch.x)
    if keras.backend.backend() != "jax":
        return lambda: model.predict_on_batch(x)
    import jax

    # Keras's own compiled function takes over the memory of the variables, which would be gone afterwards.
    keywords = internals.training_keyword(model, False)
    call = jax.jit(lambda *values: model.stateless_call(*values, **keywords)[0])
    trainable = [variable.value for variable in model.trainable_variables]
    others = [variable.value for variable in model.non_trainable_variables]
    return lambda: jax.block_until_ready(call(trainable, others, x))
