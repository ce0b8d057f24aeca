"""Micro-batched `fit` equals plain `fit`, one fresh process for each backend; more is in benchmarks/keras_equality."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "keras_scripts" / "equality_checks.py"
ROOT = Path(__file__).parents[2]
LIMIT = 1e-10
# Adam, a schedule, moving averages and clipping are in all of them; masks and several outputs need most of the code.
ALL = [
    *("dense, sample weights", "CNN, class weights", "LSTM, masked", "transformer, masked", "three outputs"),
    *("two outputs, masked", "subclass with add_loss", "own compute_loss", "own loss function"),
]
CASES = {
    "tensorflow": ["two outputs, masked"],
    "jax": ["two outputs, masked"],
    "torch": [
        "two outputs, masked",
        "three outputs",
        "dense, sample weights",
        "subclass with add_loss",
        "own compute_loss",
    ],
}


def run(backend, cases, undone):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    environment = os.environ | {
        "KERAS_BACKEND": backend,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, SCRIPT, json.dumps(cases), json.dumps(undone)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "backend", ["tensorflow", *(pytest.param(backend, marks=pytest.mark.slow) for backend in ("jax", "torch"))]
)
def test_parts_of_a_batch_train_as_the_batch_does(backend):
    found = run(backend, CASES[backend], ["two outputs, masked"])

    assert [row[0] for row in found["rows"]] == CASES[backend]
    for case, error, logs, undone in found["rows"]:
        assert (case, error <= LIMIT, logs <= LIMIT, undone) == (case, True, True, True), (case, error, logs)
    for way in ("ways", "eager", "compiled", "several steps"):
        assert {name: error for name, error in found.get(way, {}).items() if not error <= LIMIT} == {}, way
    assert "compiled" in found or backend != "tensorflow"
    assert found["refusals"]["norm"].endswith(
        "'norm' keeps statistics of each batch. Freeze or replace such layers, leave micro-batches out, or allow what "
        "is approximate (approximate=True)."
    )
    assert found["refusals"]["step"].startswith("OwnStep has a train_step of its own")
    assert found["refusals"]["allowed"] == "'norm' use the statistics of each micro-batch"
    assert "is neither a mean nor a sum over samples" in found["relating"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_every_case_trains_as_the_batch_does(backend):
    found = run(backend, ALL, ALL)
    assert {row[0]: row[1:] for row in found["rows"] if not (row[1] <= LIMIT and row[2] <= LIMIT and row[3])} == {}
