"""Shapes from TensorFlow's inference. TensorFlow runs in a process of its own."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow isn't installed")

SCRIPT = """
import json
import numpy as np
import tensorflow as tf
from memfit.adapters.tensorflow.inference import Inference, input_types
from memfit.adapters.tensorflow.nodes import Node

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
