"""Low-rank adapters (LoRA) and int8 base weights where Keras offers them.

Keras adds adapters to layers for good (`enable_lora`, `quantize`). Here what a layer was is noted down first, so that
it can be brought back: without a quantized base, with what the adapters have learned added to its weights; after a
quantized base, with the weights from before, which wait in a file meanwhile, and what was learned added to these.

Other variables are trained than before, so that the optimizer starts anew; the one that was there comes back with its
state.
"""

import tempfile
from contextlib import ExitStack
from typing import Any

import keras
import numpy as np

from memfit.core.errors import BadInput, BadModel
from memfit.core.settings import Settings
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.apply.precision import Undo, output_layers, replace_optimizer

_LISTS = ("_trainable_variables", "_non_trainable_variables", "_layers", "_seed_generators")


def apply(settings: Settings, model: keras.Model) -> Undo:
    """Adds adapters of `settings.lora_rank`, over an int8 base with `quantized_base`; returns what undoes it.

    Every layer for which Keras has adapters gets one, except those that make the model's outputs. Only adapters are
    trained.
    """
    rank = settings.lora_rank
    if rank < 0:
        raise BadInput(f"the rank of adapters must be at least 1, or 0 for none, but {rank} was given.")
    if settings.quantized_base and not rank:
        raise BadInput("int8 base weights can't be trained: they need adapters. Set lora_rank, such as 16.")
    if not rank:
        return lambda: None
    outputs = {id(layer) for layer in output_layers(model)}
    layers = [layer for layer in internals.layers_of(model) if id(layer) not in outputs and _is_adaptable(layer)]
    if not layers:
        raise BadModel(
            f"{model.name!r} has no layers that Keras has adapters for besides those that make its outputs. "
            "Leave this move out."
        )
    frozen = [variable for variable in model.trainable_variables if variable.trainable]
    with ExitStack() as undo:
        for variable in frozen:
            variable.trainable = False
            undo.callback(setattr, variable, "trainable", True)
        for layer in layers:
            undo.callback(_adapted(layer, rank, quantized=settings.quantized_base))
        done = undo.pop_all()
    bring_back = replace_optimizer(model, lambda optimizer: type(optimizer).from_config(optimizer.get_config()))

    def undo_everything() -> None:
        done.close()
        bring_back()

    return undo_everything


def difference(settings: Settings) -> str:
    """What differs from the plain step in words, or ""."""
    if not settings.lora_rank:
        return ""
    base = ", over weights in int8" if settings.quantized_base else ""
    return (
        f"only adapters of rank {settings.lora_rank} are trained{base}, and the optimizer starts anew, since it has "
        "other variables"
    )


def _is_adaptable(layer: Any) -> bool:
    if not hasattr(layer, "enable_lora") or getattr(layer, "lora_enabled", False):
        return False
    limits = ("kernel_constraint", "embeddings_constraint")
    is_constrained = any(getattr(layer, name, None) is not None for name in limits)
    return bool(layer.built and layer.variables and not is_constrained)


def _adapted(layer: Any, rank: int, *, quantized: bool) -> Undo:
    """Adds an adapter to one layer."""
    restore = _noted(layer)
    weight = internals.weight_of(layer)
    parked: Undo | None = None
    try:
        if quantized and type(layer).__name__ in ("Dense", "EinsumDense", "Embedding"):
            value = keras.ops.convert_to_numpy(weight)
            layer.quantize("int8")
            if internals.weight_of(layer) is not weight:
                parked = _parked(weight, value)
        layer.enable_lora(rank)
    except Exception as error:
        if parked is not None:
            parked()
        restore()
        raise BadModel(
            f"Keras can't add an adapter to the layer {layer.name!r} ({type(layer).__name__}): {error} "
            "Leave this move out."
        ) from error

    def undo() -> None:
        learned = _learned(layer)
        if parked is not None:
            parked()
        restore()
        if learned is not None:
            weight.assign(keras.ops.add(weight.value, keras.ops.cast(learned, weight.dtype)))
        internals.track_variables(layer)

    return undo


def _learned(layer: Any) -> Any:
    """What the adapter adds to the weight; None if nothing yet."""
    name = "embeddings" if hasattr(layer, "lora_embeddings_a") else "kernel"
    down, up = getattr(layer, f"lora_{name}_a"), getattr(layer, f"lora_{name}_b")
    if not np.any(keras.ops.convert_to_numpy(up)):
        return None
    return (layer.lora_alpha / layer.lora_rank) * keras.ops.matmul(down.value, up.value)


def _noted(layer: Any) -> Undo:
    """Notes down what a layer is; returns what brings it back."""
    attributes = dict(layer.__dict__)
    lists = {name: list(getattr(layer, name)) for name in _LISTS if hasattr(layer, name)}
    stored = {name: set(ids) for name, ids in internals.tracked(layer).items()}

    def restore() -> None:
        for name in [name for name in layer.__dict__ if name not in attributes]:
            layer.__dict__.pop(name)
        layer.__dict__.update(attributes)
        for name, values in lists.items():
            getattr(layer, name)[:] = values
        internals.tracked(layer).update(stored)

    return restore


def _parked(variable: Any, value: np.ndarray[Any, Any]) -> Undo:
    """Has the value of a variable wait in a file; returns what brings it back."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as the value is in it
    np.save(file, value, allow_pickle=False)
    # TensorFlow's name for the variable inside, by which the optimizer finds its state.
    key = getattr(internals.tensor_of(variable), "_unique_id", None)
    internals.set_tensor(variable, None)

    def restore() -> None:
        file.seek(0)
        internals.initialize(variable, keras.ops.convert_to_tensor(np.load(file), dtype=variable.dtype))
        file.close()
        if key is not None:
            internals.tensor_of(variable)._unique_id = key

    return restore
