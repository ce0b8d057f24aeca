"""Plain training loops that die under a real limit of memory finish with the rescue, and with the same weights."""

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
resource = pytest.importorskip("resource")

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "plain_loop.py"
LIMITED = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA limits mappings on Linux alone")
V1_MEMORY = Path("/sys/fs/cgroup/memory")


def train(model: str, *options: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [*prefix, sys.executable, str(SCRIPT), model, *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@functools.cache
def expected_weights(model: str) -> str:
    """What the loop computes with all the memory it wants."""
    return weights(train(model))


def weights(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("weights "))


@LIMITED
@pytest.mark.parametrize(
    ("model", "limit"),
    [
        pytest.param("cnn", 80, marks=pytest.mark.slow),
        pytest.param("transformer", 60, marks=pytest.mark.slow),
        pytest.param("lstm", 160, marks=pytest.mark.slow),
    ],
)
def test_a_loop_that_dies_finishes_with_the_same_weights(model, limit):
    # GIVEN memory that is really limited
    limited = ("--limit", str(limit))

    # WHEN the loop runs plain, and with the rescue
    dead, rescued = train(model, *limited), train(model, *limited, "--rescue")

    # THEN the plain one dies, the rescued one doesn't, and its weights and its generator are those of a free run
    assert dead.returncode == 1
    assert "DefaultCPUAllocator: can't allocate memory" in dead.stderr
    assert weights(rescued) == expected_weights(model)
    assert "memfit rescue: memory ran out in aten." in rescued.stderr
    assert "operations ran again" in rescued.stderr


@LIMITED
@pytest.mark.slow
@pytest.mark.parametrize("model", ["cnn", "transformer", "lstm"])
def test_every_limit_ends_in_the_same_weights_or_in_the_original_error(model):
    for limit in range(40, 240, 10):
        rescued = train(model, "--limit", str(limit), "--rescue")
        if rescued.returncode:
            assert rescued.returncode == 1, f"{limit} MiB: exit code {rescued.returncode}"
            assert "RuntimeError: " in rescued.stderr
        else:
            assert weights(rescued) == expected_weights(model), f"{limit} MiB"


@pytest.mark.slow
def test_eager_moves_before_memory_runs_out():
    eager = train("transformer", "--rescue", "--eager")
    assert weights(eager) == expected_weights("transformer")
    assert "memfit rescue: 0 operations ran again, " in eager.stderr


@LIMITED
def test_what_cannot_be_rescued_is_the_original_error():
    done = train("cnn", "--limit", "20", "--rescue")
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "DefaultCPUAllocator: can't allocate memory" in done.stderr


@pytest.fixture
def group():
    """A control group of our own, of the older interface."""
    path = V1_MEMORY / f"memfit-rescue-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no control group of version 1 can be made: {error}")
    yield path
    path.rmdir()


@LIMITED
def test_under_a_limit_that_kills(group):
    # GIVEN a control group that kills the plain loop; the files of activations count in it, as page cache
    limit = 440 * 2**20
    (group / "memory.limit_in_bytes").write_text(str(limit))
    enter = ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
    assert train("transformer", prefix=enter).returncode == -signal.SIGKILL

    # WHEN the rescue gets exceptions, from RLIMIT_DATA below it
    rescued = train("transformer", "--limit", "80", "--rescue", prefix=enter)

    # THEN the loop finishes
    assert weights(rescued) == expected_weights("transformer")
