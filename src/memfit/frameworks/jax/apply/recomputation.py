"""A function whose intermediate arrays are computed again in the backward pass, such that XLA can't undo it.

`jax.checkpoint` puts an optimization barrier before the second computation. XLA's compiler for the processor removes
barriers before it looks for common subexpressions, finds the same computation twice and keeps the results of the
first: nothing is saved. Here the inputs of the second computation are made to depend on the gradient that it waits for,
by a choice that always goes the same way and that no compiler can know. They are the same numbers, and the second
computation can neither be merged with the first nor begin before its time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Function = Callable[[list[Any], list[Any]], list[Any]]


def recomputed(function: Function, weights: Sequence[Any], trained: Sequence[bool], inputs: Sequence[Any]) -> list[Any]:
    """Calls the pure `function(weights, inputs)`, keeping only its arguments for the backward pass.

    Gradients go to inputs and to the weights that are `trained`; the second computation waits for those of the inputs.
    """
    num = len(weights)
    differentiated = [bool(wanted) and _is_inexact(value) for wanted, value in zip(trained, weights, strict=True)]
    differentiated += [_is_inexact(value) for value in inputs]

    def run(arguments: list[Any]) -> list[Any]:
        return function(arguments[:num], arguments[num:])

    @jax.custom_vjp
    def call(*arguments: Any) -> list[Any]:
        return run(list(arguments))

    def forward(*arguments: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return run(list(arguments)), arguments

    def backward(arguments: tuple[Any, ...], gradients: list[Any]) -> tuple[Any, ...]:
        wanted = [g for g in gradients if g.dtype != jax.dtypes.float0]
        again, wanted = _after(list(arguments), num, wanted)
        chosen = [value for value, choice in zip(again, differentiated, strict=True) if choice]

        def inexact_results(*values: Any) -> list[Any]:
            rest = iter(values)
            full = [next(rest) if choice else value for value, choice in zip(again, differentiated, strict=True)]
            return [value for value in run(full) if _is_inexact(value)]

        found = iter(jax.vjp(inexact_results, *chosen)[1](wanted))
        return tuple(next(found) if choice else None for choice in differentiated)

    call.defvjp(forward, backward)
    return call(*weights, *inputs)


def _is_inexact(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.inexact))


def _after(arguments: list[Any], num_weights: int, gradients: list[Any]) -> tuple[list[Any], list[Any]]:
    """The arguments unchanged, made to wait until the gradients have been computed."""
    if not gradients:
        return arguments, gradients
    never = jnp.zeros((), dtype=bool)
    for gradient in gradients:
        if gradient.size:
            # No number is larger than infinity, nor is what isn't a number.
            never = never | (jnp.ravel(gradient)[0].real > jnp.inf)
    inputs = [
        value if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else jnp.where(never, jnp.zeros_like(value), value)
        for value in arguments[num_weights:]
    ]
    # Compilers for graphics cards keep barriers; weights need no copy there.
    kept: tuple[list[Any], list[Any]] = jax.lax.optimization_barrier((arguments[:num_weights] + inputs, gradients))
    return kept
