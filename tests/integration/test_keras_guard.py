"""Guards of Keras models in the real Keras, one process for each backend."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "keras_scripts"
CHECKS = (
    *("batches_without_faults", "batches_with_faults", "nothing_helps", "fit_that_fails_at_once", "goes_on"),
    *("all_that_a_loop_does", "kinds_of_data", "accumulation_of_keras", "scaled_loss", "precision_goes"),
)
# Keras on PyTorch computes the loss of float64 models in float32 here and there.
CLOSE = {"torch": 1e-6, "jax": 1e-10, "tensorflow": 1e-10}
# Sums of float16 gradients, rounded in another order.
CLOSE_IN_HALF = 5e-3


def run(script, backend, *arguments):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPTS / script, backend, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    "backend",
    ["torch", pytest.param("jax", marks=pytest.mark.slow), pytest.param("tensorflow", marks=pytest.mark.slow)],
)
def test_guarded_batches_train_as_plain_ones_whatever_happens(backend, tmp_path):
    found = {one.pop("check"): one for one in run("guard_checks.py", backend, tmp_path, *CHECKS)}
    close = CLOSE[backend]

    # THEN without faults all bits are those of the plain loop, and so is what it returns
    assert found["batches_without_faults"] == {"difference": 0, "same": True, "plain": True}
    # AND a batch that ran out of memory was trained on once, in parts
    parts = found["batches_with_faults"]
    assert parts["difference"] <= close
    assert parts["losses"] <= close
    assert (parts["names"], parts["size"], parts["updates"], parts["plain"]) == (["loss", "mae"], 3, 4, True)
    # AND where nothing helps, the model is as it was, at the first batch as at a later one
    assert found["nothing_helps"] == {"1": [0, True, 0, True], "3": [2, True, 0, True]}
    assert found["fit_that_fails_at_once"]["difference"] == 0
    # AND a loop goes on from its checkpoint
    assert found["goes_on"] == {"difference": 0, "counts": [[None, 0], [2, 2]]}
    # AND fits, batches and other compilations may follow one another
    assert found["all_that_a_loop_does"]["difference"] <= close
    assert found["all_that_a_loop_does"]["plain"]
    # AND data of any kind are split as arrays are
    assert set(found["kinds_of_data"]) >= {"PyDataset", "generator"}
    assert ("tf.data" in found["kinds_of_data"]) == (backend == "tensorflow")
    for kind, (difference, num_updates) in found["kinds_of_data"].items():
        assert (difference <= close, num_updates) == (True, 4), kind
    # AND windows of Keras's own, and scaled losses, count as for whole batches
    assert found["accumulation_of_keras"]["difference"] <= close
    difference, whole, split, changed = found["scaled_loss"]["fits"]
    assert difference <= CLOSE_IN_HALF
    assert whole == split == [3, 2**10]
    assert changed
    assert found["scaled_loss"]["overflows"] == [0, [0, 2**37], [0, 2**37], False]
    # AND settings leave nothing behind
    assert found["precision_goes"] == {"scaled": "LossScaleOptimizer", "back": True, "compiled": "SGD"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a limit on data")
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_memory_that_really_runs_out_is_survived(backend):
    # TensorFlow may end the process by itself when the host has no memory left: that is for `memfit run`.
    (found,) = run("fit_real_memory.py", backend, 300, "batches")

    assert found["iterations"] == 5
    assert found["loss"][1] < found["loss"][0]
    assert any(text.startswith("memory ran out; going on with micro-batches of") for text in found["said"])
