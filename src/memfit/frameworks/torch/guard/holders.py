"""Who still holds an object that should be gone: a path from it to a name that a person can look for.

References are followed backwards, breadth first, until a variable of a module or of a running function is met:
"the variable kept of module __main__, kept[0]". What only C++ holds has no such path; then None is the answer.
"""

import gc
import inspect
import os
import sys
import types
from collections.abc import Collection
from typing import Any

_MAX_STEPS = 8
_MAX_SEEN = 4000
_OWN = "memfit."


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
