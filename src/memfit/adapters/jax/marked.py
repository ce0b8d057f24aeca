"""Blocks of a loss function that its author marked, so that a plan can choose which of them are computed again.

JAX has no layers: a loss is one function. `block(function)` marks a part of it whose inputs are few and whose inner
values are many, such as a transformer's layer. By itself the mark does nothing; while a step with settings is traced,
the calls that the settings name go through `jax.checkpoint`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import jax
import numpy as np


@dataclass(slots=True)
class _Tracing:
    """What is to be computed again, and the calls of blocks seen so far."""

    recomputed: frozenset[str] = frozenset()
    calls: dict[str, int] = field(default_factory=dict)
    found: list["Call"] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a marked block.

    Args:
        name: of the block and which of its calls, "layer.3".
        input_bytes: what must be kept to compute it again.
        output_bytes: what it returns.
    """

    name: str
    input_bytes: int
    output_bytes: int


_tracing: ContextVar[_Tracing | None] = ContextVar("memfit_jax_blocks", default=None)


def block(function: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
    """Marks a function as a block that can be computed again in the backward pass.

    Args:
        function: of arrays, or a module that can be called; called several times, each call is a block of its own.
        name: in plans and reports; the function's own by default.
    """
    known = name or getattr(function, "__name__", None) or type(function).__name__

    def marked(*arguments: Any, **options: Any) -> Any:
        tracing = _tracing.get()
        if tracing is None:
            return function(*arguments, **options)
        number = tracing.calls.get(known, 0)
        tracing.calls[known] = number + 1
        path = f"{known}.{number}"
        call = _recomputed(function) if path in tracing.recomputed else function
        result = call(*arguments, **options)
        tracing.found.append(Call(path, num_bytes((arguments, options)), num_bytes(result)))
        return result

    # Modules that can be called have no name of their own.
    return wraps(function)(marked) if hasattr(function, "__name__") else marked


@contextmanager
def recomputing(names: tuple[str, ...]) -> Iterator[list[Call]]:
    """Has the calls of blocks with these names computed again; yields all calls as they are made."""
    tracing = _Tracing(frozenset(names))
    token = _tracing.set(tracing)
    try:
        yield tracing.found
    finally:
        _tracing.reset(token)


def num_bytes(tree: Any) -> int:
    """Memory of the arrays of a tree."""
    return sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype") and leaf.ndim >= 0
    )


def _recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function through `jax.checkpoint`, which takes arrays only: what else it was given stays outside."""

    def call(*arguments: Any, **options: Any) -> Any:
        leaves, structure = jax.tree.flatten((arguments, options))
        is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]

        def inner(arrays: list[Any]) -> Any:
            given = iter(arrays)
            own = [next(given) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
            inner_arguments, inner_options = jax.tree.unflatten(structure, own)
            return function(*inner_arguments, **inner_options)

        return jax.checkpoint(inner)([leaf for leaf, array in zip(leaves, is_array, strict=True) if array])

    return call
