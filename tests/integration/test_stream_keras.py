"""Streams in the real Keras, one fresh process for each backend, and as tf.data.

The weights of a linear model after training tell which batches it was given in which order: another order of the same
batches gives weights that differ a thousand times more than rounding does.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "stream_scripts" / "keras_backend.py"
CLOSE = 1e-6


def run(backend, folder):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    environment = os.environ | {
        "KERAS_BACKEND": backend,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, SCRIPT, folder], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow), "tensorflow"])
def test_keras_trains_on_each_sample_once_in_the_streams_order(backend, tmp_path):
    found = run(backend, tmp_path)

    assert (found["backend"], found["is a PyDataset"]) == (backend, True)
    assert found["order matters"] > 1000 * CLOSE
    names = [
        *("fit built", "fit unbuilt", "fit again built", "fit again unbuilt", "fit unshuffled"),
        *("class weights are heard", "fit validated", "validation loss", "evaluate"),
        *("4 steps twice", "4 steps in two calls", "the rest", "and the next", "fit after a left one"),
        *("trained when saved", "resumed", "after the resumed"),
    ]
    if backend != "torch":
        names.append("fit 4 steps at once")
    assert {name: found[name] for name in names if not found[name] < CLOSE} == {}
    assert (found["epoch built"], found["epoch unbuilt"], found["validation epochs"]) == (2, 2, 2)
    assert found["predict"] == [True, True]
    assert found["predict all"]
    assert found["threads after parts"] == found["threads after a left epoch"] == []
    # Keras had begun with batch 4 when it was interrupted after its fourth.
    assert found["batches done when left"] == 40
    assert found["left"] == [6, 11]
    assert len(found["warning"]) == 1
    if backend == "torch":
        check_kill(found)
    if backend == "tensorflow":
        check_tf_data(found)


def check_kill(found):
    assert found["killed by"] == 9
    assert found["left after the kill"] == 5
    assert found["fit after a kill"] < CLOSE


def check_tf_data(found):
    assert found["cardinality"] == 11
    assert found["spec"] == [[[None, 3], "float32"], [[None, 1], "float32"]]
    assert found["tf.data"] == [True, True]
    assert found["fit on tf.data"] < CLOSE
