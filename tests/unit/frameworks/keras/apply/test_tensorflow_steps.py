"""Slices; training on TensorFlow is in integration/test_fit_equality.py, as a process has one backend.

Importing TensorFlow into the process of all tests would slow them down: a fresh one makes the slices.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, tensorflow as tf
from memfit.frameworks.keras.apply.tensorflow_steps import _joined, _added, _length, _lists, _rows
dense = tf.reshape(tf.range(8), (4, 2))
ragged = tf.ragged.constant([[1], [2, 3], [], [4]])
sparse = tf.sparse.from_dense(dense)
found = _rows({"dense": dense, "ragged": ragged, "sparse": sparse, "none": None}, 1, 2)
lists = _lists(tf.zeros((5, 2)), 2)
for index, rows in enumerate(([0, 3], [3])):
    lists = _added(lists, tf.IndexedSlices(tf.ones((len(rows), 2)), tf.constant(rows)), index)
joined = _joined(*lists, tf.zeros((5, 2)))
print(json.dumps({
    "dense": found["dense"].numpy().tolist(), "ragged": found["ragged"].to_list(),
    "sparse": tf.sparse.to_dense(found["sparse"]).numpy().tolist(), "none": found["none"],
    "lengths": [int(_length(one)) for one in (dense, ragged, sparse)],
    "rows": joined.indices.numpy().tolist(), "sum": tf.convert_to_tensor(joined).numpy().tolist(),
}))
"""


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="tensorflow is not installed")
def test_rows_of_every_kind_of_tensor_are_taken():
    environment = os.environ | {
        "KERAS_BACKEND": "tensorflow",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["dense"] == found["sparse"] == [[2, 3], [4, 5]]
    assert (found["ragged"], found["none"], found["lengths"]) == ([[2, 3], []], None, [4, 4, 4])
    # Rows that occur in several parts stay apart, as they do in the plain step.
    assert found["rows"] == [0, 3, 3]
    assert found["sum"] == [[1, 1], [0, 0], [0, 0], [2, 2], [0, 0]]
