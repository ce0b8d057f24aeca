"""States of optimizers, schedulers, callbacks and the like as JSON, without pickle: what isn't plain data is refused.

Pickle runs code from the file that it reads. States are nested dictionaries of numbers and tensors, and JSON can hold
them if what it lacks is tagged: a tuple is `{"__tuple__": [...]}`. Arrays leave the tree for a file of tensors, and a
tag in their place says which it is. The types come back as they were, to the bit. A framework adds tags of its own.
"""

import base64
import math
from collections import Counter, OrderedDict, deque
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy

from memfit.core.guarding import BadCheckpoint
from memfit.core.oom import recognise
from memfit.core.tensor_file import TensorFile, numpy_dtype, type_name

_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)
_LISTS: dict[type, str] = {tuple: "__tuple__", set: "__set__", frozenset: "__frozenset__"}
_DICTS: dict[type, str] = {dict: "__dict__", OrderedDict: "__ordered__", Counter: "__counter__"}
_DICT_OF = {tag: kind for kind, tag in _DICTS.items()}
LEFT_OUT = object()  # in the place of a function, which can't be stored: whatever the live object has stays


class Encoder:
    """Turns values into JSON and collects their tensors; functions are refused, or left out for the live ones."""

    def __init__(self, *, skips_functions: bool = False) -> None:
        self._skips_functions = skips_functions
        self.tensors: dict[str, Any] = {}  # tensors and arrays, by the names that the tree has for them

    def encode(self, value: Any, path: str) -> Any:
        """The value as JSON can hold it."""
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"__float__": repr(value)}
        if kind is list:
            return self.encode_each(value, path)
        if kind in _LISTS:
            parts = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
            return {_LISTS[kind]: self.encode_each(parts, path)}
        if kind is dict and all(type(key) is str and not key.startswith("__") for key in value):
            return {key: self.encode(part, f"{path}.{key}") for key, part in value.items()}
        if kind in _DICTS:
            pairs = [
                [self.encode(key, f"{path}.<key>"), self.encode(part, f"{path}.{key}")] for key, part in value.items()
            ]
            return {_DICTS[kind]: pairs}
        if kind is deque:
            return {"__deque__": [self.encode([*value], path), value.maxlen]}
        if kind in (bytes, bytearray):
            return {f"__{kind.__name__}__": base64.b64encode(value).decode()}
        if kind is complex:
            return {"__complex__": [self.encode(value.real, path), self.encode(value.imag, path)]}
        if isinstance(value, numpy.generic) and (name := type_name(value.dtype)) is not None:
            return {"__numpy__": [name, base64.b64encode(value.tobytes()).decode()]}
        if kind is numpy.ndarray and (name := type_name(value.dtype)) is not None:
            self.tensors[path] = value
            return {"__array__": path, "dtype": name}
        if self._skips_functions and isinstance(value, _FUNCTIONS):
            return {"__left_out__": "function"}
        encoded = self.encode_special(value, path)
        if encoded is not None:
            return encoded
        raise BadCheckpoint(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint can't hold: it holds numbers, "
            "text, lists, dictionaries, tensors and arrays. Leave it out of the state or store its parts."
        )

    def encode_each(self, values: Any, path: str) -> list[Any]:
        """The parts of a list."""
        return [self.encode(part, f"{path}.{index}") for index, part in enumerate(values)]

    def encode_special(self, value: Any, path: str) -> Any:
        """A framework's own value, tagged; None for what it has no tag for."""
        return None


class Decoder:
    """Turns JSON back into the values that it was made from, whose tensors are in a file."""

    def __init__(self, file: TensorFile) -> None:
        self._file = file

    def decode(self, value: Any) -> Any:
        """The value."""
        if isinstance(value, list):
            return self.decode_each(value)
        if not isinstance(value, dict):
            return value
        tag = next(iter(value), "")
        if not tag.startswith("__"):
            decoded = {key: self.decode(part) for key, part in value.items()}
            return {key: part for key, part in decoded.items() if part is not LEFT_OUT}
        try:
            return self._tagged(tag, value)
        except Exception as error:
            if isinstance(error, BadCheckpoint) or recognise(error) is not None:
                raise
            raise BadCheckpoint(f"the checkpoint holds {tag!r} with an invalid value: {error}") from None

    def decode_each(self, values: Any) -> list[Any]:
        """The parts of a list; None for those that were left out."""
        decoded = [self.decode(part) for part in values]
        return [None if part is LEFT_OUT else part for part in decoded]

    def decode_special(self, tag: str, value: dict[str, Any]) -> Any:
        """The value of a framework's own tag."""
        raise ValueError("an unknown tag")

    def _tagged(self, tag: str, value: dict[str, Any]) -> Any:
        content = value[tag]
        if tag in _DICT_OF:
            pairs = [(self.decode(key), self.decode(part)) for key, part in content]
            # Counter would count pairs.
            return _DICT_OF[tag](dict(pair for pair in pairs if pair[1] is not LEFT_OUT))
        match tag:
            case "__tuple__" | "__set__" | "__frozenset__":
                return next(kind for kind, name in _LISTS.items() if name == tag)(self.decode_each(content))
            case "__array__":
                return self._file.read(content, numpy_dtype(value["dtype"]))
            case "__numpy__":
                return numpy.frombuffer(base64.b64decode(content[1]), numpy_dtype(content[0]))[0]
            case "__float__":
                return float(content)
            case "__complex__":
                return complex(*map(self.decode, content))
            case "__bytes__":
                return base64.b64decode(content)
            case "__bytearray__":
                return bytearray(base64.b64decode(content))
            case "__deque__":
                return deque(self.decode(content[0]), maxlen=content[1])
            case "__left_out__":
                return LEFT_OUT
        return self.decode_special(tag, value)
