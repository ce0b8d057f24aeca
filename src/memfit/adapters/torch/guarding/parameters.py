"""The values of a model in a file, and back: parameters and buffers alone, without pickle (safetensors).

A file appears whole or not at all. Tensors that share memory are written once, with the other names beside them.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from memfit.core.errors import BadFile, BadModel, MissingDependency
from memfit.core.guarding import BadCheckpoint

_SHARED = "memfit.shared"


def write(model: Any, path: Path) -> None:
    """Writes the values of a model's parameters and buffers.

    Raises:
        BadModel: it isn't one, or it holds something that isn't a plain tensor.
        BadFile: the file can't be written.
    """
    safetensors = _safetensors()
    tensors, shared = _distinct(_state(model))
    handle = -1
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        os.close(handle)
        safetensors.save_file(tensors, temporary, metadata={_SHARED: json.dumps(shared)})
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, _write_errors()) as error:
        raise BadFile(
            f"the parameters can't be written to {str(path)!r}: {error}. What was there before stays."
        ) from error
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)


def read(model: Any, path: Path) -> None:
    """Gives a model the values in a file, one tensor at a time.

    Raises:
        BadCheckpoint: the file is damaged or of another model; nothing has changed then.
    """
    safetensors = _safetensors()
    state = _state(model)
    try:
        with safetensors.safe_open(os.fspath(path), framework="pt") as file:
            names = set(file.keys())
            shared = json.loads((file.metadata() or {}).get(_SHARED, "{}"))
            sources = {name: name for name in names} | {name: source for name, source in shared.items()}
            _check(path, state, {name: tuple(file.get_slice(source).get_shape()) for name, source in sources.items()})
            with torch.no_grad():
                for name, tensor in state.items():
                    tensor.copy_(file.get_tensor(sources[name]))
    except (OSError, _write_errors(), ValueError) as error:
        if isinstance(error, BadCheckpoint):
            raise
        raise BadCheckpoint(f"the file {str(path)!r} can't be read as parameters (safetensors): {error}.") from error


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
    storages: set[int] = set()
    for name, tensor in state.items():
        storage = tensor.untyped_storage().data_ptr()
        key = (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and key in names:
            shared[name] = names[key]
            continue
        names[key] = name
        # Two parts of one storage would be refused; a part that isn't contiguous, too.
        plain = tensor.detach().contiguous()
        overlapping = bool(tensor.numel()) and storage in storages
        tensors[name] = plain.clone() if overlapping and plain.untyped_storage().data_ptr() == storage else plain
        storages.add(storage)
    return tensors, shared


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise MissingDependency(
            "safetensors is not installed, and parameters are kept in its files. Install it with "
            "`pip install 'memfit[torch]'`."
        ) from None
    return _Functions(safetensors.torch.save_file, safetensors.safe_open)


class _Functions:
    """What is used of safetensors."""

    def __init__(self, save_file: Any, safe_open: Any) -> None:
        self.save_file = save_file
        self.safe_open = safe_open


def _write_errors() -> type[Exception]:
    import safetensors

    found: type[Exception] = safetensors.SafetensorError
    return found
