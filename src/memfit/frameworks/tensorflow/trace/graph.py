"""The graph that TensorFlow would really run for a function.

Between tracing and running, TensorFlow inlines functions, lowers loops, folds constants and fuses operators (Grappler).
The memory of a step is that of the result, so the same optimizer is asked, for a described device and without any
session. Shapes come from TensorFlow's own inference over the result.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, device_properties_pb2, meta_graph_pb2

from memfit.core.errors import StepFailed
from memfit.frameworks.tensorflow import internals
from memfit.frameworks.tensorflow.trace.memory import Graph, Node, Shape

HOST = "/job:localhost/replica:0/task:0/device:CPU:0"
GPU = "/job:localhost/replica:0/task:0/device:GPU:0"

_HOST_ONLY = frozenset({tf.resource, tf.variant, tf.string})
_LARGEST_VALUE = 64
_GPU_MEMORY_BYTES = 16 << 30
# What TensorFlow's CPU device says of itself whatever the machine has; the optimizer rearranges sums beyond it.
_HOST_MEMORY_BYTES = 256 << 20


def item_bytes(data_type: Any) -> int:
    """Bytes of one element; 0 of what lies elsewhere: handles of variables, lists."""
    return 0 if data_type in _HOST_ONLY else int(data_type.size)


def graph_of(function: Any, *, on_gpu: bool = False) -> Graph:
    """The graph that TensorFlow runs for a `ConcreteFunction`, with the shape of every tensor."""
    # A build without kernels for GPUs complains about each of them; its optimizer then plans for the host's.
    device = GPU if on_gpu and tf.test.is_built_with_cuda() else HOST
    by_handle = {id(variable.handle): variable for variable in function.graph.variables}
    handles = {
        inner.op.name: by_handle[id(outer)] for outer, inner in function.graph.captures if id(outer) in by_handle
    }
    definition = _optimized(function, handles, device, _GPU_MEMORY_BYTES if on_gpu else _HOST_MEMORY_BYTES)
    meta = meta_graph_pb2.MetaGraphDef()
    meta.graph_def.CopyFrom(definition)
    meta.collection_def["train_op"].node_list.value.append(definition.node[-1].name)
    return _linked(definition, internals.output_properties(meta), function.graph)


def _optimized(function: Any, handles: Mapping[str, Any], device: str, memory_bytes: int) -> Any:
    """The function's graph after TensorFlow's optimizer."""
    definition = function.graph.as_graph_def()
    for node in definition.node:
        if node.name in handles:
            # The handle of a variable says nothing about shapes, by which the optimizer decides, unless the variable
            # itself is in the graph.
            variable = handles[node.name]
            node.op = "VarHandleOp"
            node.ClearField("attr")
            node.attr["dtype"].type = variable.dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(variable.shape.as_proto())
            node.attr["shared_name"].s = node.name.encode()
        node.device = device
    for body in definition.library.function:
        for node in body.node_def:
            node.device = device
    meta = tf.compat.v1.train.export_meta_graph(graph_def=definition, graph=function.graph)
    # Whatever is asked for of the graph stands in this collection; everything else is pruned.
    kept = meta.collection_def["train_op"].node_list.value
    kept.extend(tensor.name for tensor in function.graph.outputs)
    kept.extend(operation.name for operation in function.graph.control_outputs)
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.min_graph_nodes = -1
    devices = []
    for name in {HOST, device}:
        one = device_properties_pb2.NamedDevice(name=name)
        one.properties.type = "GPU" if name == GPU else "CPU"
        one.properties.frequency = 2000
        one.properties.num_cores = 40 if name == GPU else 2
        one.properties.memory_size = memory_bytes
        if name == GPU:
            one.properties.environment["architecture"] = "8.0"
        devices.append(one)
    try:
        return internals.optimize_graph(config, meta, devices)
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise StepFailed(f"TensorFlow's optimizer refused the graph of the step: {error}") from error


def _position(name: str) -> tuple[str, int]:
    """(node, output) of a tensor's name."""
    node, _, port = name.partition(":")
    return node, int(port or 0)


def _linked(definition: Any, properties: Mapping[str, Any], traced: Any) -> Graph:
    """The graph with its edges both ways.

    `traced`, the graph before optimization, knows more shapes: a fused operator has the name and the result of the last
    of its parts.
    """
    before = {operation.name: operation for operation in traced.get_operations()}
    created = {name: number for number, name in enumerate(before)}
    numbers = {node.name: number for number, node in enumerate(definition.node)}
    nodes = []
    control_consumers: list[list[int]] = [[] for _ in numbers]
    for number, node in enumerate(definition.node):
        made = Node(node.name, node.op, node)
        for text in node.input:
            if text.startswith("^"):
                made.controls.append(numbers[text[1:]])
                control_consumers[numbers[text[1:]]].append(number)
            else:
                name, port = _position(text)
                made.inputs.append((numbers[name], port))
        old = before[node.name].outputs if node.name in before else ()
        for port, known in enumerate(properties.get(node.name, ())):
            made.item_bytes.append(item_bytes(tf.as_dtype(known.dtype)))
            shape: Shape | None = None
            if not known.shape.unknown_rank and all(dimension.size >= 0 for dimension in known.shape.dim):
                shape = tuple(int(dimension.size) for dimension in known.shape.dim)
            elif port < len(old) and old[port].shape.is_fully_defined():
                shape = tuple(old[port].shape)
            made.shapes.append(shape)
        if node.op == "Const":
            # What it holds if it is small: shapes, axes and limits of loops.
            tensor = node.attr["value"].tensor
            size = math.prod(dimension.size for dimension in tensor.tensor_shape.dim)
            if tf.as_dtype(tensor.dtype) not in _HOST_ONLY and size <= _LARGEST_VALUE:
                made.value = np.asarray(tf.make_ndarray(tensor))
        nodes.append(made)
    consumers: list[list[tuple[int, int, int]]] = [[] for _ in numbers]
    for number, made in enumerate(nodes):
        for slot, (producer, port) in enumerate(made.inputs):
            consumers[producer].append((port, number, slot))
    results = [_position(tensor.name) for tensor in traced.outputs]
    roots = [number for number, made in enumerate(nodes) if not made.inputs and not made.controls]
    return Graph(
        nodes,
        consumers,
        control_consumers,
        [(numbers[name], port) for name, port in results if name in numbers],
        {tensor.op.name: numbers[tensor.op.name] for tensor in traced.inputs if tensor.op.name in numbers},
        sorted(roots, key=lambda number: (nodes[number].op != "Const", created.get(nodes[number].name, -1))),
    )
