"""Whether a model is really gone: what a piece of work has left behind, by whom it is held, and all caches emptied.

Weak references to one model aren't enough. A training leaves an optimizer, a loss with its graph, or a list of
parameters behind, each of which holds the memory of a model that is itself gone. So everything that Python knows of is
looked at, before and after: modules, parameters, and tensors that have a graph. Tensors that are data are no concern:
a data set that is loaded once is there for the next trial.

Who holds an object is a path from it to a name that a person can look for: references are followed backwards, breadth
first, until a variable of a module or of a running function is met: "the variable kept of module __main__, kept[0]".
What only C++ holds has no such path.
"""

import gc
import inspect
import os
import random
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from memfit.core.units import format_size
from memfit.frameworks.torch.guard.parameters import read, storage_bytes, write
from memfit.frameworks.torch.oom import release

__all__ = ["read", "seed", "watch", "write"]

_SMALL_BYTES = 64 * 1024  # less than this isn't worth a word: a cached layer of a library, a metric
_MAX_STEPS = 8
_MAX_SEEN = 4000
_OWN = "memfit."


def watch() -> Callable[[], str]:
    """Remembers what is there now; the function returned frees what it can, then says what is new and held, or ""."""
    # Weak references, for a number alone may be that of another object later.
    before = {id(held): weakref.ref(held) for held in _present()}

    def leftovers() -> str:
        release()
        left = [held for held in _present() if id(held) not in before or before[id(held)]() is not held]
        return _described(left) if left else ""

    return leftovers


def seed(value: int) -> None:
    """Seeds the generators of Python, of NumPy where it is loaded, and of PyTorch on all devices."""
    random.seed(value)
    torch.manual_seed(value)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(value)


def _present() -> Iterator[Any]:
    """Every module, parameter and tensor with a graph."""
    # There are a million objects and few types. isinstance would ask proxies, which may run code of their own.
    counts: dict[type, bool | None] = {}
    for held in gc.get_objects():
        kind = type(held)
        if kind not in counts:
            counts[kind] = issubclass(kind, (torch.nn.Module, torch.nn.Parameter))
            if not counts[kind] and issubclass(kind, torch.Tensor):
                counts[kind] = None  # those that have a graph
        if counts[kind] or (counts[kind] is None and held.grad_fn is not None):
            yield held


def _described(left: list[Any]) -> str:
    """The most telling of the objects left, with its holder."""
    modules = [held for held in left if isinstance(held, torch.nn.Module)]
    children = {id(child) for module in modules for child in module.modules() if child is not module}
    models = [module for module in modules if id(module) not in children]
    graphs = [held for held in left if isinstance(held, torch.Tensor) and held.grad_fn is not None]
    parameters = [held for held in left if isinstance(held, torch.nn.Parameter)]
    held_bytes = storage_bytes([*parameters, *graphs])
    if held_bytes < _SMALL_BYTES:
        return ""
    subject: Any
    if models:
        subject = max(models, key=lambda model: storage_bytes(model.parameters()))
        what = f"its model {type(subject).__name__}"
        advice = "Keep results, not the model; trial.keep(model) keeps the best parameters on disk."
    elif graphs:
        subject = graphs[0]
        what = f"a tensor of shape {tuple(subject.shape)} with the graph that made it"
        advice = "Keep tensor.item() or tensor.detach() instead."
    else:
        subject = max(parameters, key=lambda parameter: parameter.numel())
        what = f"a parameter of shape {tuple(subject.shape)}"
        advice = "An optimizer or a list of parameters may be what was kept."
    del models
    holder = find_holder(subject, [left, modules, graphs, parameters]) or "nothing that Python knows of"
    return f"{what} is still in memory ({format_size(held_bytes)} of parameters): {holder} holds it. {advice}"


def find_holder(target: object, ignored: Collection[object] = ()) -> str | None:
    """Words for what holds `target`; None where nothing that has a name does."""
    seen = {id(target), *map(id, ignored)}
    # Reversed, so that the first of a module's names counts: __main__, not __mp_main__.
    loaded = list(sys.modules.items())[::-1]
    modules = {id(vars(module)): name for name, module in loaded if hasattr(module, "__dict__")}
    level: list[tuple[Any, str]] = [(target, "")]
    seen |= {id(level), id(modules)}
    running = _running()
    fallback: str | None = None
    for _ in range(_MAX_STEPS):
        reached: list[tuple[Any, str]] = []
        seen.add(id(reached))
        for held, path in level:
            if id(held) in running:
                name, where = running[id(held)]
                return f"the variable {name}{path} of {where}"
            referrers = gc.get_referrers(held)
            seen.add(id(referrers))
            for referrer in referrers:
                if id(referrer) in seen or len(seen) > _MAX_SEEN:
                    continue
                seen.add(id(referrer))
                root = _root(referrer, held, path, modules)
                if root is not None:
                    return root
                step = _step(referrer, held)
                if step is None:
                    continue
                reached.append((referrer, step + path))
                if fallback is None and not isinstance(referrer, dict | list | tuple | set | types.CellType):
                    kind = f"{type(referrer).__module__}.{type(referrer).__qualname__}".removeprefix("builtins.")
                    fallback = f"an object of type {kind} ({step + path})"
        level = reached
        if not level:
            break
    return fallback


def _root(referrer: Any, held: Any, path: str, modules: dict[int, str]) -> str | None:
    """Words for a holder that has a name; None where the search must go on."""
    if isinstance(referrer, dict) and id(referrer) in modules:
        names = [str(name) for name, value in referrer.items() if value is held]
        return f"the variable {names[0]}{path} of module {modules[id(referrer)]}" if names else None
    if isinstance(referrer, types.FunctionType):
        return f"the function {referrer.__qualname__} of module {referrer.__module__}"
    if isinstance(referrer, tuple) and isinstance(held, types.CellType):
        for function in gc.get_referrers(referrer):
            if isinstance(function, types.FunctionType) and function.__closure__ is referrer:
                index = [cell is held for cell in referrer].index(True)
                name = function.__code__.co_freevars[index]
                return f"the variable {name}{path} that the function {function.__qualname__} uses from outside"
    return None


def _running() -> dict[int, tuple[str, str]]:
    """Variables of the functions that are running, by the object they hold: (name, where).

    The collector doesn't know of them. The modules' own variables are found by other means.
    """
    variables_of: dict[int, tuple[str, str]] = {}
    for top in sys._current_frames().values():
        frame: types.FrameType | None = top
        while frame is not None:
            code = frame.f_code
            own = str(frame.f_globals.get("__name__", "")).startswith(_OWN)
            if not own and code.co_flags & inspect.CO_OPTIMIZED:
                variables = frame.f_locals
                where = f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
                variables_of.update({id(value): (name, where) for name, value in variables.items()})
                # Before Python 3.13 it is a copy that stays with the frame, and would itself hold everything.
                if type(variables) is dict:
                    variables.clear()
            frame = frame.f_back
    # One of the frames is this function's own, which would hold itself.
    del top
    return variables_of


def _step(referrer: Any, held: Any) -> str | None:
    """How `referrer` refers to `held`, as one would write it; None where it leads nowhere."""
    if isinstance(referrer, types.FrameType | types.ModuleType):
        return None
    if isinstance(referrer, dict):
        keys = [key for key, value in referrer.items() if value is held]
        # The attributes of an object are shown as such by the next step.
        is_attributes = any(getattr(owner, "__dict__", None) is referrer for owner in gc.get_referrers(referrer))
        return "" if not keys else f".{keys[0]}" if is_attributes else f"[{keys[0]!r}]"
    if isinstance(referrer, list | tuple):
        return next((f"[{index}]" for index, value in enumerate(referrer) if value is held), "")
    attributes = getattr(referrer, "__dict__", None)
    if isinstance(attributes, dict) and attributes is not held:
        return next((f".{name}" for name, value in attributes.items() if value is held), "")
    return ""
