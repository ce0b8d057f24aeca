"""All that a training step of a Keras model may change: its variables, in the groups that Keras's JAX trainer keeps."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras

from memfit.core import tensor_file
from memfit.core.guarding import BadCheckpoint
from memfit.core.tensor_file import TensorEntry, TensorFile, array_pieces
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.batch import item_bytes
from memfit.frameworks.keras.model import has_call, optimizers_of

TRAINABLE, OTHERS, OPTIMIZER, METRICS = "trainable", "non-trainable", "optimizer", "metrics"
GROUPS = (TRAINABLE, OTHERS, OPTIMIZER, METRICS)


def grouped(model: Any) -> dict[str, list[Any]]:
    """The variables of a model, its optimizers and its metrics, by group, in Keras's order."""
    return {
        TRAINABLE: list(model.trainable_variables),
        OTHERS: list(model.non_trainable_variables),
        OPTIMIZER: [variable for optimizer in optimizers_of(model) for variable in optimizer.variables],
        METRICS: list(model.metrics_variables),
    }


def is_built(model: Any) -> bool:
    """Whether all variables are there."""
    # A model without `call` is never built itself, only its layers are.
    layers = [layer for layer in internals.layers_of(model) if layer is not model or has_call(model)]
    parts = (*layers, *optimizers_of(model))
    return internals.is_loss_built(model) and all(getattr(part, "built", True) for part in parts)


def write(path: Path, model: Any, values: dict[str, Sequence[Any]] | None) -> None:
    """Writes all variables; `values` by group where the variables themselves are empty, as in an epoch on JAX."""
    tensor_file.write(path, _entries(model, values))


def _entries(model: Any, values: dict[str, Sequence[Any]] | None) -> Iterator[TensorEntry]:
    for group, variables in grouped(model).items():
        for index, variable in enumerate(variables):
            name = f"{group}.{index}"
            value = variable.value if values is None else values[group][index]
            if keras.backend.backend() == "torch":
                from memfit.frameworks.torch.guard.checkpoint_tensors import tensor_entry

                yield tensor_entry(name, value)
                continue
            dtype = keras.backend.standardize_dtype(variable.dtype)
            shape = tuple(int(size) for size in variable.shape)
            pieces = functools.partial(lambda value: array_pieces(keras.ops.convert_to_numpy(value)), value)
            yield TensorEntry(name, dtype, shape, item_bytes(dtype), pieces)


def read(path: Path, model: Any, groups: Sequence[str] = GROUPS) -> None:
    """Gives the variables the values in a file.

    Raises:
        BadCheckpoint: it is of another model.
    """
    file = TensorFile(path)
    found = grouped(model)
    for group in GROUPS:
        stored = [name for name in file.names() if name.rpartition(".")[0] == group]
        if len(stored) != len(found[group]):
            raise BadCheckpoint(
                f"the checkpoint {path.parent} is of another model: it has {len(stored)} {group} variables, and "
                f"{model.name!r} has {len(found[group])}. Give another folder, or the model that it was made with."
            )
    checked = []
    for group in groups:
        for index, variable in enumerate(found[group]):
            name = f"{group}.{index}"
            if name not in file:
                raise BadCheckpoint(f"the checkpoint {path.parent} lacks {name!r}. Give another folder.")
            dtype, shape = file.dtype(name), file.shape(name)
            wanted = keras.backend.standardize_dtype(variable.dtype), tuple(int(size) for size in variable.shape)
            if (dtype, shape) != wanted:
                raise BadCheckpoint(
                    f"the checkpoint {path.parent} is of another model: {variable.path} is {wanted[0]}{wanted[1]}, and "
                    f"{dtype}{shape} is stored. Give another folder, or the model that it was made with."
                )
            checked.append((variable, name))
    for variable, name in checked:
        if keras.backend.backend() == "torch":
            from memfit.frameworks.torch.guard.checkpoint_tensors import copy_into

            copy_into(file, name, variable.value)
        else:
            variable.assign(file.read(name))
