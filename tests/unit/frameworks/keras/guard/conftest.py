"""One process with TensorFlow for all tests here that need it."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import keras, numpy as np, tensorflow as tf
from memfit.frameworks.keras.guard import variables
from memfit.frameworks.keras.guard.steps import make_steps
from memfit.frameworks.keras.guard.data import ordered
from memfit.frameworks.keras.guard import steps as steps_module
from memfit.core.guarding import BrokenUpdate
steps_module._LARGE_BYTES = 1

found = {}

def fitted(compiled):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)])
    model.compile("adam", "mse", jit_compile=compiled)
    model._symbolic_build(data_batch=(tf.ones((4, 3)), tf.ones((4, 2))))
    model.make_train_function()
    steps = make_steps(model, lambda batch: None)
    steps.install()
    return model, steps

def values(model):
    return [one.numpy() for group in variables.grouped(model).values() for one in group]

def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))

batch = tf.ones((4, 3)), tf.ones((4, 2))
for compiled in (False, True):
    model, steps = fitted(compiled)
    before = values(model)
    steps.begin(batch)
    steps.run(batch)
    changed = not same(before, values(model))
    try:
        steps.roll_back()
        undone = same(before, values(model))
    except BrokenUpdate as error:
        undone = str(error)
    found[f"compiled {compiled}"] = [changed, undone]

# A step that fails after the forward pass, in the graph.
model, steps = fitted(False)
class Fails:
    def __init__(self):
        self.on = False
fails = tf.Variable(True)
plain = steps.updating
import contextlib
@contextlib.contextmanager
def failing(gradients):
    with tf.control_dependencies([one for one in gradients]):
        check = tf.debugging.Assert(tf.logical_not(fails), ["no memory"])
    with tf.control_dependencies([check]):
        gradients = [tf.identity(one) for one in gradients]
    with plain(gradients) as ready:
        yield ready
steps.updating = failing
steps.over  # what Keras calls
steps._spec = (tf.TensorSpec((None, 3)), tf.TensorSpec((None, 2)))
before = values(model)
steps.begin(batch)
try:
    steps.run(batch)
    found["graph"] = "no failure"
except tf.errors.InvalidArgumentError:
    steps.roll_back()
    found["graph"] = same(before, values(model))
fails.assign(False)
steps.begin(batch)
steps.run(batch)
steps.forget()
found["iterations"] = int(model.optimizer.iterations.numpy())

from memfit.api.fit import fit

class WithoutCall(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.inner(batch)))
        weights = self.inner.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}

found["without call"] = []
for guarded in (False, True):
    keras.utils.set_random_seed(1)
    model = WithoutCall()
    model.compile("adam")
    (fit if guarded else keras.Model.fit)(model, np.ones((8, 3), "float32"), batch_size=4, verbose=0, shuffle=False)
    found["without call"].append([one.tolist() for one in values(model)])

class Adapter:
    _num_samples, batch_size = 7, 3
    _inputs = (np.arange(7.0), None, np.arange(14).reshape(7, 2))
orders = iter([[6, 5, 4, 3, 2, 1, 0], [0, 2, 4, 6, 1, 3, 5]])
data = ordered(Adapter(), lambda number, size: np.array(next(orders)))
found["order"] = [[part[0].numpy().tolist() for part in data] for _ in range(2)]
found["shapes"] = [str(one.shape) for one in tf.nest.flatten(data.element_spec) if hasattr(one, "shape")]
print(json.dumps(found))
"""


@pytest.fixture(scope="session")
def on_tensorflow():
    """What the script found."""
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed")
    environment = os.environ | {
        "KERAS_BACKEND": "tensorflow",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
