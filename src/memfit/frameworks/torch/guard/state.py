"""Everything that a run needs to go on: parameters, optimizer, scheduler, scaler, average, random states, position.

Tensors go to safetensors files, the rest to JSON, and nothing is pickled. Whatever is read back is first compared with
the live objects: names, shapes, types and classes. Only when all of it fits is the first value changed, so a checkpoint
of another model leaves this one as it was. Values are copied into the tensors that are there, which keep their device
and layout; only the state of a fresh optimizer is made anew.

Of several processes the first writes what all have in common. Tensors that are spread over them (FSDP2) are written by
all, and random states and positions in the data, which differ, by each process in a file of its own.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memfit.core.errors import BadInput
from memfit.core.guarding import BadCheckpoint
from memfit.core.plain_files import read_plain
from memfit.core.tensor_file import TensorFile
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.guard import state_checks as checks
from memfit.frameworks.torch.guard.checkpoint_tensors import (
    SHARDS,
    TensorDecoder,
    TensorEncoder,
    described,
    is_shard,
    num_ranks,
    rank,
    write_shards,
    write_tensors,
)
from memfit.frameworks.torch.guard.parameters import (
    ADVICE,
    Loading,
    compare,
    device_of,
    encode_module,
    entries_of,
    plain_name,
    read,
    refusing,
    unwrapped,
    write,
)
from memfit.frameworks.torch.guard.snapshot import RandomState

FORMAT = "memfit.state"
VERSION = 2
_TREE = "state.json"


def save(
    directory: Path,
    *,
    model: torch.nn.Module,
    optimizer: Any = None,
    progress: dict[str, Any] | None = None,
    **others: Any,
) -> None:
    """Writes the state of a run into an empty directory that all processes see; each of them calls this.

    `progress` is anything else, plain data and tensors, of this process. The others are "scheduler", "scaler" and
    "ema": anything with `state_dict`, of whose state functions are left out; the average may also be a module.

    Raises:
        BadCheckpoint: something isn't plain data; the message says where it is.
        OSError: the files can't be written; on all processes where the parts of tensors can't.
    """
    encoders = {"model": TensorEncoder(), "optimizer": TensorEncoder(), "ema": TensorEncoder(skips_functions=True)}
    rest, own = TensorEncoder(skips_functions=True), TensorEncoder()
    trees: dict[str, Any] = {"model": encode_module(model, encoders["model"])}
    parts: dict[str, Any] = {"model": {"class": _class_of(unwrapped(model))}}
    if optimizer is not None:
        groups = getattr(optimizer, "param_groups", [])
        # The state of a sharded model's optimizer is matched with its parameters, whatever its own way of saving.
        state = torch.optim.Optimizer.state_dict(optimizer) if is_sharded(model) else _state_of(optimizer, "optimizer")
        parts["optimizer"] = {
            "class": _class_of(optimizer),
            "home": _home_of(optimizer).type,
            "names": _names(model, groups),
            "state": encoders["optimizer"].encode(state, "optimizer"),
        }
    for name, value in others.items():
        if name == "ema" and isinstance(value, torch.nn.Module):
            trees[name] = encode_module(value, encoders[name])
            parts[name] = {"class": _class_of(unwrapped(value))}
        elif value is not None:
            content = encoders.get(name, rest).encode(_state_of(value, name), name)
            parts[name] = {"class": _class_of(value), "state": content}
    values = {"random": RandomState.now().states, "progress": progress or {}}
    encoded = {name: {"state": own.encode(value, name)} for name, value in values.items()}
    spread = {f"{part}.{name}": t for part, encoder in encoders.items() for name, t in encoder.shards.items()}
    if spread:
        write_shards(directory / SHARDS, spread)
    if rank():
        path = _own_file(directory)
        write_tensors(path.with_suffix(".safetensors"), own.tensors)
        path.write_text(json.dumps(encoded, allow_nan=False), encoding="utf-8")
        return
    for name in encoders.keys() & parts.keys():
        write_tensors(directory / f"{name}.safetensors", encoders[name].tensors, trees.get(name))
    write_tensors(directory / "rest.safetensors", {**rest.tensors, **own.tensors})
    content = {"format": FORMAT, "version": VERSION, "num_processes": num_ranks(), "is_sharded": bool(spread)}
    text = json.dumps({**content, **parts, **encoded}, allow_nan=False)
    (directory / _TREE).write_text(text, encoding="utf-8")


def load(
    directory: Path,
    *,
    model: torch.nn.Module,
    optimizer: Any = None,
    extra: dict[str, Any] | None = None,
    check: Callable[[dict[str, Any]], None] = lambda progress: None,
    **others: Any,
) -> dict[str, Any]:
    """Gives all objects the values that they had when `save` wrote them; returns `progress`.

    Each process has its own random states and progress back if as many processes read as wrote. Otherwise all take the
    progress of the first, and keep the random states that they have. `extra` are objects whose states are in
    `progress["extra"]`; `check` may refuse the progress before anything is changed.

    Raises:
        BadCheckpoint: the files are of other objects, or damaged. Nothing has changed then.
    """
    tree = _read_tree(directory)
    objects = {"optimizer": optimizer, "scheduler": None, "scaler": None, "ema": None, **others}
    loading, update = Loading(directory), None
    # What needs memory or may be refused comes before the first change.
    with refusing(directory / _TREE):
        if is_sharded(model) and not tree["is_sharded"]:
            raise BadCheckpoint(
                f"the checkpoint {directory} is of a model that was not sharded, and this one is. Go on with it "
                "without `fully_shard`, or give another folder for checkpoints."
            )
        for name, value in objects.items():
            _check_class(directory, name, tree.get(name), value)
        rest = TensorDecoder(TensorFile(directory / "rest.safetensors"), device_of(model))
        random_state, progress = _own_values(directory, tree, rest)
        loading.add_module(directory / "model.safetensors", model)
        states: list[tuple[Any, Any, str]] = []
        for name, value in objects.items():
            if name == "ema" and isinstance(value, torch.nn.Module):
                loading.add_module(directory / "ema.safetensors", value, "moving average")
            elif value is not None and name != "optimizer":
                file = TensorFile(directory / ("ema.safetensors" if name == "ema" else "rest.safetensors"))
                states.append((value, TensorDecoder(file, device_of(model)).decode(tree[name]["state"]), name))
        if optimizer is not None:
            update = _OptimizerState(loading, tree, model, optimizer)
        check(progress)
        if extra:
            saved = progress.get("extra")
            if not isinstance(saved, dict):
                raise BadCheckpoint("the checkpoint holds no states of further objects")
            states += [(value, saved[name], name) for name, value in extra.items() if name in saved]
        # An average is too large for a copy to go back to, so it comes last.
        _put_all(sorted(states, key=lambda state: state[2] == "ema"), loading)
    loading.copy()
    # After the scheduler: some set learning rates when they are loaded, and those of the optimizer are the true ones.
    if update is not None:
        update.apply()
    if random_state is not None:
        random_state.restore()
    return progress


class Parameters:
    """The parameters and buffers of a model, to be kept on disk or in host memory and put back."""

    _FILE = "model.safetensors"

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def write(self, directory: Path) -> None:
        """Writes them into a directory."""
        write(self._model, directory / self._FILE)

    def read(self, directory: Path, model: torch.nn.Module | None = None) -> None:
        """Puts what `write` wrote into a model, the own one if none is given; refuses what is of another model."""
        read(self._model if model is None else model, directory / self._FILE)

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
        """Puts copies into a model, the own one if none is given; refuses those of another model."""
        live = self._tensors(self._model if model is None else model)
        saved = {name: (copy.dtype, tuple(copy.shape)) for name, copy in copies.items()}
        compare("the best parameters kept in memory are", "model", saved, live)
        with torch.no_grad():
            for name, copy in copies.items():
                live[name].copy_(copy)

    @staticmethod
    def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        encoder = TensorEncoder()
        for name, (_, value) in entries_of(model).items():
            if isinstance(value, torch.Tensor):
                encoder.tensor(value, name)
        return encoder.tensors


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether processes hold parts of the parameters."""
    return any(is_shard(parameter) for parameter in model.parameters())


class _OptimizerState:
    """What an optimizer will take over of a checkpoint; what it lacks is made here, before anything is changed."""

    def __init__(self, loading: Loading, tree: dict[str, Any], model: torch.nn.Module, optimizer: Any) -> None:
        saved = tree["optimizer"]
        self._loading = loading
        self._optimizer = optimizer
        self._file = TensorFile(loading.source / "optimizer.safetensors")
        self._home = saved["home"]
        self._whole: Any = None
        self._states: list[tuple[Any, Any]] = []
        self._groups: list[dict[str, Any]] = []
        decoder = TensorDecoder(self._file, _home_of(optimizer))
        if not tree["is_sharded"] and not _is_plain(optimizer):
            self._whole = decoder.decode(saved["state"])
            return
        self._groups = decoder.decode(saved["state"]["param_groups"])
        self._check_groups(saved["names"], _names(model, optimizer.param_groups))
        checks.check_groups(self._groups, optimizer, "the optimizer's parameter group")
        # Live tensors that can take over values are noted for that; all others are made and filled.
        by_number = {
            number: (parameter, group, kept)
            for group, kept in zip(optimizer.param_groups, self._groups, strict=True)
            for parameter, number in zip(group["params"], kept["params"], strict=True)
        }
        states = saved["state"]["state"]
        for number, entries in states["__dict__"] if "__dict__" in states else states.items():
            if number not in by_number:
                if type(number) is not str and type(optimizer).__module__.startswith("torch.optim"):
                    raise BadCheckpoint(f"the optimizer's state names parameter {number!r}, which doesn't exist")
                # What an optimizer keeps for no parameter in particular.
                self._states.append((number, TensorDecoder(self._file).decode(entries)))
                continue
            parameter, group, kept = by_number[number]
            if "__dict__" in entries:
                state = TensorDecoder(self._file, parameter.device).decode(entries)
            else:
                state = {key: self._entry(key, tag, parameter, group) for key, tag in entries.items()}
            checks.check_entries(state, parameter, optimizer, kept, f"the optimizer's state of parameter {number}")
            self._states.append((parameter, state))

    def apply(self) -> None:
        """Gives the optimizer its state, the tensors of which have their values already."""
        if self._whole is not None:
            self._optimizer.load_state_dict(self._whole)
            return
        state = self._optimizer.state
        state.clear()
        state.update(self._states)
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

    def _check_groups(self, names: list[list[str]], live: list[list[str]]) -> None:
        problem = ""
        if len(live) != len(self._groups):
            problem = f"it has {len(self._groups)} parameter groups, and {len(live)} are here"
        for index, (here, group) in enumerate(zip(live, self._groups, strict=False)):
            there = names[index] if len(names) == len(self._groups) else []
            if len(here) != len(group["params"]):
                problem = problem or (
                    f"its parameter group {index} has {len(group['params'])} parameters, and {len(here)} are here"
                )
            elif here != there:
                problem = problem or f"its parameter group {index} is of {there[:3]}..., and {here[:3]}... are here"
        if problem:
            raise BadCheckpoint(f"the checkpoint {self._loading.source} is of another optimizer: {problem}. {ADVICE}")

    def _entry(self, key: str, tag: Any, parameter: torch.Tensor, group: dict[str, Any]) -> Any:
        """A value in the state of a parameter: a tensor that is there already, or a new one."""
        if not isinstance(tag, dict) or not {"__tensor__", "__shard__"} & tag.keys():
            return TensorDecoder(self._file, parameter.device).decode(tag)
        old = self._optimizer.state.get(parameter, {}).get(key)
        dtype, shape = described(self._file, tag)
        is_there = isinstance(old, torch.Tensor) and (old.dtype, tuple(old.shape)) == (dtype, shape)
        if "__shard__" in tag:
            if shape != tuple(parameter.shape):
                raise BadCheckpoint(
                    f"the optimizer's state {key!r} has the shape {[*shape]} in the checkpoint, and "
                    f"{[*parameter.shape]} was expected"
                )
            value = old if is_there else torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            self._loading.shards[f"optimizer.{tag['__shard__']}"] = value.detach()
            return value
        if is_there:
            self._loading.copies.append((self._file, tag["__tensor__"], old))
            return old
        # Beside the parameter, unless it was elsewhere when it was saved; counters as PyTorch places them.
        if key == "step":
            is_beside = bool(group.get("capturable") or group.get("fused"))
        else:
            is_beside = tag.get("device", "cpu") == self._home
        device = parameter.device if is_beside else torch.device("cpu")
        return TensorDecoder(self._file, device).decode({**tag, "device": "any"})


def _is_plain(optimizer: Any) -> bool:
    """Whether PyTorch's own way of loading applies, which can be done here without a second copy of the state."""
    return (
        isinstance(optimizer, torch.optim.Optimizer)
        and type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
        and type(optimizer).state_dict is torch.optim.Optimizer.state_dict
        and "load_state_dict" not in vars(optimizer)
        and not internals.state_hooks(optimizer)
    )


def _home_of(optimizer: Any) -> torch.device:
    """Where the parameters of an optimizer are."""
    groups = getattr(optimizer, "param_groups", [])
    return next((parameter.device for group in groups for parameter in group["params"]), torch.device("cpu"))


def _names(model: torch.nn.Module, groups: list[dict[str, Any]]) -> list[list[str]]:
    """The model's names for the parameters of each group; "" for one that it doesn't have."""
    names = {id(parameter): plain_name(name) for name, parameter in unwrapped(model).named_parameters()}
    return [[names.get(id(parameter), "") for parameter in group["params"]] for group in groups]


def _class_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _state_of(value: Any, part: str) -> Any:
    if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
        raise BadInput(
            f"the {part}, a {_class_of(value)}, has no state_dict and load_state_dict, so a checkpoint can't hold it. "
            "Give it both, or step it in your own code and store its state with the progress."
        )
    return value.state_dict()


def _own_file(directory: Path) -> Path:
    return directory / f"process-{rank():05d}.json"


def _own_values(
    directory: Path, tree: dict[str, Any], rest: TensorDecoder
) -> tuple[RandomState | None, dict[str, Any]]:
    """(random states of this process, None where as many processes don't read as wrote; progress)."""
    is_same = tree["num_processes"] == num_ranks()
    if is_same and rank():
        path = _own_file(directory)
        tree, rest = _read_json(path), TensorDecoder(TensorFile(path.with_suffix(".safetensors")))
    random_state = RandomState(rest.decode(tree["random"]["state"])) if is_same else None
    if random_state is not None:
        checks.check_random(random_state)
    progress = rest.decode(tree["progress"]["state"])
    if not isinstance(progress, dict):
        raise BadCheckpoint(f"{directory / _TREE} holds no progress")
    return random_state, progress


def _put_all(states: list[tuple[Any, Any, str]], loading: Loading) -> None:
    """Has objects take over their states, and modules what is no tensor of theirs: all of them, or none."""
    states = [state for state in states if state[1] is not None]
    for value, state, part in states:
        where = f"the state of the {part}"
        if type(value).__module__.startswith("torch."):
            checks.check_like(state, value.state_dict(), where)
        if part == "scaler" and isinstance(state, dict):
            checks.check_scaler(state, where)
        if part == "scheduler" and isinstance(state, dict):
            checks.check_scheduler(state, value, where)
    before = [(value, copy.deepcopy(value.state_dict())) for value, _, part in states if part != "ema"]
    try:
        for value, state, part in states:
            try:
                value.load_state_dict(state)
            except Exception as error:
                raise BadCheckpoint(
                    f"the state of the {part} in {loading.source} doesn't fit: {error}. {ADVICE}"
                ) from error
        loading.load_others()
    except BaseException:
        for value, state in before:
            value.load_state_dict(state)
        raise


def _check_class(directory: Path, part: str, saved: dict[str, Any] | None, value: Any) -> None:
    what = {"ema": "moving average", "scaler": "gradient scaler"}.get(part, part)
    live = unwrapped(value) if isinstance(value, torch.nn.Module) else value
    problem = ""
    if saved is None and value is not None:
        problem = f"holds no {what}, and a {_class_of(value)} was given"
    elif saved is not None and value is None:
        problem = f"holds a {what}, a {saved['class']}, and none was given"
    elif saved is not None and saved["class"] != _class_of(live):
        problem = f"is of another {what}: a {saved['class']}, and a {_class_of(live)} was given"
    if problem:
        raise BadCheckpoint(f"the checkpoint {directory} {problem}. {ADVICE}")


def _read_tree(directory: Path) -> dict[str, Any]:
    path = directory / _TREE
    content = _read_json(path)
    if content.get("format") != FORMAT or not isinstance(content.get("model"), dict):
        raise BadCheckpoint(f"{path} isn't the state of a run that memfit wrote")
    if content.get("version") != VERSION:
        raise BadCheckpoint(f"{path} has version {content.get('version')!r}, and this memfit reads version {VERSION}")
    return content


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_plain(path))
    except OSError as error:
        raise BadCheckpoint(f"{path} can't be read: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        raise BadCheckpoint(f"{path} is no JSON") from None
    if not isinstance(content, dict):
        raise BadCheckpoint(f"{path} isn't the state of a run that memfit wrote")
    return content
