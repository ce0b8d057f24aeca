"""Shape-only execution of operators, quickly.

PyTorch can run an operator on meta tensors, but many of its shape rules are written in Python and take up to a
millisecond. A training step asks for the same few shapes again and again, so the answers are kept: an operator's
outputs depend on nothing but the sizes, strides and dtypes of its inputs and on its other arguments. The cache belongs
to the process and is shared by all traces.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import Any, Generic, TypeVar

import torch

from memfit.frameworks.torch import internals

Operator = Any  # torch._ops.OpOverload; its module has no public name
Arguments = tuple[Any, ...]
Options = dict[str, Any]
META = torch.device("meta")
HALVES = (torch.float16, torch.bfloat16)
MASKS = (torch.bool, torch.uint8)
_CACHE_LIMIT = 100_000

_cache: dict[Any, "Known"] = {}


class Behaviour(Enum):
    """What an operator does to storages, read off its schema."""

    VIEW = auto()
    """Outputs share the storage of an input; nothing is allocated."""
    IN_PLACE = auto()
    """Writes into an input and returns it."""
    SILENT = auto()
    """Writes into inputs and returns nothing."""
    FRESH = auto()
    """Every output has a new storage."""
    OTHER = auto()
    """Anything else: run it and look."""
    COMPOSITE = auto()
    """Made of other operators; autograd takes it apart, but not where it is switched off, as in inference mode."""


# Operators that change the metadata or the size of a tensor in place, or bring in a new one: they must really run.
_METADATA = {
    f"aten::{name}"
    for name in """
    lift_fresh resize_ resize_as_ set_ t_ transpose_ squeeze_ unsqueeze_ as_strided_ swapaxes_ detach_ _resize_output_
    """.split()  # noqa: SIM905
}

# Their schemas say that the output is new, but it is a view of the input.
_UNDECLARED_VIEWS = {
    f"aten::{name}" for name in ("_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes")
}


def size_bytes(tensor: Any) -> int:
    """Bytes of a tensor's elements; 0 for anything else."""
    return tensor.numel() * tensor.element_size() if isinstance(tensor, torch.Tensor) else 0


def shape_like(tensor: torch.Tensor) -> torch.Tensor:
    """A new shape-only tensor with the size, strides and dtype of `tensor`."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


# By names of their own, which are found in half the time.
_TENSOR, _DTYPE, _STRIDED = torch.Tensor, torch.dtype, torch.strided
_PLAIN = {int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format}


def tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or outputs of an operator."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from tensors(value)
        # Asking whether anything else is a tensor takes PyTorch a call of Python.
        elif value is not None and value.__class__ not in _PLAIN and isinstance(value, torch.Tensor):
            yield value


def is_mask(index: Any) -> bool:
    """Whether an index selects by truth rather than by position."""
    return index is not None and index.dtype in MASKS


def to_host(kwargs: Options) -> bool:
    """Whether the arguments of a copy name the host as its destination."""
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != "meta"


def map_nested(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """An argument or output of an operator with every tensor in it replaced by `change(tensor)`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(map_nested(part, change) for part in value)
    return value


_Held = TypeVar("_Held")


class ByStorage(Generic[_Held]):
    """Something for each of some storages, kept for as long as the storage lives: views share what their base has."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], _Held]] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def get(self, storage: Any) -> _Held | None:
        """What is kept for `storage`, or None."""
        entry = self._entries.get(internals.storage_address(storage))
        return None if entry is None else entry[1]

    def set(self, storage: Any, held: _Held) -> None:
        """Keeps `held` for `storage`."""
        key = internals.storage_address(storage)

        def forget(reference: Any) -> None:
            # The number of a storage that is gone may be that of another by now.
            if key in self._entries and self._entries[key][0] is reference:
                del self._entries[key]

        self._entries[key] = (weakref.ref(storage, forget), held)

    def drop(self, storage: Any) -> None:
        """Keeps nothing for `storage` any more."""
        self._entries.pop(internals.storage_address(storage), None)


@cache
def behaviour(func: Operator) -> Behaviour:
    """How `func` treats storages."""
    schema = internals.schema_of(func)
    has_kernel = internals.has_kernel
    # Some operators that could be taken apart, such as the gradient of SiLU, have a kernel of their own as well.
    if has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(func.name(), "CPU"):
        return Behaviour.COMPOSITE
    if schema.name in _METADATA:
        return Behaviour.OTHER
    if schema.name in _UNDECLARED_VIEWS:
        return Behaviour.VIEW
    returns = [r.alias_info for r in schema.returns]
    if any(a is not None and not a.is_write for a in returns):
        return Behaviour.VIEW
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if not returns:
        return Behaviour.SILENT
    if all(a is not None for a in returns):
        # Out variants return the tensors they were given by keyword; in-place ones their first argument.
        return Behaviour.IN_PLACE if len(returns) == 1 and not written[0].kwarg_only else Behaviour.OTHER
    return Behaviour.FRESH if all(a is None for a in returns) else Behaviour.OTHER


def signature(values: Iterable[Any], operands: list[torch.Tensor]) -> tuple[Any, ...]:
    """A hashable description of arguments in which tensors count by shape, strides, dtype and kind of device.

    The tensors are added to `operands`, in order.
    """
    parts: list[Any] = []
    for value in values:
        kind = value.__class__
        if value is None or kind is _DTYPE:
            parts.append(value)
        elif kind is list or kind is tuple:
            parts.append(signature(value, operands))
        elif kind not in _PLAIN and isinstance(value, _TENSOR):
            if value.layout is not _STRIDED:
                raise TypeError("a sparse tensor can't be part of a cache key")
            operands.append(value)
            parts.append((value.shape, value.stride(), value.dtype, value.is_meta))
        elif isinstance(value, list | tuple):
            parts.append(signature(value, operands))
        else:
            # 1, 1.0 and True are equal as keys but not as arguments.
            parts.append((kind, value))
    return tuple(parts)


@dataclass(slots=True)
class Known:
    """What follows from an operator and the signature of its arguments.

    Args:
        outputs: its outputs, as shapes; of an operator that isn't `FRESH`, how it behaves.
        figures: whatever else somebody computed of them, for the next time.
    """

    outputs: Any
    figures: Any = None


def run(func: Operator, args: Arguments, kwargs: Options, execute: Callable[..., Any]) -> tuple[Any, Known | None]:
    """(outputs of a `FRESH`, `IN_PLACE` or `SILENT` operator, what is kept of its signature, if anything).

    `execute` answers when the cache can't.
    """
    operands: list[torch.Tensor] = []
    try:
        key = (
            func,
            signature(args, operands),
            (tuple(kwargs), signature(kwargs.values(), operands)) if kwargs else None,
            _shared(operands),
        )
        known = _cache.get(key)
    except (TypeError, RuntimeError):
        # Tensors that are sparse or have no storage, and arguments that can't be keys.
        return execute(func, args, kwargs), None
    if known is not None:
        outputs = known.outputs
        if outputs is Behaviour.IN_PLACE:
            return args[0], known
        return None if outputs is Behaviour.SILENT else map_nested(outputs, shape_like), known
    out = execute(func, args, kwargs)
    kind = behaviour(func)
    if kind is not Behaviour.FRESH or _is_repeatable(out):
        if len(_cache) >= _CACHE_LIMIT:
            _cache.clear()
        known = _cache[key] = Known(map_nested(out, shape_like) if kind is Behaviour.FRESH else kind)
    return out, known


def _shared(operands: list[torch.Tensor]) -> tuple[int, ...]:
    """For each tensor the place of the first that has the same storage; empty where each has its own."""
    if len(operands) < 2:
        return ()
    storages = [internals.storage_address(tensor.untyped_storage()) for tensor in operands]
    if len(set(storages)) == len(storages):
        return ()
    first: dict[int, int] = {}
    return tuple(first.setdefault(address, place) for place, address in enumerate(storages))


def _is_repeatable(out: Any) -> bool:
    made = list(tensors((out,)))
    if not made or any(not tensor.is_meta or tensor.layout is not torch.strided for tensor in made):
        return False
    # One gradient given out twice, as a layer with two biases does: built anew it would be two.
    return len({internals.storage_address(tensor.untyped_storage()) for tensor in made}) == len(made)
