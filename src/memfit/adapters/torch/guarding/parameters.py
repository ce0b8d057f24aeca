"""The values of a model in a file, and back: parameters and buffers alone, without pickle (safetensors).

A file appears whole or not at all. Tensors that share memory are written once, with the other names beside them.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch

from memfit.adapters.torch.guarding.checkpoint_tensors import TensorFile, write_tensors
from memfit.core.errors import BadFile, BadModel
from memfit.core.guarding import BadCheckpoint

_SHARED = "memfit.shared"


def write(model: Any, path: Path) -> None:
    """Writes the values of a model's parameters and buffers.

    Raises:
        BadModel: it isn't one, or it holds something that isn't a plain tensor.
        BadFile: the file can't be written.
    """
    tensors, shared = _distinct(_state(model))
    if shared:
        tensors[_SHARED] = torch.tensor(list(json.dumps(shared).encode()), dtype=torch.uint8)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_tensors(temporary, tensors)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise BadFile(
            f"the parameters can't be written to {str(path)!r}: {error}. What was there before stays."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def read(model: Any, path: Path) -> None:
    """Gives a model the values in a file, one tensor at a time.

    Raises:
        BadCheckpoint: the file is damaged or of another model; nothing has changed then.
    """
    state = _state(model)
    file = TensorFile(path)
    sources = {name: name for name in file.names() if name != _SHARED}
    if _SHARED in file:
        held = torch.empty(file.shape(_SHARED), dtype=torch.uint8)
        file.copy_into(_SHARED, held)
        try:
            sources |= json.loads(bytes(held.tolist()))
        except (ValueError, TypeError) as error:
            raise BadCheckpoint(f"{str(path)!r} is damaged: {error}") from None
    _check(path, state, {name: file.shape(source) for name, source in sources.items() if source in file})
    with torch.no_grad():
        for name, tensor in state.items():
            file.copy_into(sources[name], tensor)


def _check(path: Path, state: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuses the file of another model."""
    for name, tensor in state.items():
        if name not in shapes:
            raise BadCheckpoint(f"{str(path)!r} is of another model: it has no {name!r}, which this model has.")
        if shapes[name] != tuple(tensor.shape):
            raise BadCheckpoint(
                f"{str(path)!r} is of another model: its {name!r} has the shape {shapes[name]}, and that of this model "
                f"{tuple(tensor.shape)}. Build the model with the parameters that it was trained with."
            )
    for name in shapes:
        if name not in state:
            raise BadCheckpoint(f"{str(path)!r} is of another model: this model has no {name!r}.")


def _state(model: Any) -> dict[str, torch.Tensor]:
    if not isinstance(model, torch.nn.Module):
        raise BadModel(f"expected a torch.nn.Module, but {type(model).__name__} was given.")
    state = model.state_dict()
    for name, value in state.items():
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            raise BadModel(
                f"{name!r} of the model is a {type(value).__name__}, not a plain tensor, and can't be kept without "
                "pickle. Keep the state of such a model yourself."
            )
    return dict(state)


def _distinct(state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(tensors to write, other names of the same tensors)."""
    tensors: dict[str, torch.Tensor] = {}
    shared: dict[str, str] = {}
    names: dict[Any, str] = {}
    for name, tensor in state.items():
        storage = tensor.untyped_storage().data_ptr()
        key = (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and key in names:
            shared[name] = names[key]
        else:
            names[key] = name
            tensors[name] = tensor
    return tensors, shared
