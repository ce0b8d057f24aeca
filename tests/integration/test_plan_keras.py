"""Plans for a Keras model on each backend, in processes of their own: Keras has one backend in each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "plan_scripts" / "keras_plan.py"


def run(backend, *command):
    variables = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize(
    "backend", ["torch", *(pytest.param(backend, marks=pytest.mark.slow) for backend in ("jax", "tensorflow"))]
)
def test_a_plan_fits_trains_the_same_and_its_code_does_too(backend, tmp_path):
    pytest.importorskip(backend)
    done = run(backend, sys.executable, str(SCRIPT), str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["fits"] and found["framework"] == f"keras:{backend}" and found["micro_batches"] > 1
    assert found["peak"] <= 0.5
    # The model was timed, and left as it was.
    assert found["left"] == 0
    # In float32: what rounding leaves, against what a step moves.
    assert found["fitted"] < 1e-4 and found["coded"] < 1e-4 < 1e-3 < found["moved"]
    assert "The same without memfit" in (tmp_path / "plan.html").read_text(encoding="utf-8")


def test_the_command_plans_a_keras_job():
    arguments = ("--device", "cpu", "--budget", "3MiB", "--no-measure", "--allow=-checkpoint", "--json")
    done = run("torch", sys.executable, "-m", "memfit", "plan", f"{SCRIPT}:job", *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["fits"] and found["settings"]["micro_batches"] > 1 and found["framework"] == "keras:torch"


PARTS = """
import json
import keras, memfit, numpy as np
from keras import layers

inputs = x = keras.Input((32, 32, 8))
for _ in range(4):
    x = layers.Add()([x, layers.Dense(8, activation="gelu")(x)])
model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
images, labels = np.zeros((64, 32, 32, 8), "float32"), np.zeros(64, "int64")

def peak(count):
    return memfit.estimate(model, batch=(images[:count], labels[:count]), device="cpu").peak_bytes

options = {"device": "cpu", "allow": ["micro-batch"], "options": memfit.PlanOptions(measure=False)}
plan = memfit.plan(model, batch=(images, labels), budget=int(0.4 * peak(64)), **options)
size = plan.settings.micro_batch_size or 64 // plan.settings.micro_batches
print(json.dumps({"plan": plan.after.peak_bytes, "part": peak(size), "batch": images.nbytes, "size": size}))
"""


@pytest.mark.parametrize("backend", [pytest.param("torch", marks=pytest.mark.slow), "tensorflow"])
def test_a_plan_in_parts_takes_what_a_part_takes(backend):
    """Dense layers over images compute the sizes of their tensors when they run."""
    pytest.importorskip(backend)
    done = run(backend, sys.executable, "-c", PARTS)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert 1 <= found["size"] < 64
    assert 0.9 * found["part"] < found["plan"] < 1.15 * found["part"] + found["batch"]
