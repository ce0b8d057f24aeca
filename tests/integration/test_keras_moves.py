"""Recomputation, mixed precision and adapters on live Keras models, one fresh process for each backend."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "keras_scripts" / "moves.py"
UNITS = {
    "residual": ["relu0:add0", "relu1:head"],
    "batch norm": ["norm0:add0", "norm1:head"],
    "subclassed": ["block0", "block1"],
    "recurrent": ["first", "second"],
}


def run(backend, *checks):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    environment = os.environ | {
        "KERAS_BACKEND": backend,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
    }
    done = subprocess.run(
        [sys.executable, SCRIPT, *checks], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(found, tolerance=1e-12):
    names = [name for name in found if ":" in name]
    assert names
    for name in names:
        paths, apart, losses = (found[name][key] for key in ("paths", "apart", "losses"))
        assert paths == UNITS[name.partition(":")[0]]
        # Training changes the loss by far more than what is tolerated.
        assert max(losses) - min(losses) > 1e-4
        assert apart < tolerance, name


def check_switched(found):
    for kind, inside in (("amp-bf16", "bfloat16"), ("amp-fp16", "float16")):
        one = found[kind]
        assert one["inside"] == sorted([inside, "float32"])
        assert (one["variables"], one["policies"], one["optimizer"]) == (["float32"], ["float32"], "Adam")
        assert one["iterations"][0] >= 2
        assert one["iterations"][1] == one["iterations"][0] + 1
        assert all(0 < loss < 10 for loss in one["losses"])
    for quantized in (False, True):
        one = found[f"adapters {quantized}"]
        assert one["int8"] is quantized
        assert all(name.startswith("lora_") for name in one["trained"])
        assert one["at first"] < (0.05 if quantized else 1e-6)
        assert one["learned"] > 1e-4
        # Weights in int8 were rounded; the ones that come back weren't.
        assert one["merged"] < (0.05 if quantized else 1e-5)
        assert (one["same variables"], one["iterations"]) == (True, 2)
        # What was frozen is trained again.
        assert one["untrained"] == []


def test_torch():
    found = run("torch", *(f"{name}:eager" for name in UNITS), "switched")
    check(found)
    check_switched(found["switched"])


@pytest.mark.slow
def test_jax():
    check(run("jax", "residual:compiled"))


@pytest.mark.slow
def test_tensorflow_in_graphs():
    check(run("tensorflow", "batch norm:graph"))


@pytest.mark.slow
def test_jax_in_full():
    found = run("jax", "recurrent:compiled", "switched", "bytes")
    check(found)
    plain, fitted = found["bytes"]
    assert fitted < 0.6 * plain
    check_switched(found["switched"])
    # Keras on JAX computes the statistics of norms in float32, whatever the model's numbers are.
    check(run("jax", "batch norm:compiled", "subclassed:compiled"), tolerance=1e-5)


@pytest.mark.slow
def test_tensorflow_in_full():
    graphs = [f"{name}:graph" for name in UNITS]
    found = run("tensorflow", *graphs, "batch norm:compiled", "subclassed:compiled", "batch norm:eager", "switched")
    check(found)
    check_switched(found["switched"])
