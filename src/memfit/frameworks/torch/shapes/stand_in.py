"""Shape-only stand-ins for a user's model, batch and optimizer, and their full restoration.

The user's own module object takes part in the simulation, because losses and closures may hold it; for the time of the
simulation its parameters and buffers are swapped for shape-only ones. Afterwards every module's attributes are what
they were.
"""

import copy
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from memfit.core.errors import BadModel
from memfit.core.units import MIB, format_size
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.shapes import sparse
from memfit.frameworks.torch.shapes.failures import explained
from memfit.frameworks.torch.shapes.origin import calling_frames
from memfit.frameworks.torch.shapes.shapes import META, shape_like

# The library of quantised weights that come as parameters of their own class.
_QUANTIZED = "bitsandbytes"


class ShapeCopies:
    """Makes one shape-only tensor for each real one, keeping ties; floating-point ones of `dtype` where given."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._by_address: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The shape-only copy of `tensor`."""
        known = self._copies.get(id(tensor))
        if known is not None:
            return known[1]  # type: ignore[no-any-return]
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        if type(tensor).__module__.startswith(_QUANTIZED):
            return self._quantized(tensor, dtype)
        made = _shape_only(tensor.detach(), dtype)
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        else:
            made.requires_grad_(tensor.requires_grad)
        self._copies[id(tensor)] = (tensor, made)
        return made

    def replace(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """Gives `copy` out as the copy of `tensor`."""
        self._copies[id(tensor)] = (tensor, copy)

    def of_state(self, value: Any) -> Any:
        """`value`, or the copy of a quantisation's state, which modules, weights and other states share."""
        if isinstance(value, torch.Tensor):
            # A weight and what its state calls the same numbers.
            return self._by_address.setdefault((value.data_ptr(), value.shape), self.of(value))
        if not hasattr(value, "__dict__") or not type(value).__module__.startswith(_QUANTIZED):
            return value
        if id(value) not in self._copies:
            made = copy.copy(value)
            self._copies[id(value)] = (value, made)
            vars(made).update({name: self.of_state(held) for name, held in vars(value).items()})
        return self._copies[id(value)][1]

    def _quantized(self, weight: Any, dtype: torch.dtype) -> torch.Tensor:
        """A weight of bitsandbytes with its state; quantised as it is on its way to a GPU, where it isn't yet."""
        data = _shape_only(weight.detach().as_subclass(torch.Tensor), dtype)
        made: Any = internals.make_subclass(type(weight), data, weight.requires_grad)
        self._copies[id(weight)] = (weight, made)
        if not data.is_floating_point():
            self._by_address[weight.data_ptr(), weight.shape] = data
        # The module that holds it is no part of it.
        held = {name: value for name, value in vars(weight).items() if name != "module"}
        vars(made).update({name: self.of_state(value) for name, value in held.items()}, module=None)
        is_waiting = data.is_floating_point() and not vars(weight).get("has_fp16_weights")
        if is_waiting and not vars(weight).get("bnb_quantized"):
            tables = sys.modules["bitsandbytes.functional"].name2qmap
            kept = dict(tables)
            made._quantize(META)
            tables.clear()
            tables.update(kept)
        return made  # type: ignore[no-any-return]

    def known(self, tensor: Any) -> torch.Tensor | None:
        """The copy of `tensor` if one was made."""
        pair = self._copies.get(id(tensor))
        return pair[1] if pair is not None else None


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with every tensor in it replaced by `change(tensor)`; containers keep their type."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return _rebuilt_mapping(value, {k: map_tensors(v, change) for k, v in value.items()})
    if isinstance(value, PackedSequence):
        # Its batch sizes are values on the host, wherever its data is.
        parts = (map_tensors(part, change) for part in (value.sorted_indices, value.unsorted_indices))
        return PackedSequence(change(value.data), value.batch_sizes, *parts)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(v, change) for v in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(v, change) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        clone = copy.copy(value)
        for part in fields(value):
            object.__setattr__(clone, part.name, map_tensors(getattr(value, part.name), change))
        return clone
    return value


def _rebuilt_mapping(original: Any, items: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return items
    try:
        clone = copy.copy(original)
        # A shallow copy shares the dict inside of a mapping of the user's own.
        attributes = getattr(clone, "__dict__", {})
        attributes.update({name: copy.copy(held) for name, held in attributes.items() if isinstance(held, dict)})
        for key, value in items.items():
            clone[key] = value
        return clone
    except Exception:  # a mapping that can't be copied or changed: its plain twin serves
        return items


def _shape_only(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.layout is torch.sparse_coo:
        return sparse.to_device(tensor, dtype)
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return tensor.to(META)
    dense = tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
    if dtype is tensor.dtype and dense:
        return shape_like(tensor)
    return torch.empty_like(tensor, dtype=dtype, device=META)


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the memory of `tensor`: itself, or what a sparse one or a wrapper (of a shard) has."""
    if hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [part for held in inner if isinstance(held, torch.Tensor) for part in dense_parts(held)]
    if tensor.layout is torch.sparse_coo:
        return sparse.parts(tensor)
    return [tensor] if tensor.layout is torch.strided else []


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the memory of a parameter: its own, and those of a quantisation's state."""
    parts = dense_parts(getattr(tensor, "_local_tensor", tensor))
    if type(tensor).__module__.startswith(_QUANTIZED):
        states = [vars(tensor)]
        for state in states:
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    parts.append(value)
                elif type(value).__module__.startswith(_QUANTIZED) and not isinstance(value, torch.nn.Module):
                    states.append(vars(value))
    return parts


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a nesting of containers."""
    parts: Iterable[Any] = ()
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in fields(value)]
    for part in parts:
        yield from tensors_in(part)


@contextmanager
def swapped(model: torch.nn.Module, copies: ShapeCopies) -> Iterator[None]:
    """Puts shape-only parameters and buffers into `model`; restores every attribute of every module at the end.

    Tensors and arrays that a module holds as plain attributes are copied for the time, so that code which changes them
    in place leaves the user's alone.
    """
    modules = list(model.modules())
    saved: dict[int, tuple[Any, Any]] = {}
    for module in modules:
        save_contents(module.__dict__, saved)
    try:
        for module in modules:
            _swap(module, copies)
        yield
    finally:
        refill(saved)


def refill(saved: dict[int, tuple[Any, Any]]) -> None:
    """Puts back what `save_contents` noted."""
    for container, contents in saved.values():
        container.clear()
        container.extend(contents) if isinstance(container, list | deque) else container.update(contents)


def save_contents(value: Any, saved: dict[int, tuple[Any, Any]]) -> None:
    """Notes what `value` holds, and every plain container or object inside of it: a forward pass may change them."""
    if id(value) in saved:
        return
    if isinstance(value, dict | list | deque | set | tuple):
        if not isinstance(value, tuple):
            saved[id(value)] = (value, dict(value) if isinstance(value, dict) else list(value))
        for part in list(value.values() if isinstance(value, dict) else value):
            save_contents(part, saved)
    elif not isinstance(value, torch.nn.Module | torch.Tensor | type | ModuleType) and not callable(value):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and id(attributes) not in saved:
            # One level: what such an object holds in turn is its own business.
            saved[id(attributes)] = (attributes, dict(attributes))
            for part in list(attributes.values()):
                if isinstance(part, dict | list | deque | set):
                    save_contents(part, saved)


def _swap(module: torch.nn.Module, copies: ShapeCopies) -> None:
    for held in (internals.parameters_of(module), internals.buffers_of(module)):
        for name, tensor in held.items():
            if tensor is not None:
                held[name] = copies.of(tensor)  # type: ignore[assignment]
    # Modules such as nn.LSTM keep their parameters in a plain list as well.
    for name, value in list(module.__dict__.items()):
        if isinstance(value, list | tuple) and any(copies.known(part) is not None for part in value):
            known = [(copies.known(part), part) for part in value]
            module.__dict__[name] = type(value)(part if copy is None else copy for copy, part in known)
        elif type(value).__module__.startswith(_QUANTIZED) and not isinstance(value, torch.Tensor):
            module.__dict__[name] = copies.of_state(value)
        elif isinstance(value, torch.Tensor):
            twin = copies.known(value)
            module.__dict__[name] = twin if twin is not None else value.detach().clone()
        elif type(value).__module__ == "numpy" and hasattr(value, "copy"):
            module.__dict__[name] = value.copy()


def check_model(model: torch.nn.Module) -> None:
    """Refuses a model that can't be run on shapes: TorchScript, parameters without a shape yet, several devices."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise BadModel(
            "the model holds a TorchScript module (torch.jit), which hides its operators. "
            "Give the nn.Module that it was made from."
        )
    if any(torch.nn.parameter.is_lazy(p) for p in (*model.parameters(), *model.buffers())):
        raise BadModel(
            "the model has parameters without a shape yet (lazy modules such as nn.LazyLinear). "
            "Run one batch through it first, so that they get one."
        )
    devices = {str(t.device) for t in (*model.parameters(), *model.buffers()) if t.device.type != "meta"}
    if len(devices) > 1:
        raise BadModel(
            f"the model's tensors are on mixed devices: {', '.join(sorted(devices))}. "
            "Move the whole model to one device before the estimate; any one will do."
        )


def build_without_weights(builder: Callable[[], Any]) -> torch.nn.Module:
    """The module that `builder` makes, without memory for its weights.

    Tensors of more than a few thousand elements are shape-only from the start; small ones stay real, because
    constructors compute with them (drop-path rates, index tables). Where that fails the model is built as usual.
    """
    try:
        with _LargeTensorsAsShapes():
            made = builder()
    except Exception:
        with explained("model function"):
            made = builder()
    if not isinstance(made, torch.nn.Module):
        raise BadModel(f"the model callable returned {type(made).__name__}, not a torch.nn.Module.")
    return made


_SMALL_ELEMENTS = 16_384


class _LargeTensorsAsShapes(torch.overrides.TorchFunctionMode):
    """While a model is built: large factory calls give shape-only tensors, and initialising them costs nothing."""

    _factories = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn})

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._factories and kwargs.get("device") is None:
            size = args[0] if args and isinstance(args[0], list | tuple | torch.Size) else kwargs.get("size", args)
            if all(isinstance(n, int) for n in size) and torch.Size(size).numel() > _SMALL_ELEMENTS:
                kwargs = {**kwargs, "device": META}
        is_initialiser = getattr(func, "__name__", "") in _INITIALISERS
        if is_initialiser and args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return args[0]
        return func(*args, **kwargs)


# One string of words is easier to read than a list of quotes.
_INITIALISERS = frozenset(
    """normal_ uniform_ zero_ fill_ trunc_normal_ kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_
    constant_ ones_ zeros_ orthogonal_ erfinv_ mul_ add_ clamp_ copy_ log_normal_ exponential_ bernoulli_
    """.split()  # noqa: SIM905
)


_BUDGET_BYTES = 256 * MIB
_LEAST_BYTES = MIB
_MAX_FRAMES = 32
AS_SHAPES = "weights-as-shapes"


class LargeWeights:
    """Decides which weights the host need not hold: those beyond `budget_bytes`."""

    def __init__(self, report: Callable[[str, str], None], budget_bytes: int = _BUDGET_BYTES) -> None:
        self._report = report
        self._left_bytes = budget_bytes
        self._budget_bytes = budget_bytes
        self._said = False

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether `torch.empty(*args, **kwargs)` makes a weight beyond the budget."""
        size = args[0] if args and isinstance(args[0], list | tuple) else kwargs.get("size", args)
        if not all(isinstance(n, int) for n in size):
            return False
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        size_bytes = math.prod(size) * dtype.itemsize
        if size_bytes < _LEAST_BYTES or not any(map(_builds_module, calling_frames(_MAX_FRAMES))):
            return False
        if size_bytes <= self._left_bytes:
            self._left_bytes -= size_bytes
            return False
        if not self._said:
            self._said = True
            limit = format_size(self._budget_bytes)
            self._report(AS_SHAPES, f"weights beyond the first {limit} were built as shapes only, without values")
        return True


def _builds_module(frame: FrameType) -> bool:
    return frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), torch.nn.Module)
