"""What each call of a layer makes, keeps for the backward pass and computes, found without running the model.

The model is called on symbolic tensors, as Keras does to learn shapes, while every call of a layer is noted down. What
a layer keeps inside is counted for the kinds whose inner tensors are large (attention, recurrent layers, activations);
a layer of others keeps what these make. The numbers compare parts of a model with each other; what a step really takes
is for the estimate to say.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras

from memfit.frameworks.keras import internals
from memfit.frameworks.keras.batch import item_bytes

# Two, so that no dimension of 1 is taken for something else.
_BATCH = 2
_VIEWS = (keras.layers.Reshape, keras.layers.Flatten, keras.layers.InputLayer)
# The backward pass of these needs their result alone.
_BY_RESULT = ("linear", "relu", "relu6", "sigmoid", "tanh", "softmax")


@dataclass(slots=True)
class Call:
    """One call of a layer, or of a model."""

    layer: Any
    inputs: list[tuple[int, ...]] = field(default_factory=list)
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    made_bytes: int = 0  # per sample, of what it returned
    inner_bytes: int = 0  # per sample, of what it keeps beside inputs and outputs
    flops: int = 0  # per sample, of the forward pass; 0 where unknown
    calls: "list[Call]" = field(default_factory=list)


def recorded(model: keras.Model, inputs: Any) -> Call | None:
    """The call of the whole model on a batch of these inputs; None where Keras can't follow it without running it."""

    def symbol(value: Any) -> Any:
        if value is None:
            return None
        sizes = (1 if length is None else int(length) for length in tuple(value.shape)[1:])
        return keras.KerasTensor((_BATCH, *sizes), dtype=str(keras.backend.standardize_dtype(value.dtype)))

    symbolic = keras.tree.map_structure(symbol, inputs)
    top = Call(model)
    with _noting(top):
        try:
            internals.compute_output_spec(model, symbolic)
        except Exception:
            # Layers of users may do what has no symbols; the plain step shows whatever is really wrong.
            return None
    return top.calls[0] if top.calls else None


@contextmanager
def _noting(top: Call) -> Iterator[None]:
    """Notes down the calls of layers while it lasts."""
    plain = keras.layers.Layer.__call__
    stack = [top]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        one = Call(self)
        stack.append(one)
        try:
            outputs = plain(self, *args, **kwargs)
        finally:
            stack.pop()
        _fill(one, (args, kwargs), outputs)
        stack[-1].calls.append(one)
        return outputs

    keras.layers.Layer.__call__ = call
    try:
        yield
    finally:
        keras.layers.Layer.__call__ = plain


def _fill(one: Call, inputs: Any, outputs: Any) -> None:
    tensors = [value for value in keras.tree.flatten(outputs) if hasattr(value, "shape") and hasattr(value, "dtype")]
    one.inputs, one.outputs = (
        [tuple(1 if length is None else int(length) for length in value.shape) for value in given]
        for given in ((value for value in keras.tree.flatten(inputs) if hasattr(value, "shape")), tensors)
    )
    widths = [item_bytes(str(keras.backend.standardize_dtype(value.dtype))) for value in tensors]
    if not isinstance(one.layer, _VIEWS):
        sizes = zip(one.outputs, widths, strict=True)
        one.made_bytes = sum(math.prod(shape) * width for shape, width in sizes) // _BATCH
    width = widths[0] if widths else 4
    elements, operations = _own_work(one)
    if elements is None:
        one.inner_bytes = sum(part.made_bytes + part.inner_bytes for part in one.calls)
        one.flops = sum(part.flops for part in one.calls)
    else:
        one.inner_bytes, one.flops = elements * width // _BATCH, operations // _BATCH
        one.calls = []


def _own_work(one: Call) -> tuple[int | None, int]:
    """(elements that a layer of a known kind keeps inside, operations), of the whole batch; None for other kinds."""
    layer, layers = one.layer, keras.layers
    if not one.inputs or not one.outputs:
        return None, 0
    given, made = math.prod(one.inputs[0]), math.prod(one.outputs[0])
    if isinstance(layer, layers.MultiHeadAttention | layers.GroupQueryAttention):
        return _attention(one)
    if isinstance(layer, layers.RNN):
        return _recurrent(one)
    kernel = getattr(layer, "kernel", None)
    if isinstance(layer, layers.EinsumDense):
        # Terms of each sum: the sizes of the kernel's letters that the result lacks.
        sides, _, result = layer.equation.replace("...", "").partition("->")
        sizes = zip(sides.split(",")[1], layer.kernel.shape, strict=False)
        return _activation(layer, made), 2 * made * math.prod(size for letter, size in sizes if letter not in result)
    if isinstance(layer, layers.Dense):
        return _activation(layer, made), 2 * made * one.inputs[0][-1]
    if kernel is None:
        return (None, 0) if one.calls else (_activation(layer, made) if hasattr(layer, "activation") else 0, 0)
    window = math.prod(kernel.shape[:-2])
    if "Transpose" in type(layer).__name__:
        return _activation(layer, made), 2 * given * window * kernel.shape[-2]
    if "Depthwise" in type(layer).__name__:
        return _activation(layer, made), 2 * made * window
    if "Conv" in type(layer).__name__:
        return _activation(layer, made), 2 * made * window * kernel.shape[-2]
    return (None, 0) if one.calls else (0, 0)


def _activation(layer: Any, made: int) -> int:
    """What an activation function inside of a layer keeps beside its result."""
    name = getattr(getattr(layer, "activation", None), "__name__", "linear")
    return 0 if name in _BY_RESULT else made


def _attention(one: Call) -> tuple[int, int]:
    """Query, key, value and context, and twice the scores: before and after the softmax."""
    layer = one.layer
    query, key = one.inputs[0], one.inputs[min(1, len(one.inputs) - 1)]
    heads = int(getattr(layer, "num_heads", 0) or getattr(layer, "num_query_heads", 1))
    width = int(getattr(layer, "key_dim", 0) or getattr(layer, "head_dim", 1))
    here, there = math.prod(query[:-1]), math.prod(key[:-1])
    scores = heads * here * (there // query[0])
    projected = heads * width * (2 * here + 2 * there)
    operations = 2 * projected * query[-1] + 4 * scores * width
    return projected + 2 * scores, operations


def _recurrent(one: Call) -> tuple[int, int]:
    """The gates of every step before and after their functions, and the states."""
    layer, given = one.layer, one.inputs[0]
    units = int(getattr(layer, "units", 0) or getattr(getattr(layer, "cell", None), "units", 0) or 0)
    gates = {"LSTM": 4, "GRU": 3}.get(type(layer).__name__, 1)
    steps = given[0] * given[1]
    return steps * units * (2 * gates + 2), 2 * steps * gates * units * (given[-1] + units)
