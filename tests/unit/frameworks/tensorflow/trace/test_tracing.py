"""The memory of a step against what TensorFlow's allocator says. TensorFlow runs in a process of its own."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from memfit.core.timeline import Phase
from memfit.frameworks.tensorflow.trace.tracing import phase_of

pytestmark = pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow isn't installed")

SCRIPT = """
import json
import tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(1)
from benchmarks.measuring_tensorflow import recorded
from memfit.frameworks.tensorflow.trace.tracing import StepVariable, trace_step
from memfit.core.errors import StepFailed
from memfit.core.timeline import Category

SHAPE = (32, 24, 24, 3)
kept = {}

def make():
    with tf.name_scope("model"):
        kernel = tf.Variable(tf.random.normal((3, 3, 3, 16)))
        weight = tf.Variable(tf.random.normal((16, 200)))
    spare = tf.Variable(tf.zeros((1000,)))

    def step(x):
        with tf.GradientTape() as tape:
            with tf.name_scope("block_1"):
                with tf.name_scope("conv"):
                    h = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME"))
                h = tf.nn.max_pool2d(tf.tanh(h), 2, 2, "SAME")
            with tf.name_scope("dense"):
                y = tf.matmul(tf.reduce_mean(h, (1, 2)), weight)
            loss = tf.reduce_mean(tf.square(y))
        gradients = tape.gradient(loss, (kernel, weight))
        with tf.name_scope("sgd"):
            for variable, gradient in zip((kernel, weight), gradients):
                variable.assign_sub(0.1 * gradient)
        return loss

    entries = [
        StepVariable(kernel, Category.PARAMETER, "block.conv"),
        StepVariable(weight, Category.PARAMETER, "dense"),
        StepVariable(spare, Category.BUFFER, ""),
    ]
    return tf.function(step), step, entries

def run(mark):
    kept["made"] = compiled, _, _ = make()
    x = tf.zeros(SHAPE)
    for number in (1, 2, 3):
        with mark(number):
            compiled(x)

measured = recorded(run)
compiled, step, entries = kept["made"]
layers = ["block", "block.conv", "dense"]
function = compiled.get_concrete_function(tf.TensorSpec(SHAPE))
rows = {"measured": measured.step_bytes}
for name, options in (("host", {}), ("gpu", {"on_gpu": True}), ("xla", {"jit_compile": True})):
    traced = trace_step(function, entries, optimizers=["sgd"], layers=layers, **options)
    timeline = traced.timeline
    tick, peak = timeline.peak()
    rows[name] = {
        "peak": peak,
        "assigned": traced.assigned_bytes,
        "categories": timeline.breakdown(tick, lambda block: block.category),
        "held": {c: sum(b.size_bytes for b in timeline.blocks if b.category == c and b.start < 4)
                 for c in ("parameter", "buffer", "input batch")},
        "modules": sorted({block.module for block in timeline.blocks}),
        "gradients": sum(b.size_bytes for b in timeline.blocks if b.category == "gradient"),
        "phases": [mark.phase for mark in timeline.marks],
        "notes": [note.code for note in traced.notes],
        "order": traced.notes[0].text if traced.notes else "",
        "spread": traced.spread,
    }

@tf.function
def refused(x):
    return tf.py_function(lambda y: y, [x], tf.float32)

try:
    trace_step(refused.get_concrete_function(tf.TensorSpec((4,))), [], jit_compile=True)
except StepFailed as error:
    rows["refused"] = str(error)
print(json.dumps(rows))
"""


@pytest.fixture(scope="module")
def rows():
    environment = {**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_the_peak_is_the_allocators(rows):
    assert rows["host"]["assigned"] is None
    assert rows["host"]["peak"] == pytest.approx(rows["measured"][-1], rel=0.03)


def test_variables_and_batch_live_all_the_time(rows):
    held = {"parameter": 4 * (3 * 3 * 3 * 16 + 16 * 200), "buffer": 4000, "input batch": 32 * 24 * 24 * 3 * 4}
    assert rows["host"]["held"] == rows["gpu"]["held"] == held


def test_blocks_are_named(rows):
    host = rows["host"]
    assert {"block", "block.conv", "dense"} <= set(host["modules"])
    assert set(host["modules"]) <= {"", "block", "block.conv", "dense"}
    assert host["phases"][:2] == ["forward", "backward"]
    assert host["categories"]["activation"] >= 32 * 24 * 24 * 16 * 4
    assert host["gradients"] >= 4 * 16 * 200


def test_what_is_assumed_is_said(rows):
    assert rows["host"]["notes"] == ["order"]
    assert rows["gpu"]["notes"] == ["order", "libraries"]


def test_other_orders_are_only_looked_at_where_operators_run_side_by_side(rows):
    least, greatest = rows["host"]["spread"]
    assert 0.5 < least <= 1 <= greatest < 2
    assert rows["host"]["order"].endswith("; the bounds are those of 10 orders")
    assert rows["gpu"]["order"].endswith("so does the peak")
    assert rows["gpu"]["spread"] == [1, 1]


def test_xla_lays_out_the_whole_step(rows):
    compiled = rows["xla"]
    assert compiled["assigned"] >= sum(rows["host"]["held"].values())
    assert set(compiled["modules"]) <= {"", "block", "block.conv", "dense"}


def test_a_step_that_xla_refuses_is_named(rows):
    assert rows["refused"].startswith("XLA can't compile the step: ")
    assert rows["refused"].endswith("Compile the model with jit_compile=False where it can't.")


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("sequential_1/conv2d_1/convolution", Phase.FORWARD),
        ("gradient_tape/sequential_1/conv2d_1/convolution/Conv2DBackpropInput", Phase.BACKWARD),
        ("adam/Sub_3", Phase.OPTIMIZER),
        ("adam_1/Sub_3", Phase.OPTIMIZER),
        ("adamant/Sub_3", Phase.FORWARD),
    ],
)
def test_phases_follow_from_scopes(name, phase):
    assert phase_of(name, ["adam"]) is phase


def test_without_an_optimizer_nothing_is_an_update():
    assert phase_of("adam/Sub_3") is Phase.FORWARD


def test_a_sum_of_gradients_is_part_of_the_backward_pass():
    assert phase_of("AddN_3") is Phase.BACKWARD
    assert phase_of("network/AddN_3/inner") is Phase.FORWARD
