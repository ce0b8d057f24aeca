"""TensorFlow gets a process of its own, in which loops are followed one after the other."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json
import keras
import numpy as np
import tensorflow as tf
from keras import layers
from memfit.frameworks.keras.script.tensorflow_loops import TensorFlowScriptLoop
from memfit.catalogue import find_device

class Ended(BaseException):
    pass

def follow(script):
    turns = []
    def end(loop):
        turns.append(loop)
        raise Ended
    loop = TensorFlowScriptLoop(end)
    loop.watch()
    printed = []
    try:
        script(printed.append)
        loop.close()
    except Ended:
        pass
    if not turns:
        return {"printed": printed}
    trace = turns[0].trace(find_device("cpu"))
    blocks = trace.timeline.blocks
    return {
        "printed": printed,
        "state": {str(category): size for category, size in trace.state_bytes.items()},
        "notes": [note.code for note in trace.notes],
        "categories": sorted({str(block.category) for block in blocks}),
        "modules": sorted({block.module for block in blocks}),
        "phases": [str(mark.phase) for mark in trace.timeline.marks],
        "peak": trace.timeline.peak()[1],
        "batch": trace.batch_bytes,
    }

def network(name, *sizes):
    return keras.Sequential([keras.Input((32,)), *(layers.Dense(size) for size in sizes)], name=name)

data = tf.data.Dataset.from_tensor_slices((np.zeros((64, 32), "float32"), np.zeros(64, "uint8"))).batch(16)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

def eager(show):
    model, optimizer, metric = network("eager", 64, 10), keras.optimizers.Adam(), keras.metrics.Mean()
    before = model.get_weights()
    for epoch in range(2):
        for number, (x, y) in enumerate(data):
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))
            optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
            metric.update_state(loss)
            show([f"{float(loss):.1f}", bool(loss < 0.5), f"{loss:.2f}", int(tf.argmax(loss[None])), x.shape[0]])
            show(bool(all(np.array_equal(a, b) for a, b in zip(before, model.get_weights()))))

def one_batch(show):
    # An epoch of a single turn goes through its evaluation before it comes back.
    model, optimizer = network("one", 8), keras.optimizers.SGD()
    for epoch in range(3):
        for x, y in data.take(1):
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x))
            optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
        show(sum(1 for x, y in data))

def compiled(show):
    model, optimizer = network("compiled", 64, 10), keras.optimizers.Adam()
    @tf.function(input_signature=[tf.TensorSpec([None, 32]), tf.TensorSpec([None], tf.uint8)])
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
        return {"loss": loss}
    @tf.function
    def evaluate(x):
        return tf.reduce_sum(x) + 3.0
    show(float(evaluate(tf.zeros((2, 2)))))
    for x, y in data:
        show(float(step(x, y)["loss"]))

def two(show):
    small, large = network("small", 8), network("large", 512, 8)
    optimizers = keras.optimizers.SGD(), keras.optimizers.Adam()
    def made(model, optimizer):
        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
            return loss
        return step
    steps = [made(model, optimizer) for model, optimizer in zip((small, large), optimizers)]
    for x, y in data:
        show([float(step(x)) for step in steps])

def by_hand(show):
    model = network("hand", 8)
    for x, y in data:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x))
        for variable, gradient in zip(model.trainable_weights, tape.gradient(loss, model.trainable_weights)):
            variable.assign_sub(0.1 * gradient)

def adversaries(show):
    generator, critic = network("generator", 32), network("critic", 16, 1)
    first, second = keras.optimizers.Adam(), keras.optimizers.Adam()
    for x, _ in data:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(critic(tf.concat([x, generator(tf.random.normal(tf.shape(x)))], 0)))
        first.apply(tape.gradient(loss, critic.trainable_weights), critic.trainable_weights)
        with tf.GradientTape() as tape:
            other = -tf.reduce_mean(critic(generator(tf.random.normal(tf.shape(x)))))
        second.apply(tape.gradient(other, generator.trainable_weights), generator.trainable_weights)
        show([loss.numpy().item(), float(other)])

def nothing(show):
    show(float(tf.function(lambda x: x + 1)(1.0)))
    with tf.GradientTape() as tape:
        pass

cases = (eager, one_batch, compiled, two, by_hand, adversaries, nothing)
print(json.dumps({case.__name__: follow(case) for case in cases}))
"""


@pytest.fixture(scope="module")
def found():
    environment = os.environ | {
        "KERAS_BACKEND": "tensorflow",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def size_of(*sizes):
    return 4 * sum(before * after + after for before, after in zip((32, *sizes), sizes, strict=False))


def test_an_eager_loop_is_recorded_for_one_turn_and_trains_nothing(found):
    turn = found["eager"]

    # What the script looked at was a stand-in, and its weights were left alone.
    assert turn["printed"] == [["1.0", False, "1.00", 0, 16], True]
    size = size_of(64, 10)
    assert {name: turn["state"][name] for name in ("parameter", "gradient")} == {"parameter": size, "gradient": size}
    assert turn["state"]["optimizer state"] >= 2 * size
    assert "eager" in turn["notes"]
    assert turn["batch"] == 16 * 32 * 4 + 16
    assert {"parameter", "optimizer state", "gradient", "activation", "input batch"} <= set(turn["categories"])
    assert len([module for module in turn["modules"] if module.startswith("dense")]) == 2
    assert turn["phases"] == ["forward", "backward", "optimizer"]


def test_data_come_to_an_end_while_a_loop_is_recorded(found):
    assert found["one_batch"]["printed"] == [4]
    assert found["one_batch"]["state"]["parameter"] == size_of(8)


def test_a_function_that_trains_is_traced_and_others_run(found):
    turn = found["compiled"]

    assert turn["printed"] == [3.0, 1.0]
    assert turn["state"]["parameter"] == size_of(64, 10)
    assert turn["peak"] >= 4 * size_of(64, 10)
    assert "eager" not in turn["notes"]


def test_of_several_functions_the_one_that_needs_most_is_shown(found):
    turn = found["two"]

    assert turn["printed"] == [[1.0, 1.0]]
    assert turn["state"]["parameter"] == size_of(8) + size_of(512, 8)
    assert "loop-functions" in turn["notes"]
    assert any(module.startswith("large.") for module in turn["modules"])


def test_updates_by_hand_are_a_turn_too(found):
    assert found["by_hand"]["state"] == {"parameter": size_of(8)}


def test_a_turn_with_two_tapes_is_one(found):
    turn = found["adversaries"]

    assert turn["printed"] == [[1.0, 1.0]]
    assert turn["state"]["parameter"] == size_of(32) + size_of(16, 1)
    assert any(module.startswith("generator.") for module in turn["modules"])
    assert any(module.startswith("critic.") for module in turn["modules"])


def test_what_computes_no_gradients_is_no_turn(found):
    assert found["nothing"] == {"printed": [2.0]}
