"""The graph that TensorFlow runs: fused, folded, lowered, with every shape. TensorFlow runs in a process of its own."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow isn't installed")

SCRIPT = """
import json
import tensorflow as tf
from memfit.frameworks.tensorflow.trace.graph import graph_of

weight, bias = tf.Variable(tf.ones((16, 8))), tf.Variable(tf.ones((8,)))

@tf.function
def step(x):
    y = tf.nn.bias_add(tf.matmul(x, weight), bias)
    scale = tf.fill((4, 8), 2.0) * 3.0
    unused = tf.exp(x)
    i, total = tf.while_loop(lambda i, t: i < 5, lambda i, t: (i + 1, t + y), (0, y * scale))
    weight.assign_sub(tf.matmul(x, total, transpose_a=True))
    return tf.reduce_sum(total)

function = step.get_concrete_function(tf.TensorSpec((4, 16)))
for on_gpu in (False, True):
    graph = graph_of(function, on_gpu=on_gpu)
    print(json.dumps({
        "ops": [node.op for node in graph.nodes],
        "unknown": [node.op for node in graph.nodes if node.item_bytes and None in node.shapes],
        "shapes": {node.op: node.shapes for node in graph.nodes},
        "arguments": len(graph.arguments),
        "results": [graph.nodes[number].op for number, _ in graph.results],
    }))
"""


@pytest.fixture(scope="module")
def graphs():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_the_graph_is_what_runs(graphs):
    host = graphs[0]
    assert "_FusedMatMul" in host["ops"]
    assert {"Enter", "Switch", "Merge", "NextIteration", "Exit"} <= set(host["ops"])
    assert "While" not in host["ops"] and "Exp" not in host["ops"]
    # What follows from constants alone is made once.
    assert "Fill" not in host["ops"]


def test_every_shape_that_is_made_is_known(graphs):
    # Loops hand on what they are given, whose shape is known by then.
    for graph in graphs:
        assert set(graph["unknown"]) <= {"Enter", "Merge", "Switch", "NextIteration", "Exit"}
    assert graphs[0]["shapes"]["_FusedMatMul"] == [[4, 8]]
    assert graphs[0]["shapes"]["MatMul"] == [[16, 8]]


def test_arguments_and_results_are_found(graphs):
    for graph in graphs:
        assert graph["arguments"] == 3
        assert len(graph["results"]) == 1
