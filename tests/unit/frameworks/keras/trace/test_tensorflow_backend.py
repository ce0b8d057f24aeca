"""TensorFlow gets a process of its own; integration/test_estimate_keras.py has more models."""

import json
import os
import subprocess
import sys

SCRIPT = """
import json
import keras
import numpy as np
import memfit
from memfit.frameworks.keras.batch import read
from memfit.frameworks.keras.trace.job import traced as trace
from memfit.frameworks.keras.trace.tensorflow_backend import compiles_on
from memfit.catalogue import find_device
from memfit.core.settings import Settings

model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="dense")], name="network")
model.compile(keras.optimizers.SGD(momentum=0.9), "mse", jit_compile=False)
cpu = find_device("cpu")
batch = np.zeros((16, 8), "float32"), np.zeros((16, 4), "float32")
trained = trace(model, read(batch), cpu, training=True)
predicted = trace(model, read(batch[0]), cpu, training=False)
found = {
    "state": {str(category): size for category, size in trained.state_bytes.items()},
    "predicted": sorted(predicted.state_bytes),
    "batch": trained.batch_bytes,
    "smaller": predicted.timeline.peak()[1] < trained.timeline.peak()[1],
    "parameters": sum(b.size_bytes for b in trained.timeline.blocks if (b.category, b.phase) == ("parameter", "setup")),
    "built": model.optimizer.built,
}

gpu = find_device("l4")
on_gpu = trace(model, read(batch), gpu, training=True)
asked = trace(model, read(batch), gpu, training=True, settings=Settings(jit_compile=False))

class Loud(keras.layers.Layer):
    def call(self, values):
        import tensorflow as tf
        return tf.ensure_shape(tf.py_function(lambda one: one, [values], tf.float32), values.shape)

loud = keras.Sequential([keras.Input((8,)), Loud(), keras.layers.Dense(4)])
loud.compile("sgd", "mse", jit_compile=False)
refused = trace(loud, read(batch), gpu, training=True)
eager = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
eager.compile("sgd", "mse", run_eagerly=True)
found |= {
    "assumed": [note.code for note in on_gpu.notes],
    "assigned": on_gpu.assigned_bytes,
    "asked": [note.code for note in asked.notes],
    "refused": [note.code for note in refused.notes],
    "refused parameters": refused.parameter_bytes,
    "jit_compile": [model.jit_compile, loud.jit_compile],
    "compiles": [compiles_on(model, gpu, None), compiles_on(model, cpu, None), compiles_on(eager, gpu, None)],
}

class Coder(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.layers.Dense(4)], name="encoder")
        self.decoder = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)], name="decoder")

    def compile(self, first, second):
        super().compile()
        self.first, self.second = first, second

    def train_step(self, data):
        import tensorflow as tf
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self.decoder(self.encoder(data)) - data) ** 2)
        for optimizer, part in ((self.first, self.encoder), (self.second, self.decoder)):
            optimizer.apply(tape.gradient(loss, part.trainable_weights), part.trainable_weights)
        return {"loss": loss}

coder = Coder()
coder.compile(keras.optimizers.Adam(), keras.optimizers.SGD(momentum=0.9))
own = [trace(coder, read(batch[0]), device, training=True) for device in (cpu, gpu)]
found["own"] = [{str(category): size for category, size in one.state_bytes.items()} for one in own]
found["own phases"] = [sorted({str(b.phase) for b in one.timeline.blocks}) for one in own]
found["own built"] = [coder.first.built, coder.second.built, len(coder.encoder.variables)]

def broken(data):
    raise TypeError("not\\n  like this")

model.train_step = broken
try:
    trace(model, read(batch), cpu, training=True)
except memfit.StepFailed as error:
    found["message"] = str(error)
print(json.dumps(found))
"""


def test_a_step_is_traced_into_a_graph():
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
    found = json.loads(done.stdout.splitlines()[-1])

    size = 4 * (8 * 4 + 4)
    assert found["state"] == {"parameter": size, "gradient": size, "buffer": 8, "optimizer state": size + 8}
    assert found["predicted"] == ["parameter"]
    assert found["parameters"] == size
    assert found["batch"] == 16 * (8 + 4) * 4
    assert found["smaller"]
    assert not found["built"]
    # Keras would have XLA compile it on a GPU, which it didn't find here.
    assert "jit-assumed" in found["assumed"]
    assert found["assigned"] >= 2 * size
    assert "jit-assumed" not in found["asked"]
    assert "jit-refused" in found["refused"]
    assert found["refused parameters"] == size
    assert found["jit_compile"] == [False, False]
    assert found["compiles"] == [True, False, False]
    # A model without call() and layers that only its own step builds; only the optimizers that it uses have state.
    size = 4 * (8 * 4 + 4 + 4 * 8 + 8)
    state = 2 * 4 * (8 * 4 + 4) + 4 * (4 * 8 + 8)
    for own in found["own"]:
        assert own["parameter"] == own["gradient"] == size
        assert state <= own["optimizer state"] <= state + 32
    assert found["own phases"] == [["backward", "forward", "optimizer", "setup"]] * 2
    assert found["own built"] == [False, False, 0]
    assert "the step failed as TensorFlow traced it" in found["message"]
    assert "not like this" in found["message"]
