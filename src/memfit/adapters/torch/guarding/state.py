"""Everything that a run needs to go on: parameters, optimizer, scheduler, scaler, average, random states, position.

Tensors go to safetensors files, the rest to JSON, and nothing is pickled. Whatever is read back is first compared with
the live objects: names, shapes, types and classes. Only when all of it fits is the first value changed, so a checkpoint
of another model leaves this one as it was. Values are copied into the tensors that are there, which keep their device
and layout; only the state of a fresh optimizer is made anew.
"""

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memfit.adapters.torch.guarding.checkpoint_tensors import TensorFile, write_tensors
from memfit.adapters.torch.guarding.checkpoint_tree import Decoder, Encoder, named_dtype, stored_shape
from memfit.adapters.torch.guarding.snapshot import RandomState
from memfit.adapters.torch.guarding.state_checks import (
    check_entries,
    check_groups,
    check_like,
    check_random,
    check_scaler,
    check_scheduler,
)
from memfit.core.errors import BadInput, MemfitError
from memfit.core.guarding import BadCheckpoint
from memfit.core.plain_files import read_plain

FORMAT = "memfit.state"
VERSION = 1
_TREE = "state.json"
_SMALL = ("scheduler", "scaler", "random", "progress")
# Names that wrappers put into those of parameters: torch.compile and activation checkpointing.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_ADVICE = "Give what it was written with, or another folder for checkpoints."


def save(
    directory: Path,
    *,
    model: torch.nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    progress: dict[str, Any] | None = None,
) -> None:
    """Writes the state of a run into a directory.

    Args:
        directory: is there, and empty.
        model: may be wrapped for several processes or compiled; that leaves no trace.
        optimizer: over its parameters.
        scheduler: anything with `state_dict`; functions in it are left out.
        scaler: a gradient scaler.
        ema: a moving average of the parameters: a module such as `AveragedModel`, or anything with `state_dict`.
        progress: anything else, made of plain data and tensors.

    Raises:
        BadCheckpoint: something isn't plain data; the message says where it is.
        OSError: the files can't be written.
    """
    parts: dict[str, Any] = {"model": _write_module(directory, "model", model)}
    if optimizer is not None:
        encoder = Encoder()
        content = encoder.encode(_state_of(optimizer, "optimizer"), "optimizer")
        write_tensors(directory / "optimizer.safetensors", encoder.tensors)
        parts["optimizer"] = {"class": _class_of(optimizer), "home": _home_of(optimizer), "state": content}
    if ema is not None:
        parts["ema"] = _write_average(directory, ema)
    small = {
        "scheduler": None if scheduler is None else _state_of(scheduler, "scheduler"),
        "scaler": None if scaler is None else _state_of(scaler, "scaler"),
        "random": random_tree(RandomState.now()),
        "progress": progress or {},
    }
    plain, lenient = Encoder(), Encoder(skips_functions=True)
    for name, value in small.items():
        owner = {"scheduler": scheduler, "scaler": scaler}.get(name)
        if value is not None:
            encoder = lenient if owner is not None else plain
            parts[name] = {"class": _class_of(owner), "state": encoder.encode(value, name)}
    write_tensors(directory / "rest.safetensors", {**plain.tensors, **lenient.tensors})
    _write_tree(directory, parts)


def load(
    directory: Path,
    *,
    model: torch.nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    extra: dict[str, Any] | None = None,
    check: Callable[[dict[str, Any]], None] = lambda progress: None,
) -> dict[str, Any]:
    """Gives all objects, and the random states, the values that they had when `save` wrote them; returns `progress`.

    Args:
        directory: that `save` has written.
        model: and the others are those that `save` was given, or such as they were.
        optimizer: the same.
        scheduler: the same.
        scaler: the same.
        ema: the same.
        extra: further objects by name, whose states are in `progress["extra"]`.
        check: called with `progress` before anything is changed; may refuse it.

    Raises:
        BadCheckpoint: the files are of other objects, or damaged. Nothing has changed then.
    """
    parts = _read_tree(directory)
    given = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "ema": ema}
    average = update = None
    # What needs memory or may be refused comes before the first change.
    with _refusing(directory):
        for name, value in given.items():
            _check_class(directory, name, parts.get(name), value)
        modules = [_check_module(directory, "model", parts["model"], model)]
        if isinstance(ema, torch.nn.Module):
            modules.append(_check_module(directory, "ema", parts["ema"], ema))
        elif ema is not None:
            file = TensorFile(directory / "ema.safetensors")
            average = Decoder(file, _device_of(model)).decode(parts["ema"]["state"])
        rest = Decoder(TensorFile(directory / "rest.safetensors"), _device_of(model))
        small = {name: rest.decode(parts[name]["state"]) for name in _SMALL if name in parts}
        random_state = random_from_tree(small["random"])
        check_random(random_state)
        if optimizer is not None:
            update = _OptimizerState(directory, parts["optimizer"], optimizer)
        progress = small["progress"]
        if not isinstance(progress, dict):
            raise BadCheckpoint(f"{directory / _TREE} holds no progress")
        check(progress)
        states = [(ema, average, "ema"), *extra_states(extra, progress)]
        states += [(scheduler, small.get("scheduler"), "scheduler"), (scaler, small.get("scaler"), "scaler")]
        put_all(states, directory, modules)
    for module in modules:
        module.copy()
    # After the scheduler: some set learning rates when they are loaded, and those of the optimizer are the true ones.
    if update is not None:
        update.apply()
    random_state.restore()
    return progress


class Parameters:
    """The parameters and buffers of a model, to be kept on disk or in host memory and put back.

    Args:
        model: whose they are.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def write(self, directory: Path) -> None:
        """Writes them into a directory."""
        _write_tree(directory, {"model": _write_module(directory, "model", self._model)})

    def read(self, directory: Path, model: torch.nn.Module | None = None) -> None:
        """Puts what `write` wrote into a model, the own one if none is given.

        Raises:
            BadCheckpoint: it is of another model, or damaged.
        """
        parts = _read_tree(directory)
        with _refusing(directory):
            checked = _check_module(directory, "model", parts["model"], self._model if model is None else model)
            checked.load_others()
        checked.copy()

    def copy(self, into: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Copies in host memory, once for a tensor with several names; `into` earlier ones, to need no more memory."""
        into = into or {}
        copies = {}
        for name, tensor in self._tensors(self._model).items():
            old = into.get(name)
            if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
                copies[name] = old.copy_(tensor)
            else:
                copies[name] = tensor.to("cpu", copy=True)
        return copies

    def put(self, copies: dict[str, torch.Tensor], model: torch.nn.Module | None = None) -> None:
        """Puts copies into a model, the own one if none is given.

        Raises:
            BadCheckpoint: they are of another model.
        """
        live = self._tensors(self._model if model is None else model)
        saved = {name: (copy.dtype, tuple(copy.shape)) for name, copy in copies.items()}
        _compare("the best parameters kept in memory are", "model", saved, live)
        with torch.no_grad():
            for name, copy in copies.items():
                live[name].copy_(copy)

    @staticmethod
    def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        encoder = Encoder()
        for name, (_, value) in _entries(model).items():
            if isinstance(value, torch.Tensor):
                encoder.tensor(value, name)
        return encoder.tensors


def random_tree(state: RandomState) -> dict[str, Any]:
    """Random states as plain data and tensors."""
    return {"python": state.python, "torch_cpu": state.torch_cpu, "cuda": [*state.cuda], "numpy": state.numpy}


def random_from_tree(tree: dict[str, Any]) -> RandomState:
    """The random states that `random_tree` was given; of devices that aren't here any more, none."""
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return RandomState(tree["python"], tree["torch_cpu"], tuple(tree["cuda"][:num_devices]), tree["numpy"])


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own module in wrappers for several processes and compilation."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        else:
            return model


# Modules.


def _entries(model: torch.nn.Module) -> dict[str, tuple[str, Any]]:
    """By name without wrappers: the name with them, and the value."""
    return {_plain(name): (name, value) for name, value in unwrapped(model).state_dict().items()}


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _write_module(directory: Path, part: str, model: torch.nn.Module) -> dict[str, Any]:
    encoder = Encoder()
    entries = [[name, encoder.encode(value, name)] for name, (_, value) in _entries(model).items()]
    write_tensors(directory / f"{part}.safetensors", encoder.tensors)
    return {"class": _class_of(unwrapped(model)), "entries": entries}


@dataclass(frozen=True, slots=True)
class _CheckedModule:
    """A module and a file that fit together.

    Args:
        model: without wrappers.
        file: holds its tensors.
        copied: name in the file and live tensor, each once.
        others: by the name with wrappers, what the module itself must take over.
    """

    model: torch.nn.Module
    file: TensorFile
    copied: list[tuple[str, torch.Tensor]]
    others: dict[str, Any]

    def load_others(self) -> None:
        """Has the module take over what is no tensor of its own."""
        if self.others:
            self.model.load_state_dict(self.others, strict=False)

    def copy(self) -> None:
        """Gives the module the values in the file."""
        for name, tensor in self.copied:
            self.file.copy_into(name, tensor)


def _check_module(directory: Path, part: str, saved: dict[str, Any], model: torch.nn.Module) -> _CheckedModule:
    file = TensorFile(directory / f"{part}.safetensors")
    live = _entries(model)
    tags = dict(saved["entries"])
    tensors = {name: tag for name, tag in tags.items() if isinstance(tag, dict) and "__tensor__" in tag}
    dtypes = {name: named_dtype(tag["dtype"]) for name, tag in tensors.items()}
    shapes = {
        name: (dtypes[name], stored_shape(file, tag["__tensor__"], dtypes[name])) for name, tag in tensors.items()
    }
    live_tensors = {name: value for name, (_, value) in live.items() if isinstance(value, torch.Tensor)}
    _compare(f"the checkpoint {directory} is", part, shapes, live_tensors)
    own = {
        (tensor.device, tensor.data_ptr(), tensor.shape)
        for tensors in (unwrapped(model).parameters(), unwrapped(model).buffers())
        for tensor in tensors
    }
    decoder = Decoder(file, _device_of(model))
    checked = _CheckedModule(unwrapped(model), file, [], {})
    seen = set()
    for name, (raw, value) in live.items():
        if name not in tensors or (value.device, value.data_ptr(), value.shape) not in own:
            # Whatever the module makes of it: an extra state, or a tensor that only its state has.
            if name in tags:
                checked.others[raw] = decoder.decode(tags[name])
        elif value.numel() == 0 or (value.device, value.data_ptr(), value.shape, value.stride()) not in seen:
            seen.add((value.device, value.data_ptr(), value.shape, value.stride()))
            checked.copied.append((tags[name]["__tensor__"], value))
    return checked


def _compare(
    subject: str,
    part: str,
    saved: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    live: dict[str, torch.Tensor],
) -> None:
    """Refuses tensors of another model, with the first that differs."""
    what = {"model": "model", "ema": "moving average"}[part]
    for name, tensor in live.items():
        here = _shown(tensor.dtype, tuple(tensor.shape))
        if name not in saved:
            raise BadCheckpoint(f"{subject} of another {what}: {name!r}, {here} here, isn't in it. {_ADVICE}")
        if saved[name] != (tensor.dtype, tuple(tensor.shape)):
            there = _shown(*saved[name])
            raise BadCheckpoint(f"{subject} of another {what}: {name!r} is {there} in it and {here} here. {_ADVICE}")
    for name, entry in saved.items():
        if name not in live:
            raise BadCheckpoint(
                f"{subject} of another {what}: {name!r}, {_shown(*entry)} in it, isn't in the {what} here. {_ADVICE}"
            )


def _shown(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


# The moving average.


def _write_average(directory: Path, ema: Any) -> dict[str, Any]:
    if isinstance(ema, torch.nn.Module):
        return _write_module(directory, "ema", ema)
    encoder = Encoder(skips_functions=True)
    content = encoder.encode(_state_of(ema, "ema"), "ema")
    write_tensors(directory / "ema.safetensors", encoder.tensors)
    return {"class": _class_of(ema), "state": content}


# The optimizer.


class _OptimizerState:
    """An optimizer and a file that fit together; what it lacks is made here, before anything is changed."""

    def __init__(self, directory: Path, saved: dict[str, Any], optimizer: Any) -> None:
        self._optimizer = optimizer
        self._file = TensorFile(directory / "optimizer.safetensors")
        self._home = saved["home"]
        self._whole: Any = None
        self._states: list[tuple[Any, Any]] = []
        self._copies: list[tuple[str, torch.Tensor]] = []
        self._groups: list[dict[str, Any]] = []
        decoder = Decoder(self._file, _device_of_parameters(optimizer))
        if not _is_plain(optimizer):
            self._whole = decoder.decode(saved["state"])
            return
        self._groups = decoder.decode(saved["state"]["param_groups"])
        self._check_groups(directory)
        check_groups(self._groups, optimizer, "the optimizer's parameter group")
        self._prepare(saved["state"]["state"])

    def apply(self) -> None:
        """Gives the optimizer the state in the file."""
        if self._whole is not None:
            self._optimizer.load_state_dict(self._whole)
            return
        for name, tensor in self._copies:
            self._file.copy_into(name, tensor)
        state = self._optimizer.state
        state.clear()
        for parameter, entries in self._states:
            state[parameter] = entries
        for live, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            for key, value in saved.items():
                old = live.get(key)
                if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor) and old.shape == value.shape:
                    with torch.no_grad():
                        old.copy_(value)  # a captured graph reads its learning rate from this very tensor
                elif key != "params":
                    live[key] = value
        # As PyTorch's own loading does: optimizers complete what an older state lacks.
        self._optimizer.__setstate__({"state": state, "param_groups": self._optimizer.param_groups})

    def _check_groups(self, directory: Path) -> None:
        live = self._optimizer.param_groups
        if len(live) != len(self._groups):
            raise BadCheckpoint(
                f"the checkpoint {directory} is of another optimizer: it has {len(self._groups)} parameter groups, and "
                f"{len(live)} are here. {_ADVICE}"
            )
        for index, (group, saved) in enumerate(zip(live, self._groups, strict=True)):
            if len(group["params"]) != len(saved["params"]):
                raise BadCheckpoint(
                    f"the checkpoint {directory} is of another optimizer: its parameter group {index} has "
                    f"{len(saved['params'])} parameters, and {len(group['params'])} are here. {_ADVICE}"
                )

    def _prepare(self, saved: Any) -> None:
        """Live tensors that can take over values are noted for that; all others are made and filled."""
        by_number = {
            number: (parameter, group, kept)
            for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True)
            for parameter, number in zip(group["params"], kept["params"], strict=True)
        }
        pairs = saved["__dict__"] if isinstance(saved, dict) and "__dict__" in saved else list(saved.items())
        for number, entries in pairs:
            if number not in by_number:
                if type(number) is not str and type(self._optimizer).__module__.startswith("torch.optim"):
                    raise BadCheckpoint(f"the optimizer's state is of a parameter {number!r}, which there is not")
                # What an optimizer keeps for no parameter in particular.
                self._states.append((number, Decoder(self._file).decode(entries)))
                continue
            parameter, group, kept = by_number[number]
            if "__dict__" in entries:
                made = Decoder(self._file, parameter.device).decode(entries)
            else:
                made = {key: self._entry(key, tag, parameter, group) for key, tag in entries.items()}
            check_entries(made, parameter, self._optimizer, kept, f"the optimizer's state of parameter {number}")
            self._states.append((parameter, made))

    def _entry(self, key: str, tag: Any, parameter: torch.Tensor, group: dict[str, Any]) -> Any:
        if not isinstance(tag, dict) or "__tensor__" not in tag:
            return Decoder(self._file, parameter.device).decode(tag)
        old = self._optimizer.state.get(parameter, {}).get(key)
        dtype = named_dtype(tag["dtype"])
        shape = stored_shape(self._file, tag["__tensor__"], dtype)
        if isinstance(old, torch.Tensor) and (old.dtype, tuple(old.shape)) == (dtype, shape):
            self._copies.append((tag["__tensor__"], old))
            return old
        device = self._device(key, tag, parameter, group)
        return Decoder(self._file, device).decode({**tag, "device": "any"})

    def _device(self, key: str, tag: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> torch.device:
        """Beside the parameter, unless it was elsewhere when it was saved; counters as PyTorch places them."""
        if key == "step":
            return parameter.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
        return parameter.device if tag.get("device", "cpu") == self._home else torch.device("cpu")


def _is_plain(optimizer: Any) -> bool:
    """Whether PyTorch's own way of loading applies, which can be done here without a second copy of the state."""
    return (
        isinstance(optimizer, torch.optim.Optimizer)
        and type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
        and type(optimizer).state_dict is torch.optim.Optimizer.state_dict
        and "load_state_dict" not in vars(optimizer)
        and not optimizer._optimizer_load_state_dict_pre_hooks
        and not optimizer._optimizer_load_state_dict_post_hooks
        and not optimizer._optimizer_state_dict_post_hooks
    )


def _device_of_parameters(optimizer: Any) -> torch.device:
    groups = getattr(optimizer, "param_groups", [])
    return next((parameter.device for group in groups for parameter in group["params"]), torch.device("cpu"))


def _home_of(optimizer: Any) -> str:
    return _device_of_parameters(optimizer).type


# What all parts share.


@contextmanager
def _refusing(directory: Path) -> Iterator[None]:
    """What isn't where it should be in the tree is a damaged checkpoint."""
    try:
        yield
    except (MemfitError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise BadCheckpoint(f"{directory / _TREE} lacks something or holds something else: {error!r}") from error


def _device_of(model: torch.nn.Module) -> torch.device:
    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))


def _class_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _state_of(value: Any, part: str) -> Any:
    if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
        raise BadInput(
            f"the {part}, a {_class_of(value)}, has no state_dict and load_state_dict, so a checkpoint can't hold it. "
            "Give it both, or step it in your own code and store its state with the progress."
        )
    return value.state_dict()


def extra_states(objects: dict[str, Any] | None, progress: dict[str, Any]) -> list[tuple[Any, Any, str]]:
    """Further objects with their states, for `put_all`."""
    if not objects:
        return []
    states = progress.get("extra")
    if not isinstance(states, dict):
        raise BadCheckpoint("the checkpoint holds no states of further objects")
    return [(value, states[name], name) for name, value in objects.items() if name in states]


def put_all(states: list[tuple[Any, Any, str]], directory: Path, modules: Sequence["_CheckedModule"] = ()) -> None:
    """Has objects take over their states, and modules what is no tensor of theirs: all of them, or none.

    Args:
        states: object, or None where there is none, state, and what it is called.
        directory: of the checkpoint.
        modules: may still refuse theirs.
    """
    given = [(value, state, part) for value, state, part in states if value is not None and state is not None]
    for value, state, part in given:
        if type(value).__module__.startswith("torch."):
            check_like(state, value.state_dict(), f"the state of the {part}")
        if part == "scaler" and isinstance(state, dict):
            check_scaler(state, f"the state of the {part}")
        if part == "scheduler" and isinstance(state, dict):
            check_scheduler(state, value, f"the state of the {part}")
    before = [(value, copy.deepcopy(value.state_dict())) for value, _, part in given if part != "ema"]
    try:
        for value, state, part in given:
            try:
                value.load_state_dict(state)
            except Exception as error:
                raise BadCheckpoint(
                    f"the state of the {part} in {directory} doesn't fit: {error}. {_ADVICE}"
                ) from error
        for module in modules:
            module.load_others()
    except BaseException:
        for value, state in before:
            value.load_state_dict(state)
        raise


def _check_class(directory: Path, part: str, saved: dict[str, Any] | None, value: Any) -> None:
    what = {"ema": "moving average", "scaler": "gradient scaler"}.get(part, part)
    if saved is None and value is None:
        return
    if saved is None:
        raise BadCheckpoint(
            f"the checkpoint {directory} holds no {what}, and a {_class_of(value)} was given. {_ADVICE}"
        )
    if value is None:
        raise BadCheckpoint(
            f"the checkpoint {directory} holds a {what}, a {saved['class']}, and none was given. {_ADVICE}"
        )
    live = unwrapped(value) if isinstance(value, torch.nn.Module) else value
    if saved["class"] != _class_of(live):
        raise BadCheckpoint(
            f"the checkpoint {directory} is of another {what}: a {saved['class']}, and a {_class_of(live)} was given. "
            f"{_ADVICE}"
        )


def _write_tree(directory: Path, parts: dict[str, Any]) -> None:
    content = {"format": FORMAT, "version": VERSION, **parts}
    with (directory / _TREE).open("w", encoding="utf-8") as file:
        json.dump(content, file, allow_nan=False)


def _read_tree(directory: Path) -> dict[str, Any]:
    path = directory / _TREE
    try:
        content = json.loads(read_plain(path))
    except OSError as error:
        raise BadCheckpoint(f"{path} can't be read: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        raise BadCheckpoint(f"{path} is no JSON") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("model"), dict):
        raise BadCheckpoint(f"{path} isn't the state of a run that memfit wrote")
    if content.get("version") != VERSION:
        raise BadCheckpoint(f"{path} has version {content.get('version')!r}, and this memfit reads version {VERSION}")
    return content
