"""Loops that really run out of memory, under a limit of the process or of a control group, and get through."""

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "memory_scripts" / "train.py"
# What the loop may take, in MiB beyond what the process holds: each dies of it in a plain loop.
LIMITS = {"gpt": 130, "resnet": 400, "lstm": 150}
# Of a group that holds the interpreter and the framework as well.
GROUP_LIMITS = {"gpt": 350, "resnet": 730, "lstm": 400}
GROUPS = Path("/sys/fs/cgroup/memory")


def train(name, how, out, *rest, group=None):
    def enter():
        (group / "cgroup.procs").write_text(str(os.getpid()))

    return subprocess.run(
        [sys.executable, str(SCRIPT), name, how, str(out), *map(str, rest)],
        text=True,
        capture_output=True,
        check=False,
        timeout=600,
        preexec_fn=enter if group else None,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def assert_right(name, finished, found, tmp_path):
    """The weights are those of a plain loop without limit and with the same micro-batches, bit by bit."""
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout.splitlines()[-1])
    assert sum(report["retries"]) >= 1
    plain = train(name, "plain", tmp_path / "plain", 0, *report["parts"])
    assert plain.returncode == 0, plain.stderr
    expected = torch.load(tmp_path / "plain", weights_only=True)
    for key, value in torch.load(found, weights_only=True).items():
        if "running" in key or "num_batches" in key:
            continue
        assert torch.equal(value, expected[key]), key
    return report


@pytest.mark.parametrize(
    "name", ["gpt", pytest.param("lstm", marks=pytest.mark.slow), pytest.param("resnet", marks=pytest.mark.slow)]
)
def test_a_limit_of_the_process(name, tmp_path):
    plain = train(name, "plain", tmp_path / "died", LIMITS[name])
    assert plain.returncode == 1
    assert "can't allocate memory" in plain.stderr

    guarded = train(name, "guard", tmp_path / "guarded", LIMITS[name])

    report = assert_right(name, guarded, tmp_path / "guarded", tmp_path)
    assert report["retries"][0] <= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_a_plan_wastes_one_step(name, tmp_path):
    guarded = train(name, "planned", tmp_path / "guarded", LIMITS[name])

    assert guarded.returncode == 0, guarded.stderr
    assert json.loads(guarded.stdout.splitlines()[-1])["retries"] == [1, 0, 0, 0]


@pytest.fixture
def group():
    path = GROUPS / f"memfit-test-{uuid.uuid4().hex[:8]}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    yield path
    path.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_of_a_control_group(name, tmp_path, group):
    """The kernel kills the plain loop; under `memfit run` the guarded one gets an exception in time."""
    # GIVEN a group that is large enough for the interpreter, the framework and a part of the step
    (group / "memory.limit_in_bytes").write_text(str(GROUP_LIMITS[name] << 20))
    plain = train(name, "plain", tmp_path / "died", group=group)
    assert plain.returncode == -9, plain.stderr

    # WHEN
    finished = supervised(name, tmp_path / "guarded", group)

    # THEN
    assert_right(name, finished, tmp_path / "guarded", tmp_path)


def supervised(name, out, group):
    def enter():
        (group / "cgroup.procs").write_text(str(os.getpid()))

    return subprocess.run(
        [sys.executable, "-m", "memfit", "run", str(SCRIPT), name, "guard", str(out)],
        text=True,
        capture_output=True,
        check=False,
        timeout=600,
        preexec_fn=enter,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
