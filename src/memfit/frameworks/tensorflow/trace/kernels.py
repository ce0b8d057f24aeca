"""What TensorFlow's kernels do with memory: which hand an input on, which write over it, which need more.

The rules are those of the kernels in `tensorflow/core/kernels` (2.20): each names what a kernel asks its context for
(`forward_input_or_allocate_output`, `allocate_temp`). Every allocation of a step can be seen in a profile with its
operator, which is how they were checked.
"""

import math
from collections.abc import Callable
from typing import Any, final

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from memfit.frameworks.tensorflow import internals
from memfit.frameworks.tensorflow.trace.memory import Node, Shape

# The output is the input, under another shape or name.
ALIASES = frozenset({
    "Identity", "IdentityN", "StopGradient", "PreventGradient", "Reshape", "Squeeze", "ExpandDims", "EnsureShape",
    "Bitcast", "Enter", "Exit", "NextIteration", "Switch", "Merge", "LoopCond", "RefIdentity", "Snapshot",
    "_Retval", "_Arg", "CheckNumerics", "PlaceholderWithDefault", "Assign", "AssignAdd", "AssignSub",
    "DestroyTemporaryVariable",
})  # fmt: skip

# The kernel writes over an input that nobody else needs any more, if it is as large as the output.
_BINARY = (
    "Add", "AddV2", "Sub", "Mul", "Div", "RealDiv", "DivNoNan", "MulNoNan", "Maximum", "Minimum", "Pow",
    "SquaredDifference", "FloorDiv", "FloorMod", "Mod", "TruncateDiv", "Xdivy", "Xlogy", "Xlog1py", "Atan2",
    "ReluGrad", "Relu6Grad", "EluGrad", "SeluGrad", "LeakyReluGrad", "SoftplusGrad", "SoftsignGrad", "SigmoidGrad",
    "TanhGrad", "RsqrtGrad", "SqrtGrad", "InvGrad", "ReciprocalGrad", "LogicalAnd", "LogicalOr",
)  # fmt: skip
_UNARY = (
    "Relu", "Relu6", "Elu", "Selu", "LeakyRelu", "Softplus", "Softsign", "Neg", "Abs", "Square", "Sqrt", "Rsqrt",
    "Exp", "Expm1", "Log", "Log1p", "Sigmoid", "Tanh", "Sin", "Cos", "Erf", "Erfc", "Sign", "Floor", "Ceil",
    "Round", "Rint", "Inv", "Reciprocal", "LogicalNot", "_UnaryOpsComposition", "BiasAdd", "Softmax", "LogSoftmax",
    "ClipByValue", "AddN", "Cumsum", "MatrixBandPart", "TensorScatterUpdate", "TensorScatterAdd",
    "ScatterNdUpdate", "ZerosLike", "OnesLike",
)  # fmt: skip
_FORWARDED: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(_BINARY, (0, 1)),
    **dict.fromkeys(_UNARY, (0,)),
    "Select": (1, 2),
    "SelectV2": (1, 2),
    "_FusedBatchNormEx": (0,),
    "FusedBatchNormV3": (0,),
    "FusedBatchNorm": (0,),
}
# For output 1: the gradient of the loss takes the place of the logits.
_FORWARDED_SECOND: dict[str, tuple[int, ...]] = {
    "SoftmaxCrossEntropyWithLogits": (0,),
    "SparseSoftmaxCrossEntropyWithLogits": (0,),
}

# These run on the thread that finds them ready (`IsExpensive` is false).
INEXPENSIVE = ALIASES | frozenset({
    "Const", "NoOp", "Placeholder", "Shape", "ShapeN", "Size", "Rank", "ControlTrigger", "VarHandleOp",
    "VariableShape", "TensorListLength",
})  # fmt: skip

# What a core does in a second, roughly: only how long operators take beside each other matters.
_OPERATIONS, _BYTES, _CALL_SECONDS = 45e9, 20e9, 2e-6
# Copying a matrix that is taken transposed goes across its rows: so much longer than along them.
_ACROSS_FACTOR = 6
# The gradient of a convolution's filter takes so much longer than that of its input.
_FILTER_FACTOR = 1.35
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


def forwarded(node: Node, port: int) -> tuple[int, ...]:
    """Inputs that an output may take the place of, in the order in which the kernel tries them."""
    if port == 0:
        return _FORWARDED.get(node.op, ())
    return _FORWARDED_SECOND.get(node.op, ()) if port == 1 else ()


def seconds_of(node: Node, touched_bytes: int, inputs: list[Shape]) -> float:
    """How long an operator is at work on one core, roughly."""
    if "MatMul" in node.op and node.item_bytes and len(inputs) > 1:
        # The second matrix, which of a layer is its kernel, is first copied into blocks that fit the caches.
        attributes = node.definition.attr
        is_across = attributes["transpose_b"].b or attributes["adj_y"].b
        touched_bytes += math.prod(inputs[1]) * node.item_bytes[0] * (_ACROSS_FACTOR if is_across else 1)
    return _CALL_SECONDS + touched_bytes / _BYTES + _operations(node, inputs) / _OPERATIONS


def _operations(node: Node, inputs: list[Shape]) -> float:
    """Multiplications and additions of a convolution or a product of matrices."""
    op, output = node.op, node.shapes[0] if node.shapes else None
    if output is None or len(inputs) < 2:
        return 0.0
    if op in ("Conv2D", "_FusedConv2D") and len(inputs[1]) == 4:
        return 2.0 * math.prod(output) * math.prod(inputs[1][:3])
    if op == "Conv2DBackpropInput" and len(inputs) > 2:
        return 2.0 * math.prod(inputs[2]) * math.prod(inputs[1][:3])
    if op == "Conv2DBackpropFilter" and len(inputs) > 2:
        return _FILTER_FACTOR * 2.0 * math.prod(inputs[2]) * math.prod(output[:3])
    if "MatMul" in op and inputs[0]:
        rows = inputs[0][-2 if node.definition.attr["transpose_a"].b or node.definition.attr["adj_x"].b else -1]
        return 2.0 * math.prod(output) * rows
    return 0.0


def assumed_shape(shapes: list[Shape]) -> Shape:
    """What an output is taken for where neither the graph nor TensorFlow tells: as large as its inputs together."""
    try:
        return tuple(int(size) for size in np.broadcast_shapes(*shapes))
    except ValueError:
        return max(shapes, key=math.prod)


@final
class Inference:
    """Asks TensorFlow for shapes and small integers that a graph doesn't tell; answers are kept, since loops ask again.

    A loop over parts of a batch slices by sizes that are computed when it runs. The small integers that such sizes are
    made of are computed, by TensorFlow's own kernels; as the sizes are followed, the shapes in such a loop follow too,
    one operator at a time.
    """

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
