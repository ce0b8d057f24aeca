"""Results read from files: a header of format and version, plain data made into dataclasses, and their types checked.

A word where a number belongs is no error when it is read, but one later, far from the file and in the words of whatever
stumbles over it. So values are compared with annotations: those of dataclasses and typed dictionaries, and what they
are made of. Whole numbers have to fit into 64 bits, as all do that memfit counts, and `Annotated[int, 0]` ones be at
least 0. Other numbers have to be finite.
"""

import json
import math
import reprlib
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, NotRequired, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from memfit.core.errors import BadFile

Count = Annotated[int, 0]
FORMAT_VERSION = 1
_LIMIT = 2**63
_Value = TypeVar("_Value")


def header(name: str) -> dict[str, Any]:
    """What the file of a result begins with."""
    return {"format": f"memfit.{name}", "version": FORMAT_VERSION}


@contextmanager
def reading(data: Any, name: str, what: str) -> Iterator[dict[str, Any]]:
    """The structure behind a `header`, from itself or from its text.

    Raises:
        BadFile: it is another format or version, or whatever is done with it here fails; `what` was expected.
    """
    try:
        data = json.loads(data) if isinstance(data, str | bytes) else data
        given = {key: data[key] for key in ("format", "version")}
        if given != header(name):
            # Whatever is there, in a line or two.
            shown = " ".join(str(value)[:80] for value in given.values())
            raise BadFile(f"expected a memfit.{name} of version {FORMAT_VERSION}, got {shown}.")
        yield data
    except BadFile:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
        raise BadFile(f"not {what} written by memfit: {type(error).__name__}: {error}") from None


def checked(value: _Value, what: str) -> _Value:
    """A dataclass that was made of what a file holds.

    Raises:
        BadFile: a field is of another type than it says; `what` should have been in the file.
    """
    problem = mismatch(value, type(value))
    if problem:
        raise BadFile(f"not {what} written by memfit: {problem}")
    return value


def from_plain(hint: Any, value: Any) -> Any:
    """What an annotation says, made of plain data: the reverse of `asdict` and `json` for dataclasses.

    A dataclass with a `from_json` of its own is read by that.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [kind for kind in args if kind is not types.NoneType]
        return from_plain(kinds[0], value) if value is not None and len(kinds) == 1 else value
    if origin is tuple:
        if args[0] is int and args[-1] is Ellipsis:
            # Curves have as many numbers as there were allocations.
            return tuple(value)
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
        return tuple(from_plain(kind, part) for kind, part in zip(kinds, value, strict=True))
    if origin is dict:
        return {key: from_plain(args[1], part) for key, part in value.items()}
    if is_dataclass(hint):
        if hasattr(hint, "from_json"):
            return hint.from_json(value)
        return made_of(hint if isinstance(hint, type) else type(hint), value)
    return hint(value) if isinstance(hint, type) and issubclass(hint, Enum) else value


def made_of(kind: type[_Value], data: dict[str, Any]) -> _Value:
    """A dataclass made of plain data, as `from_plain` reads its fields; unknown names are left out."""
    # As a key of the cache; mypy takes classes of unknown values for unhashable.
    key: Any = kind
    names, hints = _names(kind) & data.keys(), _hints(key, with_bounds=False)
    return kind(**{name: from_plain(hints[name], data[name]) for name in names})


def mismatch(value: Any, hint: Any, where: str = "") -> str:
    """What isn't of its type in a value, in words, or "".

    Args:
        value: plain data, or a dataclass.
        hint: an annotation, as in a dataclass or a `TypedDict`. Functions and Any are not looked at.
        where: what the value is called in the words.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is NotRequired:
        return mismatch(value, args[0], where)
    if origin is Annotated:
        problem = mismatch(value, args[0], where)
        return problem or ("" if value >= args[1] else f"{_shown(where, value)}, and at least {args[1]} was expected")
    if origin in (Union, types.UnionType):
        problems = [mismatch(value, option, where) for option in args]
        nested = [problem for problem, option in zip(problems, args, strict=True) if _is_structure(value, option)]
        return "" if "" in problems else nested[0] if nested else _other(value, where, hint)
    if is_dataclass(hint):
        if not isinstance(value, hint if isinstance(hint, type) else type(hint)):
            return _other(value, where, hint)
        names, hints = _names(hint), _hints(type(value))
        own = {name: kind for name, kind in hints.items() if name in names}
        return _first(mismatch(getattr(value, name), kind, _at(where, name)) for name, kind in own.items())
    if is_typeddict(hint):
        if not isinstance(value, dict):
            return _other(value, where, hint)
        missing = sorted(hint.__required_keys__ - set(value))
        if missing:
            return f"{_at(where, missing[0])} is missing"
        known = {name: kind for name, kind in _hints(hint).items() if name in value}
        return _first(mismatch(value[name], kind, _at(where, name)) for name, kind in known.items())
    if origin in (list, tuple):
        return _of_parts(value, origin, args, where)
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            return _other(value, where, hint)
        keys = _first(mismatch(key, args[0], f"a key of {where or 'it'}") for key in value)
        return keys or _first(mismatch(part, args[1], _at(where, key)) for key, part in value.items())
    return "" if _is_plain(value, hint) else _other(value, where, hint)


def _of_parts(value: Any, origin: Any, args: tuple[Any, ...], where: str) -> str:
    if not isinstance(value, origin):
        return _other(value, where, origin)
    if origin is tuple and args[-1] is not Ellipsis:
        if len(value) != len(args):
            return f"{where or 'it'} has {len(value)} entries, and {len(args)} were expected"
        kinds = list(args)
    else:
        # Curves have as many numbers as there were allocations.
        if args[0] is int and all(type(part) is int and -_LIMIT <= part < _LIMIT for part in value):
            return ""
        kinds = [args[0]] * len(value)
    return _first(
        mismatch(part, kind, f"{where}[{i}]") for i, (part, kind) in enumerate(zip(value, kinds, strict=True))
    )


def _is_plain(value: Any, hint: Any) -> bool:
    if hint is None or hint is type(None):
        return value is None
    if hint is int:
        return type(value) is int and -_LIMIT <= value < _LIMIT
    if hint is float:
        return (type(value) is float and math.isfinite(value)) or (type(value) is int and -_LIMIT <= value < _LIMIT)
    return isinstance(value, hint) if isinstance(hint, type) and hint is not Any else True


def _is_structure(value: Any, hint: Any) -> bool:
    kind = get_origin(hint) or hint
    return isinstance(kind, type) and isinstance(value, dict if is_typeddict(kind) else kind)


@cache
def _hints(kind: Any, *, with_bounds: bool = True) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=with_bounds)


def _names(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


def _first(problems: Any) -> str:
    return next((problem for problem in problems if problem), "")


def _at(where: str, name: Any) -> str:
    return f"{where}.{name}" if where else str(name)


def _shown(where: str, value: Any) -> str:
    return f"{where or 'it'} is {reprlib.repr(value)}"


def _other(value: Any, where: str, hint: Any) -> str:
    name = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")
    return f"{_shown(where, value)}, and {name} was expected"
