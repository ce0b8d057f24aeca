"""A guarded fit in the real Keras: one process for each backend, forked for each check.

What a guarded fit must be is what the plain one is: the same bits without a fault, to rounding with smaller
micro-batches after one, and the same bits after any number of kills.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "keras_scripts" / "fit_checks.py"
CHECKS = ("plain_is_same", "fault_is_same", "fault_is_undone", "bad_input", "kills-arrays")
# Keras on PyTorch computes the loss of float64 models in float32 here and there.
CLOSE = {"torch": 1e-6, "jax": 1e-10, "tensorflow": 1e-10}

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def run(backend, folder, checks, kills=3):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, backend, folder, str(kills), *checks],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(checks), done.stderr[-4000:]
    assert not any("failed" in one for one in found), (found, done.stderr[-4000:])
    return {one["check"]: one for one in found}


@pytest.mark.parametrize(
    "backend", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("torch", "jax")), "tensorflow"]
)
def test_a_guarded_fit_is_the_plain_one_whatever_happens(backend, tmp_path):
    extra = ("fault_in_graph",) if backend == "tensorflow" else ()

    # WHEN a model is trained without faults, with some, with nothing but faults, and killed again and again
    found = run(backend, tmp_path, (*CHECKS, *extra))

    # THEN without faults all bits are those of the plain fit, history and validation included
    assert found["plain_is_same"]["same"]
    assert found["plain_is_same"]["difference"] == 0
    # AND a batch that ran out of memory was trained on once, in parts, to rounding
    assert found["fault_is_same"]["difference"] <= CLOSE[backend]
    assert found["fault_is_same"]["losses"] <= CLOSE[backend]
    # AND where nothing helps, the model is as it was before the step
    assert found["fault_is_undone"]["same"]
    assert found["fault_is_undone"]["iterations"] == 2
    assert not found["fault_is_undone"]["left"]
    assert "nothing is left to try" in found["fault_is_undone"]["text"]
    assert "keeps statistics of each batch" in found["fault_is_undone"]["text"]
    # AND what can't be used is refused with a reason
    texts = found["bad_input"]["texts"]
    assert len(texts) == 5
    assert "isn't compiled" in texts[0]
    assert texts[1] == "keep must be a whole number from 1 up, but 0 was given."
    assert texts[2].startswith("plan must be 'auto', a Plan or None")
    assert "memfit.Guard" in texts[3]
    assert texts[4].startswith("options must be memfit.GuardOptions(...), but {'keep': 2} was given")
    # AND after every kill the same call goes on where it was
    for name, one in found.items():
        if name.startswith("kills-"):
            assert one["killed"] == 3, name
            assert one["same"], name
    if "fault_in_graph" in found:
        assert found["fault_in_graph"]["difference"] <= CLOSE[backend]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
@pytest.mark.parametrize("kind", ["arrays", "generator", "dataset", "stream"])
def test_many_kills_change_nothing(backend, kind, tmp_path):
    found = run(backend, tmp_path, [f"kills-{kind}"], kills=6)

    assert found[f"kills-{kind}"]["same"]
    assert found[f"kills-{kind}"]["killed"] >= 3


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a limit on data")
@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_memory_that_really_runs_out_is_survived(backend):
    # TensorFlow may end the process by itself when the host has no memory left: that is for `memfit run`.
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    script = SCRIPT.with_name("fit_real_memory.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}

    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, backend, "300"],
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["iterations"] == 5
    assert found["loss"][1] < found["loss"][0]
    assert any(text.startswith("memory ran out; going on with micro-batches of") for text in found["said"])
