"""The values of a model in files, and back: parameters and buffers, without pickle.

What is read is first compared with the live model, by names, shapes and types, so that the values of another model
change nothing. Wrappers for several processes and `torch.compile` leave no trace in the names; tensors that share
memory are written once.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from memfit.core.errors import BadFile, BadModel, MemfitError
from memfit.core.guarding import BadCheckpoint
from memfit.core.tensor_file import TensorFile
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.guard.checkpoint_tensors import (
    SHARDS,
    TensorDecoder,
    TensorEncoder,
    copy_into,
    described,
    is_shard,
    read_shards,
    read_tree,
    write_tensors,
)

ADVICE = "Give what it was written with, or another folder for checkpoints."
# Names that wrappers put into those of parameters: torch.compile and activation checkpointing.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
Description = tuple[torch.dtype, tuple[int, ...]]


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own module in wrappers for several processes and compilation."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        elif isinstance(inner := internals.original_module(model), torch.nn.Module):
            model = inner
        else:
            return model


def plain_name(name: str) -> str:
    """The name of a parameter without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def entries_of(model: torch.nn.Module) -> dict[str, tuple[str, Any]]:
    """The state of a model by plain name: (name with wrappers, value)."""
    return {plain_name(name): (name, value) for name, value in unwrapped(model).state_dict().items()}


def device_of(model: torch.nn.Module) -> torch.device:
    """Where the model is."""
    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """What dense tensors take together; what they share counts once."""
    dense = (tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_meta)
    storages = (tensor.untyped_storage() for tensor in dense)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def compare(subject: str, what: str, saved: Mapping[str, Description], live: Mapping[str, Any]) -> None:
    """Refuses tensors of another model, with the first that differs; what is live and no tensor isn't compared."""

    def shown(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
        return f"{str(dtype).removeprefix('torch.')} {list(shape)}"

    here = {n: (t.dtype, tuple(t.shape)) for n, t in live.items() if isinstance(t, torch.Tensor)}
    for name in {**here, **saved}:
        if name not in saved:
            difference = f"{name!r}, {shown(*here[name])} here, isn't in it"
        elif name not in here:
            difference = f"{name!r}, {shown(*saved[name])} in it, isn't in the {what} here"
        elif saved[name] != here[name]:
            difference = f"{name!r} is {shown(*saved[name])} in it and {shown(*here[name])} here"
        else:
            continue
        raise BadCheckpoint(f"{subject} of another {what}: {difference}. {ADVICE}")


def encode_module(model: torch.nn.Module, encoder: TensorEncoder) -> list[Any]:
    """The tree of a module, [[name, value]]; its tensors are in the encoder."""
    return [[name, encoder.encode(value, name)] for name, (_, value) in entries_of(model).items()]


@dataclass(slots=True)
class Loading:
    """What live objects will take over of files, once all of it has been checked; `source` is what messages name."""

    source: Path
    copies: list[tuple[TensorFile, str, torch.Tensor]] = field(default_factory=list)
    """File, name in it, and live tensor."""
    shards: dict[str, torch.Tensor] = field(default_factory=dict)
    """Live tensors by the names of the shards that they take over."""
    others: list[tuple[torch.nn.Module, dict[str, Any]]] = field(default_factory=list)
    """Modules with what they must take over by themselves, as it is no tensor of theirs."""

    def add_module(self, path: Path, model: torch.nn.Module, what: str = "model") -> None:
        """Compares a module with the file that it was written to, and refuses what doesn't fit."""
        file = TensorFile(path)
        tree = read_tree(file)
        plain_tensors = ((name, {"__tensor__": name, "dtype": file.dtype(name)}) for name in file.names())
        live, tags = entries_of(model), dict(plain_tensors if tree is None else tree)
        tensors = {
            name: tag
            for name, tag in tags.items()
            if isinstance(tag, dict) and {"__tensor__", "__shard__"} & tag.keys()
        }
        compare(
            f"the checkpoint {self.source} is",
            what,
            {name: described(file, tag) for name, tag in tensors.items()},
            {name: value for name, (_, value) in live.items()},
        )
        plain = unwrapped(model)
        own = {_key(tensor)[:-1] for tensor in (*plain.parameters(), *plain.buffers()) if not is_shard(tensor)}
        decoder = TensorDecoder(file, device_of(model))
        others: dict[str, Any] = {}
        seen = set()
        for name, (raw, value) in live.items():
            if name not in tags:
                continue
            if "__shard__" in tensors.get(name, {}):
                self.shards[f"{path.stem}.{tags[name]['__shard__']}"] = value.detach()
            elif name not in tensors or _key(value)[:-1] not in own:
                # Whatever the module makes of it: an extra state, or a tensor that only its state has.
                others[raw] = decoder.decode(tags[name])
            elif value.numel() == 0 or _key(value) not in seen:
                seen.add(_key(value))
                self.copies.append((file, tags[name]["__tensor__"], value))
        if others:
            self.others.append((plain, others))

    def load_others(self) -> None:
        """Has modules take over what is no tensor of their own; they may refuse it."""
        for module, state in self.others:
            module.load_state_dict(state, strict=False)

    def copy(self) -> None:
        """Gives all tensors the values in the files."""
        if self.shards:
            read_shards(self.source / SHARDS, self.shards)
        for file, name, tensor in self.copies:
            copy_into(file, name, tensor)


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """What isn't where it should be in a checkpoint is damage."""
    try:
        yield
    except (MemfitError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise BadCheckpoint(f"{path} is incomplete or malformed: {error!r}") from error


# A module in a file of its own, as `trial.keep` and `guard.best` write it.


def write(model: Any, path: Path) -> None:
    """Writes the values of a model's parameters and buffers; the file appears whole or not at all."""
    _check_module(model)
    encoder = TensorEncoder()
    tree = encode_module(model, encoder)
    if encoder.shards:
        raise BadModel(
            f"{next(iter(encoder.shards))!r} of the model is spread over processes, and a file of its own holds whole "
            "tensors. Save the state of such a model yourself."
        )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_tensors(temporary, encoder.tensors, tree)
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
    """Gives a model the values in a file, one tensor at a time; what isn't of this model changes nothing."""
    _check_module(model)
    loading = Loading(path)
    with refusing(path):
        loading.add_module(path, model)
        loading.load_others()
    loading.copy()


def _check_module(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise BadModel(f"expected a torch.nn.Module, but {type(model).__name__} was given.")


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()
