"""Keras on JAX gets a process of its own, in which loops are followed one after the other."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
from pathlib import Path
import jax
import keras
from memfit.frameworks.keras.script.jax_loops import JaxScriptLoop
from memfit.catalogue import find_device

class Ended(BaseException):
    pass

TEXT = '''
import jax, keras, numpy as np, optax
from keras import layers
model = keras.Sequential([keras.Input((32,)), layers.Dense(64), layers.Dense(10)], name="network")
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.Adam()
optimizer.build(model.trainable_variables)
data = [(np.zeros((16, 32), "float32"), np.zeros(16, "uint8"))] * 4

def loss_and_updates(trainable, others, x, y):
    predicted, others = model.stateless_call(trainable, others, x, training=True)
    return loss_of(y, predicted), others

gradients_of = jax.value_and_grad(loss_and_updates, has_aux=True)

def step(state, batch):
    trainable, others, slots = state
    (loss, others), gradients = gradients_of(trainable, others, *batch)
    trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
    return loss, (trainable, others, slots)

state = tuple([v.value for v in group] for group in (
    model.trainable_variables, model.non_trainable_variables, optimizer.variables))

@jax.jit
def evaluate(trainable, x):
    return (model.stateless_call(trainable, [], x)[0] * 0 + 3).mean()

show(float(evaluate(state[0], data[0][0])))
'''
LOOP = '''
for batch in data:
    loss, state = step(state, batch)
    show(float(loss))
    show(float(abs(state[0][1]).sum()))
'''
CASES = {
    "eager": LOOP,
    "jitted": "step = jax.jit(step)" + LOOP,
    "donated": "step = jax.jit(donate_argnums=0)(step)" + LOOP,
    "gradients": "gradients_of = jax.jit(gradients_of)" + LOOP,
    "clipped": '''
def step(state, batch):
    trainable, others, slots = state
    (loss, others), gradients = jax.value_and_grad(loss_and_updates, has_aux=True)(trainable, others, *batch)
    gradients = [g * 0.5 for g in gradients]
    trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
    return loss, (trainable, others, slots)
''' + LOOP,
    "optax": '''
tx = optax.adam(1e-3)
slots = tx.init(state[0])
@jax.jit
def step(trainable, slots, x, y):
    (loss, _), gradients = gradients_of(trainable, [], x, y)
    updates, slots = tx.update(gradients, slots, trainable)
    return loss, optax.apply_updates(trainable, updates), slots
trainable = state[0]
for batch in data:
    loss, trainable, slots = step(trainable, slots, *batch)
    show(float(loss))
''',
    "two": '''
other = keras.Sequential([keras.Input((32,)), layers.Dense(512), layers.Dense(1)], name="other")
second = keras.optimizers.SGD()
second.build(other.trainable_variables)
@jax.jit
def turn(trainable, slots, x):
    loss, gradients = jax.value_and_grad(lambda t: other.stateless_call(t, [], x)[0].mean())(trainable)
    return second.stateless_apply(slots, gradients, trainable), loss
step = jax.jit(step)
mine = [v.value for v in other.trainable_variables], [v.value for v in second.variables]
for batch in data:
    loss, state = step(state, batch)
    mine, also = turn(*mine, batch[0])
    show([float(loss), float(also)])
''',
    "nothing": "",
}

def follow(name, body):
    turns, printed = [], []
    def end(loop):
        turns.append(loop)
        raise Ended
    plain = jax.jit, jax.grad, jax.value_and_grad
    loop = JaxScriptLoop(end)
    loop.watch()
    try:
        exec(compile(TEXT + body, f"{name}.py", "exec"), {"show": printed.append, "__name__": "__main__"})
        loop.close()
    except Ended:
        pass
    jax.jit, jax.grad, jax.value_and_grad = plain
    if not turns:
        return {"printed": printed}
    trace = turns[0].trace(find_device("cpu"))
    blocks = trace.timeline.blocks
    return {
        "printed": printed,
        "state": {str(category): size for category, size in trace.state_bytes.items()},
        "notes": [note.code for note in trace.notes],
        "held": {category: sum(b.size_bytes for b in blocks if b.category == category and b.phase == "setup")
                 for category in ("parameter", "optimizer state", "input batch")},
        "modules": sorted({block.module for block in blocks}),
        "phases": [str(mark.phase) for mark in trace.timeline.marks],
        "assigned": trace.assigned_bytes,
        "batch": trace.batch_bytes,
    }

print(json.dumps({name: follow(name, body) for name, body in CASES.items()}))
"""
SIZE = 4 * (32 * 64 + 64 + 64 * 10 + 10)


@pytest.fixture(scope="module")
def found():
    environment = os.environ | {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["eager", "jitted", "donated", "gradients", "clipped"])
def test_a_turn_is_compiled_and_nothing_is_trained(found, name):
    turn = found[name]

    # The evaluation ran; the loss is a stand-in, and the loop was left when it came back.
    assert turn["printed"] in ([3.0, 1.0, 0.0],)
    assert {key: turn["state"][key] for key in ("parameter", "gradient")} == {"parameter": SIZE, "gradient": SIZE}
    assert turn["held"]["parameter"] == SIZE
    assert 2 * SIZE <= turn["held"]["optimizer state"] <= 2 * SIZE + 32
    assert turn["batch"] == turn["held"]["input batch"] == 16 * 32 * 4 + 16
    assert turn["assigned"] >= 3 * SIZE
    assert turn["phases"] == ["setup", "forward", "backward", "optimizer"]
    assert len([module for module in turn["modules"] if module.startswith("dense")]) == 2
    assert ("eager" in turn["notes"]) == (name not in ("jitted", "donated"))


def test_donated_state_is_replaced_in_its_place(found):
    assert found["donated"]["assigned"] < found["jitted"]["assigned"] <= found["eager"]["assigned"]


def test_other_optimizers_are_known_when_the_loop_comes_back(found):
    turn = found["optax"]

    assert turn["printed"] == [3.0, 1.0]
    assert turn["held"]["parameter"] == SIZE
    assert turn["held"]["optimizer state"] == 2 * SIZE + 4
    assert turn["batch"] == 16 * 32 * 4 + 16


def test_of_several_steps_the_one_that_needs_most_is_shown(found):
    turn = found["two"]

    assert turn["printed"] == [3.0, [1.0, 1.0]]
    assert "loop-functions" in turn["notes"]
    assert turn["state"]["parameter"] == SIZE + 4 * (32 * 512 + 512 + 512 + 1)
    assert any(module.startswith("other.") for module in turn["modules"])


def test_what_computes_no_gradients_is_no_turn(found):
    assert found["nothing"] == {"printed": [3.0]}
