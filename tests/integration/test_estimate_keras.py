"""Estimates of real Keras models, one fresh process for each backend."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("keras")

SCRIPT = Path(__file__).parent / "estimate_scripts" / "keras_backend.py"
BACKENDS = ("torch", "jax", "tensorflow")
MODELS = ("convolutional", "recurrent", "transformer", "subclassed", "two_inputs")


def start(backend, *arguments):
    environment = os.environ | {
        "KERAS_BACKEND": backend,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        # Half the time to compile, the same memory: XLA lays it out before LLVM sees the program.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@functools.cache
def run(backend):
    done = start(backend, SCRIPT)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def answers(backend):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    return run(backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_models_are_estimated_and_left_alone(backend):
    found = answers(backend)

    assert found["backend"] == backend
    for name in MODELS:
        one = found[name]
        assert one["untouched"], name
        assert one["peak"] >= sum(size for kind, size in one["state"].items() if kind != "gradient"), name
        assert {"setup", "forward", "backward", "optimizer"} <= set(one["phases"]), name
    assert {"conv", "norm", "head"} <= set(found["convolutional"]["modules"])
    assert {"embed", "head"} <= set(found["transformer"]["modules"])
    assert any(module.startswith("attend") for module in found["transformer"]["modules"])
    assert any(module.startswith("block.") for module in found["subclassed"]["modules"])
    assert found["inference"] < found["subclassed"]["peak"]
    size, fits, peak = found["max batch"]
    assert fits
    assert size > 16
    assert peak <= 2**30


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_bad_input_gets_one_clear_message(backend):
    found = answers(backend)["messages"]

    kind, text = found["uncompiled"]
    assert kind == "BadModel"
    assert "'plain' isn't compiled" in text
    assert "Compile it first: model.compile(optimizer=..., loss=...)" in text
    kind, text = found["no batch"]
    assert (kind, text[:18]) == ("BadBatch", "a batch is missing")
    kind, text = found["other shape"]
    assert kind == "BadBatch"
    assert "takes arrays of shape (batch, 12, 8), but (16, 12, 7) was given" in text
    assert found["other loss"][0] == "StepFailed"


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("name", MODELS)
def test_backends_agree_on_the_state_to_the_byte(backend, name):
    wanted = answers("torch")[name]
    found = answers(backend)[name]

    assert found["state"] == wanted["state"]
    assert found["parameters"] == wanted["parameters"]
    assert {"parameter", "gradient", "optimizer state"} <= set(found["state"])


def test_a_backend_that_is_not_there_is_named_with_its_extra():
    code = (
        "import sys; sys.modules['tensorflow'] = None\n"
        "import memfit\n"
        "from memfit.core.errors import MissingDependency\n"
        "try:\n    memfit.named_job('keras:ResNet50')\n"
        "except MissingDependency as error:\n    print(error)"
    )

    done = start("tensorflow", "-c", code)

    assert done.returncode == 0, done.stderr[-4000:]
    assert "Keras is set to run on tensorflow, which is not installed" in done.stdout
    assert "pip install tensorflow" in done.stdout


def test_a_backend_that_keras_does_not_know_is_said_in_one_line():
    command = [sys.executable, "-m", "memfit", "estimate", "keras:ResNet50"]
    done = subprocess.run(
        command, env=os.environ | {"KERAS_BACKEND": "nosuch"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "nosuch" in done.stderr and "tensorflow, jax or torch" in done.stderr
