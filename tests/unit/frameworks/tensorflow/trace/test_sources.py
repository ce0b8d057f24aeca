"""Lines of a step whose operators TensorFlow inlines, fuses and differentiates. It runs in a process of its own."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow isn't installed")

SCRIPT = """
import json
import tempfile
import tensorflow as tf
from memfit.core.user_code import caller_lines
from memfit.frameworks.tensorflow.trace.graph import graph_of
from memfit.frameworks.tensorflow.trace.sources import NodeSources

weight = tf.Variable(tf.ones((8, 8)))

class Saved(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec((None, 8))])
    def __call__(self, x):
        return tf.math.erf(x)

with tempfile.TemporaryDirectory() as folder:
    tf.saved_model.save(Saved(), folder)
    loaded = tf.saved_model.load(folder)

@tf.function
def called(x):
    return tf.sin(x)  # Sin

def is_early(number, x):
    return number < 3

def repeated(number, x):
    return number + 1, tf.cos(x)  # Cos

def step(x):
    with tf.GradientTape() as tape:
        h = tf.nn.relu(tf.matmul(x, weight))  # MatMul Relu
        h = tf.tanh(h)  # first Tanh
        h = tf.tanh(h)  # second Tanh
        h = tf.while_loop(is_early, repeated, (tf.constant(0), called(h)))[1]
        h = loaded(h)  # loaded
        loss = tf.reduce_sum(h)
    weight.assign_sub(tape.gradient(loss, weight))  # gradient
    return loss

traced, callers = tf.function(step).get_concrete_function(tf.TensorSpec((4, 8))), caller_lines()
sources = NodeSources(traced.graph, callers)
print(json.dumps([[node.op, node.name, sources.of(node.name)] for node in graph_of(traced).nodes]))
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """(operator, name, line) of the nodes that run, and the line of the script that each remark stands on."""
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, path], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def line_of(remark):
    (number,) = [number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith(f"# {remark}")]
    return f"train.py:{number}"


def sources_of(nodes, op, *, backward=False):
    return {source for kind, name, source in nodes if kind == op and ("gradient" in name) == backward}


@pytest.mark.parametrize("op", ["Sin", "Cos"])
def test_what_a_function_or_a_loop_runs_comes_from_its_own_line(nodes, op):
    assert sources_of(nodes, op) == {line_of(op)}


def test_what_a_saved_function_runs_comes_from_the_line_that_calls_it(nodes):
    assert sources_of(nodes, "Erf") == {line_of("loaded")}


def test_what_is_fused_comes_from_the_line_of_its_parts(nodes):
    assert sources_of(nodes, "_FusedMatMul") | sources_of(nodes, "MatMul") == {line_of("MatMul Relu")}


def test_the_backward_pass_comes_from_the_line_of_the_operator_that_it_is_for(nodes):
    assert sources_of(nodes, "ReluGrad", backward=True) == {line_of("MatMul Relu")}
    assert sources_of(nodes, "MatMul", backward=True) == {line_of("MatMul Relu")}


def test_the_update_comes_from_its_own_line(nodes):
    assert sources_of(nodes, "AssignSubVariableOp") == {line_of("gradient")}


def test_gradients_that_may_be_for_either_of_two_operators_come_from_where_they_were_asked_for(nodes):
    assert sources_of(nodes, "TanhGrad", backward=True) == {line_of("gradient")}


def test_the_line_that_asks_for_the_trace_is_no_part_of_it(nodes):
    caller = next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.startswith("traced,"))

    assert f"train.py:{caller}" not in {source for _, _, source in nodes}
