"""Results that are saved as JSON and read back: a header of format and version, and plain data made into dataclasses.

A word where a number belongs is no error when it is read, but one later, far from the file and in the words of whatever
stumbles over it. So values are compared with annotations while dataclasses are made of them: those of dataclasses and
typed dictionaries, and what they are made of. Whole numbers have to fit into 64 bits, as all do that memfit counts, and
`Annotated[int, 0]` ones be at least 0. Other numbers have to be finite.
"""

import json
import math
import os
import reprlib
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    NotRequired,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from memfit.core.errors import BadFile, reason_of
from memfit.core.plain_files import read_plain

Count = Annotated[int, 0]
FORMAT_VERSION = 1
_LIMIT = 2**63
# Far more than any result has to tell.
_MOST_BYTES = 2**30
_Value = TypeVar("_Value")


class Saved:
    """A result that is written as JSON and read back, a dataclass."""

    __slots__ = ()
    saved_as: ClassVar[tuple[str, str]]
    """Name of the format, and what messages call such a result: "plan", "a plan"."""
    how_to_get: ClassVar[str] = "Give a file that memfit wrote."
    """What to do where a file is none."""

    def to_json(self) -> dict[str, Any]:
        """A plain structure that `json` can write, and `from_json` read back."""
        plain: Any = self
        return {**header(self.saved_as[0]), **asdict(plain)}

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """What `to_json` wrote, from its structure or its text."""
        with reading(data, *cls.saved_as) as plain:
            return made_of(cls, plain)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The result in a file.

        Raises:
            BadFile: it can't be read, or is none.
        """
        try:
            # A link to one is as good as the file; a FIFO or a device is not.
            return cls.from_json(read_plain(Path(os.path.realpath(path)), _MOST_BYTES))
        except (OSError, ValueError) as error:
            what = cls.saved_as[1].partition(" ")[2]
            reason = reason_of(error)
            raise BadFile(f"the {what} {os.fspath(path)!r} can't be read: {reason}. {cls.how_to_get}") from error


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
    except _Mismatch as error:
        raise BadFile(f"not {what} written by memfit: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
        raise BadFile(f"not {what} written by memfit: {type(error).__name__}: {error}") from None


def mismatch(value: Any, hint: Any, where: str = "") -> str:
    """What isn't of its type in plain data, in words, or "".

    Args:
        value: plain data.
        hint: an annotation, as in a dataclass or a `TypedDict`. What is Any is not looked at.
        where: what the value is called in the words.
    """
    try:
        _made(hint, value, where)
    except _Mismatch as error:
        return str(error)
    return ""


def made_of(kind: type[_Value], data: Any, where: str = "") -> _Value:
    """A dataclass made of plain data: its fields by name, of which unknown ones are left out, or a row of all of them.

    Raises:
        ValueError: a field is of another type than it says.
        TypeError: one is missing.
    """
    # As a key of the cache; mypy takes classes of unknown values for unhashable.
    key: Any = kind
    hints = _field_hints(key)
    if isinstance(data, list) and len(data) == len(hints):
        data = dict(zip(hints, data, strict=True))
    if not isinstance(data, dict):
        raise _other(data, kind, where)
    return kind(**{name: _made(hint, data[name], _at(where, name)) for name, hint in hints.items() if name in data})


class _Mismatch(ValueError):
    """A value isn't of its type; the text says so."""


def _made(hint: Any, value: Any, where: str) -> Any:
    """What an annotation says, made of plain data: the reverse of `asdict` and `json`.

    A dataclass with a `from_json` of its own is read by that.
    """
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin is NotRequired:
        return _made(args[0], value, where)
    if origin is Annotated:
        if _made(args[0], value, where) < args[1]:
            raise _other(value, f"at least {args[1]}", where)
        return value
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in args:
            return None
        for option in args:
            try:
                return _made(option, value, where)
            except ValueError:
                # What is wrong inside of a structure says more.
                if isinstance(value, dict | list):
                    raise
        raise _other(value, hint, where)
    if is_dataclass(hint):
        kind: Any = hint
        return kind.from_json(value) if hasattr(kind, "from_json") else made_of(kind, value, where)
    if is_typeddict(hint):
        if not isinstance(value, dict):
            raise _other(value, hint, where)
        for name, part in _hints(hint).items():
            if name in value:
                _made(part, value[name], _at(where, name))
            elif name in hint.__required_keys__:
                raise _Mismatch(f"{_at(where, name)} is missing")
        return value
    if origin is dict and isinstance(value, dict):
        for key in value:
            _made(args[0], key, f"a key of {where or 'it'}")
        return {key: _made(args[1], part, _at(where, key)) for key, part in value.items()}
    if origin in (list, tuple) and isinstance(value, list | origin):
        is_uniform = origin is list or args[-1] is Ellipsis
        if is_uniform and args[0] is int and all(map(_is_whole, value)):
            # Curves have as many numbers as there were allocations.
            return origin(value)
        kinds = [args[0]] * len(value) if is_uniform else args
        if len(kinds) == len(value):
            pairs = enumerate(zip(kinds, value, strict=True))
            return origin(_made(each, part, f"{where}[{number}]") for number, (each, part) in pairs)
    return _made_plain(hint, value, where)


def _made_plain(hint: Any, value: Any, where: str) -> Any:
    """The same of annotations that have nothing inside."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        with suppress(ValueError):
            return hint(value)
    elif hint is int or (hint is float and type(value) is int):
        if _is_whole(value):
            return value
    elif hint is float:
        if type(value) is float and math.isfinite(value):
            return value
    elif isinstance(hint, type) and isinstance(value, hint):
        return value
    raise _other(value, hint, where)


def _is_whole(value: Any) -> bool:
    return type(value) is int and -_LIMIT <= value < _LIMIT


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


@cache
def _field_hints(kind: Any) -> dict[str, Any]:
    return {field.name: _hints(kind)[field.name] for field in fields(kind)}


def _at(where: str, name: Any) -> str:
    return f"{where}.{name}" if where else str(name)


def _other(value: Any, expected: Any, where: str) -> _Mismatch:
    if isinstance(expected, type) and not get_args(expected):
        expected = expected.__name__
    expected = str(expected).replace("typing.", "")
    return _Mismatch(f"{where or 'it'} is {reprlib.repr(value)}, and {expected} was expected")
