"""Shapes that a graph doesn't tell, by TensorFlow's own inference once an operator's inputs are known.

A loop over parts of a batch slices by sizes that are computed when it runs. The small integers that such sizes are made
of are computed, by TensorFlow's own kernels; as the sizes are followed, the shapes in such a loop follow too, one
operator at a time.
"""

import math
from collections.abc import Callable
from typing import Any, final

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from memfit.frameworks.tensorflow import internals
from memfit.frameworks.tensorflow.trace.memory import Node, Shape

_LARGEST_VALUE = 64
_NAME = "inferred"
# Operators whose outputs only the run tells the shapes of, but which are no larger than the inputs.
_OF_INPUTS_SIZE = frozenset({"BroadcastGradientArgs", "ListDiff", "Unique", "Where"})
# What follows from shapes alone.
_OF_SHAPES: dict[str, Callable[[list[Shape]], list[Any]]] = {
    "Shape": lambda shapes: [shapes[0]],
    "ShapeN": lambda shapes: list(shapes),
    "Size": lambda shapes: [math.prod(shapes[0])],
    "Rank": lambda shapes: [len(shapes[0])],
}


@final
class Inference:
    """Asks TensorFlow for shapes and small integers; answers are kept, since loops ask again."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], list[Shape | None]] = {}
        self._values: dict[tuple[Any, ...], list[Any] | None] = {}

    def values(self, number: int, node: Node, shapes: list[Shape], values: list[Any]) -> list[Any] | None:
        """What each output of a node holds, where small integers or truth values follow from the inputs."""
        if node.op in _OF_SHAPES:
            return [np.asarray(value) for value in _OF_SHAPES[node.op](shapes)]
        if not values:
            return None
        small = [_small(value, shape) for value, shape in zip(values, shapes, strict=True)]
        if any(value is None for value in small):
            return None
        if node.op not in _OF_INPUTS_SIZE:
            # A mask over pairs of positions is made of integers, too, but isn't small.
            inferred = self.shapes(number, node, shapes, values) if None in node.shapes else node.shapes
            if any(shape is None or math.prod(shape) > _LARGEST_VALUE for shape in inferred):
                return None
        key = (number, *(value.tobytes() for value in small), *shapes)
        if key not in self._values:
            self._values[key] = _computed(node, small)
        return self._values[key]

    def shapes(self, number: int, node: Node, shapes: list[Shape], values: list[Any]) -> list[Shape | None]:
        """Of each output of a node; None where inference doesn't tell either."""
        small = [_small(value, shape) for value, shape in zip(values, shapes, strict=True)]
        key = (number, *shapes, *(None if value is None else value.tobytes() for value in small))
        if key not in self._known:
            self._known[key] = _inferred(node, shapes, small)
        return self._known[key]


def _small(value: Any, shape: Shape) -> Any:
    """A value that has the shape of its tensor."""
    if value is None or math.prod(shape) > _LARGEST_VALUE or np.size(value) != math.prod(shape):
        return None
    return np.reshape(value, shape)


def _computed(node: Node, values: list[Any]) -> list[Any] | None:
    """What TensorFlow's kernel makes of integers."""
    declared = internals.op_definition(node.op)
    types = input_types(node.definition)
    if declared is None or declared.is_stateful or types is None or len(types) != len(values):
        return None
    if not all(_is_whole(tf.as_dtype(data_type)) for data_type in types):
        return None
    attributes: list[Any] = []
    for attribute in declared.attr:
        given = node.definition.attr[attribute.name]
        kind = given.WhichOneof("value")
        value: Any = getattr(given, kind) if kind else None
        if kind == "list":
            value = next((list(values) for _, values in value.ListFields()), [])
        elif kind == "shape":
            value = None if value.unknown_rank else [dimension.size for dimension in value.dim]
        attributes += [attribute.name, value]
    try:
        with tf.init_scope(), tf.device("CPU:0"):
            inputs = [tf.constant(value, tf.as_dtype(kind)) for value, kind in zip(values, types, strict=True)]
            outputs = internals.run_kernel(node.op, len(node.item_bytes), inputs, tuple(attributes))
            return [one.numpy() for one in outputs] if all(_is_whole(one.dtype) for one in outputs) else None
    except (ValueError, TypeError, tf.errors.OpError):
        return None


def _is_whole(data_type: Any) -> bool:
    return bool(data_type.is_integer or data_type.is_bool)


def _inferred(node: Node, shapes: list[Shape], values: list[Any]) -> list[Shape | None]:
    unknown: list[Shape | None] = [None] * len(node.item_bytes)
    types = input_types(node.definition)
    if types is None or len(types) != len(shapes):
        return unknown
    definition = graph_pb2.GraphDef()
    # Old graphs have scalars whose shape isn't known.
    definition.versions.producer = tf.version.GRAPH_DEF_VERSION
    asked = definition.node.add()
    asked.CopyFrom(node.definition)
    asked.name, asked.device = _NAME, ""
    for private in [name for name in asked.attr if name.startswith("_")]:
        del asked.attr[private]
    del asked.input[:]
    for place, (data_type, shape, value) in enumerate(zip(types, shapes, values, strict=True)):
        name = f"input{place}"
        asked.input.append(name)
        given = definition.node.add(name=name, op="Placeholder" if value is None else "Const")
        given.attr["dtype"].type = data_type
        if value is None:
            given.attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())
        else:
            given.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.as_dtype(data_type)))
    graph = tf.Graph()
    try:
        with graph.as_default():
            tf.graph_util.import_graph_def(definition, name="")
        outputs = graph.get_operation_by_name(_NAME).outputs
    except (ValueError, TypeError, KeyError, tf.errors.OpError):
        return unknown
    return [tuple(tensor.shape) if tensor.shape.is_fully_defined() else None for tensor in outputs]


def input_types(definition: Any) -> list[int] | None:
    """The type of each input, as its operator declares it; None of an operator that isn't registered."""
    declared = internals.op_definition(definition.op)
    if declared is None:
        return None
    types: list[int] = []
    for argument in declared.input_arg:
        if argument.type_list_attr:
            types += definition.attr[argument.type_list_attr].list.type
            continue
        data_type = argument.type or definition.attr[argument.type_attr].type
        types += [data_type] * (definition.attr[argument.number_attr].i if argument.number_attr else 1)
    return types
