"""A function whose intermediate tensors are computed again in the backward pass: eagerly, in graphs and under XLA.

`tf.recompute_grad` adds a zero to every argument, weights included, which copies them all, and looks for the variables
that a function uses by name. Here variables are arguments. In a graph the second computation waits for the gradient by
control dependencies, which cost nothing; XLA ignores these, so there the inputs depend on the gradient by a choice that
always goes the same way and that no compiler can know.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from memfit.frameworks.tensorflow import internals

Function = Callable[[list[Any], list[Any]], list[Any]]


def recomputed(
    function: Function,
    weights: Sequence[Any],
    trained: Sequence[bool],
    inputs: Sequence[Any],
    *,
    compiled: bool,
) -> list[Any]:
    """Calls the pure `function(weights, inputs)`, keeping only its arguments for the backward pass.

    Gradients go to inputs and to the weights that are `trained`; the second computation waits for those of the inputs.
    `compiled` says whether XLA compiles the step.
    """
    num = len(weights)
    arguments = [tf.convert_to_tensor(value) for value in (*weights, *inputs)]
    differentiated = [
        (index >= num or trained[index]) and value.dtype.is_floating for index, value in enumerate(arguments)
    ]
    types: list[Any] = []

    @tf.custom_gradient  # type: ignore[untyped-decorator,unused-ignore]
    def call(*values: Any) -> Any:
        # Tapes would hold in eager mode what a function makes.
        with internals.stop_recording():
            results = [tf.convert_to_tensor(r) for r in function(list(values[:num]), list(values[num:]))]
        types[:] = [result.dtype for result in results]

        def backward(*gradients: Any, variables: Any = None) -> Any:
            wanted = [g for g, dtype in zip(gradients, types, strict=True) if dtype.is_floating]
            found = _gradients(function, list(values), num, differentiated, wanted, list(variables or ()), compiled)
            return found if variables is None else (found[: len(values)], found[len(values) :])

        return results, backward

    results = call(*arguments)
    return list(results) if isinstance(results, list | tuple) else [results]


def _gradients(
    function: Function,
    values: list[Any],
    num_weights: int,
    differentiated: list[bool],
    gradients: list[Any],
    variables: list[Any],
    compiled: bool,
) -> list[Any]:
    """What `function` passes back to its arguments and variables, computed from them anew."""
    again = _after(values, num_weights, gradients, compiled)
    sources = [value for value, choice in zip(again, differentiated, strict=True) if choice] + variables
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(sources)
        results = [r for r in function(again[:num_weights], again[num_weights:]) if r.dtype.is_floating]
    # Those of embeddings stay lists of rows: optimizers clip and square each occurrence of a row for itself.
    found = iter(tape.gradient(results, sources, output_gradients=gradients))
    return [next(found) if choice else None for choice in (*differentiated, *([True] * len(variables)))]


def _after(values: list[Any], num_weights: int, gradients: list[Any], compiled: bool) -> list[Any]:
    """The values unchanged, made to wait until the gradients have been computed."""
    if tf.executing_eagerly() or not gradients:
        return values
    if not compiled:
        with tf.control_dependencies(gradients):
            return [tf.identity(value) for value in values]
    never = tf.zeros((), dtype=tf.bool)
    for gradient in gradients:
        first = tf.reshape(gradient, [-1])[:1]
        # No number is larger than infinity, nor is what isn't a number.
        never = tf.logical_or(never, tf.reduce_any(first > tf.constant(float("inf"), first.dtype)))
    weights = [tf.identity(value) for value in values[:num_weights]]
    return weights + [tf.where(never, tf.zeros([], value.dtype), value) for value in values[num_weights:]]
