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
from memfit.adapters.keras.batch import read
from memfit.adapters.keras.tensorflow_backend import trace
from memfit.catalogue import find_device

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
    assert "the step failed while TensorFlow traced it" in found["message"]
    assert "not like this" in found["message"]
