"""Why a module can't be computed again: what it does besides turning inputs into outputs.

Computing a module again runs its code a second time. That must change nothing: neither what it was given, nor what it
remembers. Each check looks at a call before and after, on shapes, where nothing has values but everything has identity.
"""

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

CHANGES_INPUT = "changes its input in place"
INPUT_CHANGED_LATER = "its input is changed in place after it has run"
CHANGES_BUFFER = "changes a buffer in its forward pass"
REMEMBERS = "remembers something from call to call ({name})"
FILLS_ARGUMENT = "changes an object that it is given ({kind}), which computing it again would do twice"
ARGUMENT_CHANGED_LATER = "an object that it is given ({kind}) changes after it has run"
STRANGE_OUTPUT = "returns something other than tensors ({kind})"
COMPILED = "is compiled"
NO_GRADIENTS = "runs without gradients"
DRAWS_ELSEWHERE = "draws random numbers of Python's or numpy's own, which computing it again would draw anew"
NO_BACKWARD = "nothing flows back through it"

# Statistics that are put back after a second forward pass.
RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CONTAINERS = (list, dict, set)
_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Before:
    """What a module and its arguments were before a call."""

    state: dict[str, Any]
    generators: int
    held: tuple[tuple[str, Any, tuple[int, ...]], ...]


def refused_from_the_start(module: torch.nn.Module) -> str:
    """Why no call of `module` can be computed again, or ""."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    optimized = getattr(frames, "OptimizedModule", None)
    if isinstance(module, torch.jit.ScriptModule) or (optimized is not None and isinstance(module, optimized)):
        return COMPILED
    return COMPILED if getattr(module, "_compiled_call_impl", None) is not None else ""


def before_call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Before:
    """Takes down what a call must leave alone."""
    held = tuple((type(value).__name__, value, _tensor_ids(value)) for value in _mutable((*args, *kwargs.values())))
    return Before(_state(module), _generators(), held)


def after_call(module: torch.nn.Module, before: Before, out: Any) -> str:
    """Why the call that just ended can't be computed again, or ""."""
    changed = changed_object(before)
    if changed:
        return FILLS_ARGUMENT.format(kind=changed)
    state = _state(module)
    for name, value in before.state.items():
        if state.get(name) != value:
            return CHANGES_BUFFER if name in module._buffers else REMEMBERS.format(name=name)
    if _generators() != before.generators:
        return DRAWS_ELSEWHERE
    strange = _strange(out)
    return STRANGE_OUTPUT.format(kind=strange) if strange else ""


def _generators() -> int:
    """A mark of the generators that PyTorch doesn't put back."""
    numpy = sys.modules.get("numpy")
    drawn: tuple[Any, ...] = ()
    if numpy is not None:
        _, keys, position, *_ = numpy.random.get_state()
        drawn = (keys.tobytes(), position)
    return hash((random.getstate(), drawn))


def changed_object(before: Before) -> str:
    """The class of the first argument that holds other tensors by now, or ""."""
    return next((kind for kind, value, ids in before.held if _tensor_ids(value) != ids), "")


def _state(module: torch.nn.Module) -> dict[str, Any]:
    """Numbers, sizes of containers and identities of buffers that the module itself holds."""
    found: dict[str, Any] = {}
    for name, value in module.__dict__.items():
        kind = type(value)
        if kind is int or kind is float:
            found[name] = value
        elif kind in _CONTAINERS and not name.startswith("_"):
            found[name] = len(value)
    for name, value in module._buffers.items():
        if name not in RUNNING_STATISTICS:
            found[name] = id(value)
    return found


def _mutable(values: tuple[Any, ...]) -> list[Any]:
    """The arguments that a call could change without a trace: containers, and objects that hold something."""
    return [
        value
        for value in values
        if not isinstance(value, (*_PLAIN, torch.Tensor, torch.nn.Module))
        and (isinstance(value, _CONTAINERS) or (hasattr(value, "__dict__") and not callable(value)))
    ]


def _tensor_ids(value: Any, depth: int = _DEPTH) -> tuple[int, ...]:
    """Identities of all tensors within reach."""
    if isinstance(value, torch.Tensor):
        return (id(value),)
    if depth == 0 or isinstance(value, (*_PLAIN, torch.nn.Module, type)):
        return ()
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple | set):
        parts = list(value)
    elif hasattr(value, "__dict__") and not callable(value):
        parts = list(vars(value).values())
    return tuple(number for part in parts for number in _tensor_ids(part, depth - 1))


def _strange(value: Any) -> str:
    """The class of the first thing in an output that is no tensor, container of tensors or plain value; or ""."""
    if isinstance(value, (*_PLAIN, torch.Tensor, PackedSequence)):
        return ""
    if isinstance(value, Mapping):
        parts: Any = value.values()
    elif isinstance(value, list | tuple | set):
        parts = value
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in fields(value)]
    else:
        return type(value).__name__
    return next((name for name in map(_strange, parts) if name), "")
