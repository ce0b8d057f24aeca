"""The state of a run of several processes: written by all of them together, read by as many as there are next time.

Processes that hold the whole model each (DDP) have one state, which the first of them writes as a process on its own
would. Of a sharded model (FSDP2) each process holds a part of every tensor. Those go through PyTorch's distributed
checkpoint, which finds the parts that each process needs however many there were and are; in the safetensors format,
because PyTorch's own one begins with a pickled file. All else is plain data, and the first process writes it as JSON.
What differs between processes, random states and the position in the data, is in one file for each of them.
"""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from memfit.adapters.torch.guarding import state
from memfit.adapters.torch.guarding.checkpoint_tensors import TensorFile, write_tensors
from memfit.adapters.torch.guarding.checkpoint_tree import Decoder, Encoder, named_dtype
from memfit.adapters.torch.guarding.snapshot import RandomState
from memfit.adapters.torch.guarding.state_checks import check_random
from memfit.core.errors import BadInput
from memfit.core.guarding import BadCheckpoint
from memfit.core.plain_files import read_plain

FORMAT = "memfit.sharded_state"
VERSION = 1
_TREE = "sharded.json"
_REST = "sharded_rest.safetensors"
_SHARDS = "shards"


def save(
    directory: Path,
    *,
    model: torch.nn.Module,
    optimizer: Any = None,
    progress: dict[str, Any] | None = None,
    **others: Any,
) -> None:
    """Writes the state of a run into a directory that all processes see; each of them calls this.

    Args:
        directory: is there, and empty.
        model: the model; may be wrapped.
        optimizer: over its parameters.
        progress: anything else, made of plain data and tensors; each process may have its own.
        others: "scheduler", "scaler" and "ema", as `state.save` takes them.

    Raises:
        BadCheckpoint: something isn't plain data.
        OSError: the files can't be written; on all processes where the parts of tensors can't.
    """
    others = {name: value for name, value in others.items() if value is not None}
    if is_sharded(model):
        _save_shards(directory, model, optimizer, others)
    elif _rank() == 0:
        state.save(directory, model=model, optimizer=optimizer, progress=progress, **others)
    if _num_ranks() > 1 or is_sharded(model):
        _write_own(directory, {"random": state.random_tree(RandomState.now()), "progress": progress or {}})


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
    progress of the first, and keep the random states that they have.

    Args:
        directory: that `save` has written.
        model: and the others are those that `save` was given, or such as they were.
        optimizer: the same.
        extra: further objects by name, whose states are in `progress["extra"]`.
        check: called with `progress` before anything is changed; may refuse it.
        others: as for `save`.

    Raises:
        BadCheckpoint: the files are of other objects, or damaged. Nothing has changed then.
    """
    others = {name: value for name, value in others.items() if value is not None}
    if not (directory / _TREE).exists():
        if is_sharded(model):
            raise BadCheckpoint(
                f"the checkpoint {directory} is of a model that was not sharded, and this one is. Go on with it "
                "without `fully_shard`, or give another folder for checkpoints."
            )
        if _num_ranks() == 1 and not _own_file(directory, 0).exists():
            return state.load(directory, model=model, optimizer=optimizer, extra=extra, check=check, **others)
        random_state, progress = _read_own(directory)
        check(progress)
        random_state = random_state or RandomState.now()
        # The states of further objects are this process's own.
        state.load(directory, model=model, optimizer=optimizer, **others)
        with state._refusing(directory):
            state.put_all(state.extra_states(extra, progress), directory)
    else:
        random_state, progress = _read_own(directory)
        check(progress)
        _load_shards(directory, model, optimizer, others, state.extra_states(extra, progress))
    if random_state is not None:
        random_state.restore()
    return progress


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether processes hold parts of the parameters."""
    return any(_is_part(parameter) for parameter in model.parameters())


# What each process has for itself.


def _own_file(directory: Path, rank: int) -> Path:
    return directory / f"process-{rank:05d}.json"


def _write_own(directory: Path, content: dict[str, Any]) -> None:
    path = _own_file(directory, _rank())
    encoder = Encoder()
    tree = {"num_processes": _num_ranks(), **{name: encoder.encode(part, name) for name, part in content.items()}}
    write_tensors(path.with_suffix(".safetensors"), encoder.tensors)
    path.write_text(json.dumps(tree, allow_nan=False), encoding="utf-8")


def _read_own(directory: Path) -> tuple[RandomState | None, dict[str, Any]]:
    """(random states, None where as many processes don't read as wrote; progress)."""
    tree = _read_json(_own_file(directory, 0))
    is_same = tree.get("num_processes") == _num_ranks()
    path = _own_file(directory, _rank() if is_same else 0)
    tree = _read_json(path)
    with state._refusing(path.parent):
        decoder = Decoder(TensorFile(path.with_suffix(".safetensors")))
        random_state = state.random_from_tree(decoder.decode(tree["random"])) if is_same else None
        if random_state is not None:
            check_random(random_state)
        progress = decoder.decode(tree["progress"])
        if not isinstance(progress, dict):
            raise BadCheckpoint(f"{path} holds no progress")
    return random_state, progress


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_plain(path))
    except OSError as error:
        raise BadCheckpoint(f"{path} can't be read: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        raise BadCheckpoint(f"{path} is no JSON") from None
    if not isinstance(content, dict):
        raise BadCheckpoint(f"{path} isn't what memfit wrote")
    return content


# Parts of tensors.


def _save_shards(directory: Path, model: torch.nn.Module, optimizer: Any, others: dict[str, Any]) -> None:
    shards: dict[str, torch.Tensor] = {}
    encoder = Encoder(skips_functions=True)
    parts: dict[str, Any] = {"model": _split(_tensors_of(model), "model", shards, encoder)}
    if optimizer is not None:
        parts["optimizer"] = _split_optimizer(model, optimizer, shards, encoder)
    for name, value in others.items():
        if _is_average(name, value):
            parts[name] = {"class": _class_of(value), **_split(_tensors_of(value), name, shards, encoder)}
        else:
            parts[name] = {"class": _class_of(value), "state": encoder.encode(state._state_of(value, name), name)}
    _write_shards(directory / _SHARDS, shards)
    if _rank() == 0:
        write_tensors(directory / _REST, encoder.tensors)
        content = {"format": FORMAT, "version": VERSION, **parts}
        (directory / _TREE).write_text(json.dumps(content, allow_nan=False), encoding="utf-8")


def _load_shards(
    directory: Path,
    model: torch.nn.Module,
    optimizer: Any,
    others: dict[str, Any],
    extra: list[tuple[Any, Any, str]],
) -> None:
    parts = _read_json(directory / _TREE)
    if parts.get("format") != FORMAT or parts.get("version") != VERSION:
        raise BadCheckpoint(f"{directory / _TREE} has version {parts.get('version')!r}, and {VERSION} was expected")
    given = {"optimizer": optimizer, **others}
    shards: dict[str, torch.Tensor] = {}
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    states: dict[str, Any] = {}
    update = None
    # What needs memory or may be refused comes before the first change.
    with state._refusing(directory):
        decoder = Decoder(TensorFile(directory / _REST), _device_of(model))
        _check_names(directory, parts, given)
        copies += _join(directory, "model", parts["model"], _tensors_of(model), shards, decoder)
        for name, value in given.items():
            if name == "optimizer":
                update = None if value is None else _LoadedOptimizer(directory, parts[name], model, value, decoder)
            elif _is_average(name, value):
                copies += _join(directory, name, parts[name], _tensors_of(value), shards, decoder)
            elif value is not None:
                states[name] = decoder.decode(parts[name]["state"])
        state.put_all([*extra, *((given[name], value, name) for name, value in states.items())], directory)
    _read_shards(directory / _SHARDS, {**shards, **(update.shards if update is not None else {})})
    with torch.no_grad():
        for live, saved in copies:
            live.copy_(saved)
    # After the scheduler: some set learning rates when they are loaded, and those of the optimizer are the true ones.
    if update is not None:
        update.apply()


def _write_shards(directory: Path, shards: dict[str, torch.Tensor]) -> None:
    try:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

        writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    except (ImportError, TypeError):
        raise BadInput(
            "checkpoints of sharded models need a PyTorch that writes parts of tensors as safetensors, and "
            f"{torch.__version__} doesn't. Install a newer one, or train without checkpoints."
        ) from None
    _distributed("save", shards, storage_writer=writer)


def _read_shards(directory: Path, shards: dict[str, torch.Tensor]) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    _distributed("load", shards, storage_reader=HuggingFaceStorageReader(str(directory)))


def _distributed(verb: str, shards: dict[str, torch.Tensor], **options: Any) -> None:
    import torch.distributed.checkpoint as distributed_checkpoint

    try:
        with warnings.catch_warnings():
            # It says that there is only one process where that is so.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            getattr(distributed_checkpoint, verb)(shards, no_dist=not _is_distributed(), **options)
    except distributed_checkpoint.api.CheckpointException as error:
        # It is raised on all processes, with what happened on each.
        causes = [cause for cause, _ in error.failures.values()]
        failed = next((cause for cause in causes if isinstance(cause, OSError)), None)
        if failed is not None:
            raise OSError(failed.errno, f"{failed.strerror or failed}, on process {min(error.failures)}") from error
        raise


def _split(
    tensors: dict[str, Any], part: str, shards: dict[str, torch.Tensor], encoder: Encoder
) -> dict[str, dict[str, Any]]:
    """What JSON says about tensors; those that are parts of one are put beside."""
    sharded: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in tensors.items():
        if _is_part(value):
            shards[f"{part}.{name}"] = value.detach()
            sharded[name] = _description(value)
        else:
            rest[name] = encoder.encode(value, f"{part}.{name}")
    return {"sharded": sharded, "rest": rest}


def _join(
    directory: Path,
    part: str,
    saved: dict[str, Any],
    live: dict[str, Any],
    shards: dict[str, torch.Tensor],
    decoder: Decoder,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Live tensors that take over parts go to `shards`; for the others, what to copy into them."""
    rest = {name: decoder.decode(tag) for name, tag in saved["rest"].items()}
    descriptions = {name: (named_dtype(dtype), tuple(shape)) for name, (dtype, shape) in saved["sharded"].items()}
    descriptions |= {name: (t.dtype, tuple(t.shape)) for name, t in rest.items() if isinstance(t, torch.Tensor)}
    tensors = {name: value for name, value in live.items() if isinstance(value, torch.Tensor)}
    state._compare(f"the checkpoint {directory} is", part, descriptions, tensors)
    shards |= {f"{part}.{name}": tensors[name].detach() for name in saved["sharded"]}
    return [(tensors[name], value) for name, value in rest.items() if name in tensors]


def _split_optimizer(
    model: torch.nn.Module, optimizer: Any, shards: dict[str, torch.Tensor], encoder: Encoder
) -> dict[str, Any]:
    names = _names_of(model)
    groups = [
        {**group, "params": [_name_of(names, parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    states = {
        _name_of(names, parameter): _split(entries, f"optimizer.{_name_of(names, parameter)}", shards, encoder)
        for parameter, entries in optimizer.state.items()
    }
    return {"class": _class_of(optimizer), "groups": encoder.encode(groups, "optimizer.groups"), "states": states}


class _LoadedOptimizer:
    """An optimizer and what it will take over; what it lacks is made here, before anything is changed."""

    def __init__(
        self, directory: Path, saved: dict[str, Any], model: torch.nn.Module, optimizer: Any, decoder: Decoder
    ) -> None:
        self._optimizer = optimizer
        self._groups = decoder.decode(saved["groups"])
        self._states: dict[torch.Tensor, dict[str, Any]] = {}
        self.shards: dict[str, torch.Tensor] = {}
        names = _names_of(model)
        live = [[_name_of(names, parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        for index, (here, group) in enumerate(zip(live, self._groups, strict=False)):
            if here != group["params"]:
                raise BadCheckpoint(
                    f"the checkpoint {directory} is of another optimizer: its parameter group {index} is of "
                    f"{group['params'][:3]}..., and {here[:3]}... are here. Make it as it was made for that run."
                )
        if len(live) != len(self._groups):
            raise BadCheckpoint(
                f"the checkpoint {directory} is of another optimizer: it has {len(self._groups)} parameter groups, and "
                f"{len(live)} are here. Make it as it was made for that run."
            )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = _name_of(names, parameter)
                if name in saved["states"]:
                    self._states[parameter] = self._entries(name, parameter, saved["states"][name], decoder)

    def _entries(self, name: str, parameter: torch.Tensor, saved: dict[str, Any], decoder: Decoder) -> dict[str, Any]:
        entries = {key: decoder.decode(tag) for key, tag in saved["rest"].items()}
        for key, (dtype_name, shape) in saved["sharded"].items():
            dtype = named_dtype(dtype_name)
            if tuple(shape) != tuple(parameter.shape):
                raise BadCheckpoint(
                    f"the state {key!r} of {name!r} has the shape {shape} in the checkpoint, and "
                    f"{list(parameter.shape)} was expected"
                )
            old = self._optimizer.state.get(parameter, {}).get(key)
            if not isinstance(old, torch.Tensor) or (old.dtype, old.shape) != (dtype, parameter.shape):
                old = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            entries[key] = old
            self.shards[f"optimizer.{name}.{key}"] = old.detach()
        return entries

    def apply(self) -> None:
        """Gives the optimizer its state."""
        self._optimizer.state.clear()
        self._optimizer.state.update(self._states)
        for live, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            live.update({key: value for key, value in saved.items() if key != "params"})


def _check_names(directory: Path, parts: dict[str, Any], given: dict[str, Any]) -> None:
    for name in sorted({*parts, *given} - {"format", "version", "model"}):
        state._check_class(directory, name, parts.get(name), given.get(name))


def _is_average(name: str, value: Any) -> bool:
    """Whether it is a module whose tensors may be parts, as the model's are."""
    return name == "ema" and isinstance(value, torch.nn.Module)


def _tensors_of(module: torch.nn.Module) -> dict[str, Any]:
    return {state._plain(name): value for name, value in state.unwrapped(module).state_dict().items()}


def _names_of(model: torch.nn.Module) -> dict[int, str]:
    return {id(p): state._plain(name) for name, p in state.unwrapped(model).named_parameters()}


def _name_of(names: dict[int, str], parameter: torch.Tensor) -> str:
    if id(parameter) not in names:
        raise BadInput(
            "the optimizer has a parameter that the model doesn't have, so a checkpoint can't name it. Make the "
            "optimizer from model.parameters(), after `fully_shard`."
        )
    return names[id(parameter)]


def _description(tensor: torch.Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _is_part(value: Any) -> bool:
    # Before `torch.distributed` is in use nothing is a DTensor, and importing it takes a second.
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh") and hasattr(value, "placements")


def _device_of(model: torch.nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _class_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank() -> int:
    return dist.get_rank() if _is_distributed() else 0


def _num_ranks() -> int:
    return dist.get_world_size() if _is_distributed() else 1
