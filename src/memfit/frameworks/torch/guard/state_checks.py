"""Whether what a checkpoint holds can be taken over, found out before anything is.

Hashes say that a file is as it was written, not who wrote it. A learning rate that is text, or a random state of the
wrong length, would be noticed only by what uses it, when parameters have changed long since. Random states are tried
out on generators of their own; states of optimizers and schedulers are compared with the live ones.
"""

import copy
import inspect
import random
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import torch

from memfit.core.guarding import BadCheckpoint
from memfit.frameworks.torch.guard.snapshot import RandomState

_LIMIT = 2**63
_NUMPY_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
# Entries of the states of PyTorch's optimizers that are single numbers, and those that have the parameter's shape.
_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
_LIKE_THE_PARAMETER = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer"}) | frozenset(
    {"square_avg", "acc_delta", "grad_avg", "sum", "prev", "step_size", "ax"}
)

_TAKERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "Python": lambda states: random.Random(0).setstate(states["python"]),
    "PyTorch": lambda states: torch.Generator().set_state(states["torch_cpu"]),
    "CUDA": lambda states: [
        torch.Generator("cuda").set_state(state) for state in states["cuda"][: torch.cuda.device_count()]
    ],
    "NumPy": lambda states: numpy.random.RandomState(0).set_state(states["numpy"]),
}
"""Generators of their own that take the states of a `RandomState`."""


def check_random(state: RandomState) -> None:
    """Refuses random states that no generator takes."""
    for whose, take in _TAKERS.items():
        _tried(f"the state of {whose}'s random numbers", partial(take, state.states))


def check_generators(states: Any) -> None:
    """Refuses states of the generators of a loader that none takes, and epochs that are no numbers."""
    if not isinstance(states, dict):
        raise BadCheckpoint("the states of the loader's generators are malformed")
    for name, state in states.items():
        what = f"the state of the generator {name!r}"
        if isinstance(state, torch.Tensor):
            _tried(what, partial(torch.Generator().set_state, state))
        elif isinstance(state, tuple):
            _tried(what, partial(random.Random(0).setstate, state))
        elif isinstance(state, dict) and state.get("bit_generator") in _NUMPY_GENERATORS:
            _tried(what, partial(setattr, getattr(numpy.random, state["bit_generator"])(), "state", state))
        elif type(state) is not int or not 0 <= state < _LIMIT:
            raise BadCheckpoint(f"{what} can't be one")


def check_groups(saved: Any, optimizer: Any, where: str) -> None:
    """Refuses parameter groups whose options aren't like the live ones, or which the optimizer's kind refuses."""
    live = optimizer.param_groups
    numbers = [number for group in saved for number in group["params"]]
    if numbers != list(range(len(numbers))) or any(type(number) is not int for number in numbers):
        raise BadCheckpoint(f"{where} doesn't number the parameters in their order")
    for index, (group, own) in enumerate(zip(saved, live, strict=True)):
        check_like({**group, "params": None}, {**own, "params": None}, f"{where} {index}")
        like = next(iter(own["params"]), torch.zeros(1))
        if _made_entries(optimizer, own, like) is not None and _made_entries(optimizer, group, like) is None:
            raise BadCheckpoint(f"{where} {index} has options that {type(optimizer).__name__} can't use")


def check_entries(entries: Any, parameter: torch.Tensor, optimizer: Any, group: dict[str, Any], where: str) -> None:
    """Refuses the state of a parameter that PyTorch's own optimizers couldn't use; those of others are not known."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        return
    missing = sorted((_made_entries(optimizer, group, parameter) or set()) - set(entries)) if entries else []
    if missing:
        raise BadCheckpoint(f"{where} lacks {missing[0]!r}, which {kind.__name__} needs")
    for key, value in entries.items():
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        is_single = key in _NUMBERS and _is_number(value) and (key != "step" or float(value) >= 0)
        is_none_yet = key == "momentum_buffer" and value is None
        is_unlike = key in _LIKE_THE_PARAMETER and not is_none_yet and shape != tuple(parameter.shape)
        if is_unlike or (key in _NUMBERS and not is_single):
            described = f"a tensor of shape {shape}" if shape is not None else f"a {type(value).__name__}"
            raise BadCheckpoint(f"{where}.{key} is {described}, which {kind.__name__} can't use")


def check_like(saved: Any, live: Any, where: str) -> None:
    """Refuses a state that has something else where the live object has a number, text or a list of numbers."""
    if live is None or (saved is None and isinstance(live, bool)):
        return
    if isinstance(live, bool | str):
        is_right = isinstance(saved, bool if isinstance(live, bool) else str)
    elif _is_number(live):
        is_right = _is_number(saved)
    elif isinstance(live, torch.Tensor):
        is_right = isinstance(saved, torch.Tensor) and saved.shape == live.shape
    elif isinstance(live, list | tuple):
        is_right = isinstance(saved, list | tuple)
        if is_right and all(map(_is_number, live)):
            is_right = not live or len(saved) == len(live)
        for index, (part, own) in enumerate(zip(saved, live, strict=False) if is_right else ()):
            check_like(part, own, f"{where}.{index}")
    elif isinstance(live, Mapping):
        is_right = isinstance(saved, Mapping)
        for key in live if is_right else ():
            if key in saved:
                check_like(saved[key], live[key], f"{where}.{key}")
    else:
        is_right = True
    if not is_right:
        raise BadCheckpoint(f"{where} is a {type(saved).__name__}, and a {type(live).__name__} is here")


def check_scaler(state: Mapping[str, Any], where: str) -> None:
    """Refuses the state of a gradient scaler that could not scale by it."""
    for key in ("growth_interval", "_growth_tracker"):
        if type(state.get(key, 0)) is not int:
            raise BadCheckpoint(f"{where}.{key} is no whole number")
    _tried(f"{where}.scale", lambda: torch.full((), float(state.get("scale", 1.0)), dtype=torch.float32))


def check_scheduler(state: Mapping[str, Any], scheduler: Any, where: str) -> None:
    """Refuses the state of a scheduler of PyTorch that fails at the next step by it, tried on a copy."""
    kind, plain = type(scheduler), torch.optim.lr_scheduler.LRScheduler
    # Others hold schedulers, functions or metrics; what a copy does may be seen by the original.
    is_plain = kind.__module__ == plain.__module__ and isinstance(scheduler, plain)
    if not is_plain or (kind.step, kind.load_state_dict) != (plain.step, plain.load_state_dict):
        return
    tried = copy.copy(scheduler)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in tried.optimizer.param_groups]
    tried.optimizer = SimpleNamespace(param_groups=copy.deepcopy(groups), step=None)
    vars(tried).update(copy.deepcopy(dict(state)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tried.step()
    except ValueError:
        # The last step has been taken.
        return
    except Exception as error:
        raise BadCheckpoint(f"{where} is invalid: {error!r}") from None


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    if isinstance(value, bool) or not isinstance(value, int | float | numpy.number):
        return False
    return not isinstance(value, int) or -_LIMIT <= value < _LIMIT


def _made_entries(optimizer: Any, group: dict[str, Any], like: torch.Tensor) -> set[str] | None:
    """Names in the state that an optimizer of PyTorch makes for a parameter by these options; None where it fails."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        return None
    known = set(inspect.signature(kind).parameters) - {"params"}
    options = {key: copy.copy(value) for key, value in group.items() if key in known}
    tried = torch.nn.Parameter(torch.zeros([2] * min(like.dim(), 8), device=like.device))
    tried.grad = torch.ones_like(tried)
    try:
        single = kind([tried], **options)
        single.step()
    except Exception:
        return None
    return set(single.state[tried])


def _tried(what: str, action: Callable[[], Any]) -> None:
    try:
        action()
    except Exception as error:
        raise BadCheckpoint(f"{what} is invalid: {error}") from None
