"""States of optimizers, schedulers and the like as JSON, without pickle: what isn't plain data is refused.

Pickle runs code from the file that it reads. States are nested dictionaries of numbers and tensors, and JSON can hold
them if what it lacks is tagged: a tuple is `{"__tuple__": [...]}`. Tensors and arrays leave the tree for a file of
tensors, and a tag in their place says which it is. The types come back as they were, to the bit.
"""

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy
import torch
from torch.nn.parameter import is_lazy

from memfit.adapters.torch.guarding.checkpoint_tensors import TensorFile
from memfit.core.guarding import BadCheckpoint

_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)
_LISTS: dict[type, str] = {tuple: "__tuple__", set: "__set__", frozenset: "__frozenset__", torch.Size: "__size__"}
_DICTS: dict[type, str] = {dict: "__dict__", OrderedDict: "__ordered__", Counter: "__counter__"}
_MAKERS: dict[str, Callable[[Any], Any]] = {
    **{tag: maker for maker, tag in _LISTS.items()},
    **{tag: maker for maker, tag in _DICTS.items()},
    "__counter__": lambda pairs: Counter(dict(pairs)),
}
LEFT_OUT = object()
"""In the place of a function, which can't be stored: whatever the live object has stays."""


class Encoder:
    """Turns values into JSON and collects their tensors.

    Args:
        skips_functions: whether functions are left out rather than refused; the live object keeps its own.
    """

    def __init__(self, *, skips_functions: bool = False) -> None:
        self._skips_functions = skips_functions
        self.tensors: dict[str, torch.Tensor] = {}
        self._seen: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: str) -> Any:
        """The value as JSON can hold it.

        Args:
            value: plain data, nested in any way.
            path: where it is, for names of tensors and messages.

        Raises:
            BadCheckpoint: a part of it is no plain data; the message says which.
        """
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"__float__": repr(value)}
        if isinstance(value, torch.Tensor):
            return self.tensor(value, path)
        if kind is list:
            return [self.encode(part, f"{path}.{index}") for index, part in enumerate(value)]
        if kind in _LISTS:
            parts = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
            return {_LISTS[kind]: [self.encode(part, f"{path}.{index}") for index, part in enumerate(parts)]}
        if kind in _DICTS or kind is defaultdict:
            return self._dictionary(value, path)
        return self._other(value, path)

    def tensor(self, value: torch.Tensor, path: str) -> dict[str, Any]:
        """The tag of a tensor; one that was met before, under whatever name, is stored once."""
        _refuse_special(value, path)
        key = (value.device, value.data_ptr(), value.dtype, *value.shape, *value.stride())
        # All tensors without elements have one address.
        name = self._seen.setdefault(key, path) if value.numel() else path
        self.tensors.setdefault(name, value)
        tag: dict[str, Any] = {"__tensor__": name, "dtype": _name(value.dtype)}
        if value.device.type != "cpu":
            tag["device"] = value.device.type
        if not value.is_contiguous():
            tag["stride"] = [*value.stride()]
        return tag

    def _dictionary(self, value: Mapping[Any, Any], path: str) -> Any:
        if type(value) is dict and all(type(key) is str and not key.startswith("__") for key in value):
            return {key: self.encode(part, f"{path}.{key}") for key, part in value.items()}
        # The default of a defaultdict is a function; its entries are all that a state needs.
        tag = _DICTS.get(type(value), "__dict__")
        return {
            tag: [
                [self.encode(key, f"{path}.<key>"), self.encode(part, f"{path}.{key}")] for key, part in value.items()
            ]
        }

    def _other(self, value: Any, path: str) -> Any:
        if isinstance(value, bytes | bytearray):
            return {f"__{type(value).__name__}__": base64.b64encode(value).decode()}
        if isinstance(value, complex) and type(value) is complex:
            return {"__complex__": [self.encode(value.real, path), self.encode(value.imag, path)]}
        if isinstance(value, torch.dtype):
            return {"__dtype__": _name(value)}
        if isinstance(value, torch.device):
            return {"__device__": str(value)}
        if isinstance(value, numpy.generic) and value.dtype.kind in "biufc" and value.dtype.itemsize <= 16:
            return {"__numpy__": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
        if type(value) is numpy.ndarray and value.dtype.kind in "biufc":
            # Bytes are the one form that all of numpy's types have.
            data = torch.from_numpy(numpy.frombuffer(bytearray(value.tobytes()), numpy.uint8))
            self.tensors[path] = data
            return {"__array__": path, "dtype": value.dtype.str, "shape": [*value.shape]}
        if isinstance(value, deque):
            return {"__deque__": [self.encode([*value], path), value.maxlen]}
        if self._skips_functions and isinstance(value, _FUNCTIONS):
            return {"__left_out__": "function"}
        raise BadCheckpoint(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint can't hold: it holds "
            "numbers, text, lists, dictionaries, tensors and arrays. Leave it out of the state or store its parts."
        )


class Decoder:
    """Turns JSON back into the values that it was made from.

    Args:
        file: holds their tensors.
        home: the device for tensors that were not on the CPU.
    """

    def __init__(self, file: TensorFile, home: torch.device | None = None) -> None:
        self._file = file
        self._home = home

    def decode(self, value: Any) -> Any:
        """The value.

        Raises:
            BadCheckpoint: the JSON wasn't made by an `Encoder`.
        """
        if isinstance(value, list):
            return [_kept(self.decode(part)) for part in value]
        if not isinstance(value, dict):
            return value
        tag = next(iter(value), "")
        if not tag.startswith("__"):
            decoded = {key: self.decode(part) for key, part in value.items()}
            return {key: part for key, part in decoded.items() if part is not LEFT_OUT}
        try:
            return self._tagged(tag, value)
        except (MemoryError, torch.OutOfMemoryError, BadCheckpoint):
            raise
        except Exception as error:
            raise BadCheckpoint(f"the checkpoint holds {tag!r} with something that it can't be: {error}") from None

    def _tagged(self, tag: str, value: dict[str, Any]) -> Any:
        content = value[tag]
        if tag in _DICTS.values():
            pairs = [(self.decode(key), self.decode(part)) for key, part in content]
            return _MAKERS[tag]([pair for pair in pairs if pair[1] is not LEFT_OUT])
        if tag in _MAKERS:
            return _MAKERS[tag](_kept(self.decode(part)) for part in content)
        match tag:
            case "__tensor__":
                return self._tensor(value)
            case "__array__":
                data = torch.empty(self._file.shape(content), dtype=torch.uint8)
                self._file.copy_into(content, data)
                array = numpy.frombuffer(data.numpy().tobytes(), numpy.dtype(value["dtype"]))
                return array.reshape(value["shape"]).copy()
            case "__numpy__":
                return numpy.frombuffer(base64.b64decode(content[1]), numpy.dtype(content[0]))[0]
            case "__float__":
                return float(content)
            case "__complex__":
                return complex(*map(self.decode, content))
            case "__bytes__":
                return base64.b64decode(content)
            case "__bytearray__":
                return bytearray(base64.b64decode(content))
            case "__dtype__":
                return named_dtype(content)
            case "__device__":
                return torch.device(content)
            case "__deque__":
                return deque(self.decode(content[0]), maxlen=content[1])
            case "__left_out__":
                return LEFT_OUT
        raise ValueError("an unknown tag")

    def _tensor(self, tag: dict[str, Any]) -> torch.Tensor:
        name, dtype = tag["__tensor__"], named_dtype(tag["dtype"])
        shape = stored_shape(self._file, name, dtype)
        home = self._home if "device" in tag else None
        stride = tag.get("stride")
        if stride is None:
            tensor = torch.empty(shape, dtype=dtype, device=home)
        elif sum((size - 1) * abs(step) for size, step in zip(shape, stride, strict=True)) > 4 * math.prod(shape):
            tensor = torch.empty(shape, dtype=dtype, device=home)  # what was a small part of something larger
        else:
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device=home)
        if tensor.numel() and any(step == 0 for step in tensor.stride()):
            tensor = tensor.contiguous()  # an expanded tensor has no place for its elements
        self._file.copy_into(name, tensor)
        return tensor


def stored_shape(file: TensorFile, name: str, dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of a tensor of this type in a file."""
    if name not in file:
        raise BadCheckpoint(f"{file.path} lacks {name!r}")
    shape = file.shape(name)
    if file.dtype(name) == dtype:
        return shape
    if file.dtype(name) != torch.uint8 or not shape or shape[-1] != dtype.itemsize:
        raise BadCheckpoint(f"{file.path} holds {name!r} as {file.dtype(name)}, and {dtype} was expected")
    return shape[:-1]


def _kept(value: Any) -> Any:
    return None if value is LEFT_OUT else value


def _refuse_special(value: torch.Tensor, path: str) -> None:
    if is_lazy(value):
        found = "a parameter that has no shape yet; run the model once first"
    elif value.layout is not torch.strided or value.is_quantized or value.is_nested:
        found = f"a tensor of layout {value.layout}"
    elif value.device.type == "meta":
        found = "a tensor without values (device meta)"
    elif hasattr(type(value), "__tensor_flatten__"):
        found = f"a tensor of the special type {type(value).__module__}.{type(value).__qualname__}"
    else:
        return
    raise BadCheckpoint(f"{path} is {found}, and a checkpoint holds ordinary dense tensors")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def named_dtype(name: str) -> torch.dtype:
    """The type of tensors with this name."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no type of tensors")
    return dtype
