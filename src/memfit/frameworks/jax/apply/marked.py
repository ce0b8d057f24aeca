"""Blocks of a loss function that its author marked, so that a plan can choose which of them are computed again.

JAX has no layers: a loss is one function. `block(function)` marks a part of it whose inputs are few and whose inner
values are many, such as a transformer's layer. By itself the mark does nothing; while a step with settings is traced,
the calls that the settings name are computed again in the backward pass.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memfit.core.errors import BadInput
from memfit.frameworks.jax.apply.recomputation import recomputed


@dataclass(frozen=True, slots=True)
class BlockCall:
    """One call of a marked block."""

    name: str  # of the block and which of its calls, "layer.3"
    kept_bytes: int  # inside, for the backward pass
    flops: float  # of its forward pass


@dataclass(slots=True)
class _Tracing:
    """What is to be computed again, and the calls of blocks seen so far."""

    recomputed: frozenset[str] = frozenset()
    calls: dict[str, int] = field(default_factory=dict)
    found: list[BlockCall] | None = None


_tracing: ContextVar[_Tracing | None] = ContextVar("memfit_jax_blocks", default=None)


def block(function: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
    """Marks a function as a block that can be computed again in the backward pass."""
    known = name or getattr(function, "__name__", None) or type(function).__name__

    def marked(*arguments: Any, **options: Any) -> Any:
        tracing = _tracing.get()
        if tracing is None:
            return function(*arguments, **options)
        number = tracing.calls.get(known, 0)
        tracing.calls[known] = number + 1
        path = f"{known}.{number}"
        if tracing.found is not None:
            tracing.found.append(_looked_at(path, function, arguments, options))
        if path not in tracing.recomputed:
            return function(*arguments, **options)
        call = _OfArrays(function, arguments, options)
        # What the function takes from around it, such as the weights of a module, must be an argument to be trained.
        closed, around = jax.closure_convert(call, *call.arrays)
        trained = [True] * len(around)
        results = recomputed(lambda weights, inputs: list(closed(*inputs, *weights)), around, trained, call.arrays)
        return jax.tree.unflatten(call.shape, results)

    # Modules that can be called have no name of their own.
    return wraps(function)(marked) if hasattr(function, "__name__") else marked


@contextmanager
def recomputing(names: tuple[str, ...]) -> Iterator[None]:
    """Has the calls of blocks with these names computed again; refuses names that no call has."""
    tracing = _Tracing(frozenset(names))
    token = _tracing.set(tracing)
    try:
        yield
    finally:
        _tracing.reset(token)
    known = [f"{name}.{number}" for name, count in tracing.calls.items() for number in range(count)]
    unknown = sorted(tracing.recomputed.difference(known))
    if unknown:
        has = f"It has {', '.join(known)}" if known else "It has none: mark functions with memfit.jax.block"
        raise BadInput(f"the step has no block {', '.join(map(repr, unknown))} to recompute. {has}.")


@contextmanager
def recording() -> Iterator[list[BlockCall]]:
    """Yields the calls of blocks as they are made."""
    found: list[BlockCall] = []
    token = _tracing.set(_Tracing(found=found))
    try:
        yield found
    finally:
        _tracing.reset(token)


def num_bytes(tree: Any) -> int:
    """Memory of the arrays of a tree."""
    return sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype") and leaf.ndim >= 0
    )


class _OfArrays:
    """A call as a function of its arrays: what else it was given stays as it is."""

    def __init__(self, function: Callable[..., Any], arguments: Any, options: Any) -> None:
        self._function = function
        self._leaves, self._structure = jax.tree.flatten((arguments, options))
        self._is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in self._leaves]
        self.arrays = [jnp.asarray(leaf) for leaf, array in zip(self._leaves, self._is_array, strict=True) if array]
        self.shape: Any = None

    def __call__(self, *arrays: Any) -> list[Any]:
        given = iter(arrays)
        leaves = [next(given) if array else leaf for leaf, array in zip(self._leaves, self._is_array, strict=True)]
        arguments, options = jax.tree.unflatten(self._structure, leaves)
        results, self.shape = jax.tree.flatten(self._function(*arguments, **options))
        return list(results)


def _looked_at(name: str, function: Callable[..., Any], arguments: Any, options: Any) -> BlockCall:
    """What a call keeps and computes; nothing is run."""
    call = _OfArrays(function, arguments, options)
    # Blocks inside of it are part of it.
    token = _tracing.set(None)
    try:
        closed, around = jax.closure_convert(call, *call.arrays)
        given = [*call.arrays, *around]
        trained = [index for index, array in enumerate(given) if jnp.issubdtype(array.dtype, jnp.inexact)]

        def backward(*values: Any) -> Any:
            def of_trained(*chosen: Any) -> Any:
                own = list(values)
                for index, value in zip(trained, chosen, strict=True):
                    own[index] = value
                return [result for result in closed(*own) if jnp.issubdtype(result.dtype, jnp.inexact)]

            # The function that computes gradients holds what was kept for it.
            return jax.tree.leaves(jax.vjp(of_trained, *(values[index] for index in trained))[1])

        kept = num_bytes(jax.eval_shape(backward, *given))
        flops = count_flops(jax.make_jaxpr(closed)(*given).jaxpr)
    finally:
        _tracing.reset(token)
    return BlockCall(name, max(0, kept - num_bytes(given)), flops)


def count_flops(program: Any) -> float:
    """Operations of the products and convolutions of a jaxpr, inner programs included; a loop counts with its length.

    A loop whose length only a run would tell counts once.
    """
    total = 0.0
    for equation in program.eqns:
        name = equation.primitive.name
        if name == "dot_general":
            total += _product(equation)
        elif name == "conv_general_dilated":
            total += _convolution(equation)
        else:
            times = equation.params.get("length", 1) if name == "scan" else 1
            total += times * sum(map(count_flops, _inner(equation.params)))
    return total


def _product(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    size = math.prod(equation.outvars[0].aval.shape) * math.prod(left[place] for place in contracted)
    return 2.0 * float(size)


def _convolution(equation: Any) -> float:
    kernel = equation.invars[1].aval.shape
    output_channels = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    size = math.prod(equation.outvars[0].aval.shape) * math.prod(kernel)
    return float(2.0 * size / max(1, output_channels))


def _inner(params: dict[str, Any]) -> list[Any]:
    """Programs among the parameters of an equation; of branches, the first that there is."""
    found = []
    for value in params.values():
        one = value[0] if isinstance(value, tuple | list) and value else value
        program = getattr(one, "jaxpr", one)
        if hasattr(program, "eqns"):
            found.append(program)
    return found
