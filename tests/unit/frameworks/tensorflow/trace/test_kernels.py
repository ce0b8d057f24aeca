"""What kernels do with memory."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from memfit.frameworks.tensorflow.trace.kernels import assumed_shape, forwarded, seconds_of
from tests.unit.frameworks.tensorflow.graphs import node


@pytest.mark.parametrize(("op", "places"), [("AddV2", (0, 1)), ("Relu", (0,)), ("SelectV2", (1, 2)), ("Conv2D", ())])
def test_kernels_write_over_what_they_may(op, places):
    assert forwarded(node("n", op), 0) == places


def test_the_gradient_of_the_loss_takes_the_place_of_the_logits():
    loss = node("n", "SparseSoftmaxCrossEntropyWithLogits", num_outputs=2)
    assert (forwarded(loss, 0), forwarded(loss, 1)) == ((), (0,))


@pytest.mark.parametrize(("shapes", "shape"), [([(4, 1), (3,)], (4, 3)), ([(4, 8), (5, 8)], (5, 8)), ([], ())])
def test_a_shape_that_nothing_tells_is_that_of_the_inputs(shapes, shape):
    assert assumed_shape(shapes) == shape


def test_convolutions_take_longer_than_what_they_touch():
    convolution = node("n", "Conv2D", shape=(8, 16, 16, 64))
    inputs = [(8, 16, 16, 64), (3, 3, 64, 64)]
    plain = seconds_of(node("n", "AddV2", shape=(8, 16, 16, 64)), 1000, inputs)
    assert seconds_of(convolution, 1000, inputs) > 10 * plain


def test_a_kernel_that_is_taken_transposed_takes_longer():
    """The gradient of a layer's input still reads the kernel when that of the kernel itself has long been there."""
    of_kernel = node("n", "MatMul", shape=(4096, 4096), transpose_a=True)
    of_input = node("n", "MatMul", shape=(16, 4096), transpose_b=True)
    touched = 4096 * 4096 * 4

    late = seconds_of(of_input, touched, [(16, 4096), (4096, 4096)])
    early = seconds_of(of_kernel, touched, [(16, 4096), (16, 4096)])
    update = seconds_of(node("n", "Mul", shape=(4096, 4096)), 2 * touched, [(4096, 4096), ()])

    assert late > early + update


pytestmark = pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow isn't installed")

SCRIPT = """
import json
import numpy as np
import tensorflow as tf
from memfit.frameworks.tensorflow.trace.kernels import Inference, input_types
from memfit.frameworks.tensorflow.trace.memory import Node

def node(function, *specs, op):
    graph = tf.function(function).get_concrete_function(*specs).graph
    definition = next(one.node_def for one in graph.get_operations() if one.type == op)
    return Node(op, op, definition, item_bytes=[4])

x, scalar = tf.TensorSpec((None, 8, 8, 3)), tf.TensorSpec(())
kernel, sizes = tf.TensorSpec((3, 3, 3, 5)), tf.TensorSpec((4,), tf.int32)
found, inference = {}, Inference()
cut = node(lambda x, n: tf.slice(x, [0, 0, 0, 0], n), x, sizes, op="Slice")
given = [(16, 8, 8, 3), (4,), (4,)]
found["slice"] = inference.shapes(0, cut, given, [None, np.zeros(4, int), np.array([4, -1, -1, -1])])
found["unknown"] = inference.shapes(0, cut, given, [None, None, None])
conv = node(lambda x, k: tf.nn.conv2d(x, k, 2, "SAME"), x, kernel, op="Conv2D")
found["convolution"] = inference.shapes(1, conv, [(4, 8, 8, 3), (3, 3, 3, 5)], [None, None])
quotient = node(lambda x, s: x / s, x, scalar, op="RealDiv")
found["scalar"] = inference.shapes(2, quotient, [(4, 8, 8, 3), ()], [None, None])
found["wrong"] = inference.shapes(1, conv, [(4, 8), (3, 3, 3, 5)], [None, None])
joined = node(lambda x: tf.concat([x, x, x], 0), x, op="ConcatV2")
found["types"] = input_types(joined.definition)
unregistered = tf.compat.v1.NodeDef(op="NoSuchOperator")
found["unregistered"] = input_types(unregistered)

def followed(function, *values):
    # What each operator makes, one after the other, as the walk through a graph follows them.
    graph = tf.function(function).get_concrete_function(*(tf.TensorSpec(np.shape(v), tf.int32) for v in values)).graph
    known = {tensor.name: np.asarray(value) for tensor, value in zip(graph.inputs, values)}
    for number, one in enumerate(graph.get_operations()):
        if one.type == "Const":
            known[one.outputs[0].name] = tf.get_static_value(one.outputs[0])
        elif one.inputs:
            given = [known.get(tensor.name) for tensor in one.inputs]
            shapes = [() if value is None else np.shape(value) for value in given]
            made = inference.values(
                100 + number, Node(
                    one.name,
                    one.type,
                    one.node_def,
                    shapes=[tuple(t.shape) if t.shape.is_fully_defined() else None for t in one.outputs],
                    item_bytes=[4] * len(one.outputs),
                ), shapes, given
            )
            known.update(zip([tensor.name for tensor in one.outputs], [] if made is None else made))
    value = known.get(graph.outputs[0].name)
    inference._values.clear()
    return None if value is None else np.asarray(value).tolist()

found["less"] = followed(lambda a, b: a < b, 3, 4)
found["minimum"] = followed(lambda a, b: tf.minimum(a, b - 2), 200, 150)
found["element"] = followed(lambda a: a[1], [5, 6, 7])
found["elements"] = followed(lambda a: a[1:], [5, 6, 7])
found["product"] = followed(lambda a: tf.stack([tf.reduce_prod(tf.gather(a, [0, 1, 2])), a[3]]), [80, 64, 64, 8])
found["joined"] = followed(lambda a, b: tf.concat([a, b], 0), [1, 2], [3])
found["chosen"] = followed(lambda a: tf.where(a < 0, 7, a), [-1, 3])
found["broadcast"] = followed(
    lambda a, b: tf.raw_ops.BroadcastGradientArgs(s0=a, s1=b).r1, [80, 64, 8], [1, 8]
)
found["mask"] = followed(lambda a: tf.fill(tf.stack([a, a]), 1), 20_000)
found["few"] = followed(lambda a: tf.fill(tf.stack([a, a]), 7), 2)
found["random"] = followed(lambda a: tf.random.uniform((), maxval=a, dtype=tf.int32), 5)
found["float"] = followed(lambda a: tf.sqrt(tf.cast(a, tf.float32)), 4)
found["failed"] = followed(lambda a, b: a // b, 4, 0)
shape = node(lambda x: tf.shape(x), x, op="Shape")
found["shape"] = [one.tolist() for one in inference.values(3, shape, [(3, 4, 5, 6)], [None])]
found["no value"] = inference.values(4, cut, given, [None, np.zeros(4, int), np.array([4, -1, -1, -1])])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_slice_has_the_size_that_was_computed(found):
    assert found["slice"] == [[4, 8, 8, 3]]
    assert found["unknown"] == [None]


def test_shapes_follow_from_those_of_the_inputs(found):
    assert found["convolution"] == [[4, 4, 4, 5]]
    assert found["scalar"] == [[4, 8, 8, 3]]


def test_inputs_that_do_not_fit_tell_nothing(found):
    assert found["wrong"] == [None]


def test_types_of_inputs_as_declared(found):
    float_type, integer_type = 1, 3
    assert found["types"] == [float_type, float_type, float_type, integer_type]
    assert found["unregistered"] is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("less", True),
        ("minimum", 148),
        ("element", 6),
        ("elements", [6, 7]),
        ("product", [80 * 64 * 64, 8]),
        ("joined", [1, 2, 3]),
        ("chosen", [7, 3]),
        ("broadcast", [0, 1]),
        ("few", [[7, 7], [7, 7]]),
        ("shape", [[3, 4, 5, 6]]),
    ],
)
def test_integers_that_sizes_are_made_of_are_followed(found, name, value):
    assert found[name] == value


@pytest.mark.parametrize("name", ["mask", "random", "float", "failed", "no value"])
def test_what_is_not_a_whole_number_of_the_graph_is_not_computed(found, name):
    assert found[name] is None
