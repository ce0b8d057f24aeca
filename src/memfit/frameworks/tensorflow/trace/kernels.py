"""What TensorFlow's kernels do with memory: which hand an input on, which write over it, which need more.

The rules are those of the kernels in `tensorflow/core/kernels` (2.20): each names what a kernel asks its context for
(`forward_input_or_allocate_output`, `allocate_temp`). Every allocation of a step can be seen in a profile with its
operator, which is how they were checked.
"""

import math

import numpy as np

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


def forwarded(node: Node, port: int) -> tuple[int, ...]:
    """Inputs that an output may take the place of, in the order in which the kernel tries them."""
    if port == 0:
        return _FORWARDED.get(node.op, ())
    return _FORWARDED_SECOND.get(node.op, ()) if port == 1 else ()


def scratch_bytes(node: Node) -> int:
    """What a kernel takes for the time that it runs, which of oneDNN's isn't asked of TensorFlow."""
    is_loss = node.op in ("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits")
    if not is_loss or not node.item_bytes or not node.shapes or node.shapes[0] is None:
        return 0
    return math.prod(node.shapes[0]) * node.item_bytes[0]


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


def output_shape(node: Node, port: int, shapes: list[Shape | None]) -> Shape:
    """A shape that only the run tells, from those of the inputs."""
    known = [shape for shape in shapes if shape is not None]
    op = node.op
    if not known:
        return ()
    if op in ("MatMul", "_FusedMatMul"):
        rows = known[0][1] if node.definition.attr["transpose_a"].b else known[0][0]
        columns = known[1][0] if node.definition.attr["transpose_b"].b else known[1][1]
        return (rows, columns)
    if op == "BiasAddGrad":
        return known[0][-1:]
    if op == "Split" and len(shapes) > 1 and shapes[1] is not None:
        parts = node.definition.attr["num_split"].i
        return (*shapes[1][:-1], shapes[1][-1] // parts)
    if op in ("ConcatV2", "Concat"):
        parts = [shape for shape in known if len(shape) == len(known[0])]
        return (*parts[0][:-1], sum(shape[-1] for shape in parts))
    try:
        return tuple(int(size) for size in np.broadcast_shapes(*known))
    except ValueError:
        return max(known, key=math.prod)
