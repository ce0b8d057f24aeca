"""Several processes under torchrun: one that runs out of memory makes all of them replay, and none waits for ever."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "guard_scripts"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo over the loopback device of Linux")


def launch(script, num_processes, *arguments, timeout=120):
    """The finished processes; a deadlock ends in an exception."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    process = subprocess.Popen(
        [*command, str(SCRIPTS / script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        # Workers outlive a launcher that is killed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def run_schedules(directory, num_processes, kinds, seeds, num_steps, timeout=120):
    """For each schedule what the processes found, each for itself."""
    ended = launch(
        "random_faults.py", num_processes, seeds.start, seeds.stop, num_steps, directory, *kinds, timeout=timeout
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    by_rank = [
        [json.loads(line) for line in (directory / f"{rank}.jsonl").read_text().splitlines()]
        for rank in range(num_processes)
    ]
    schedules = list(zip(*by_rank, strict=True))
    assert len(schedules) == len(kinds) * len(seeds)
    return schedules


def assert_untouched_by_failures(schedules):
    """All processes have the parameters of a run in which nothing fails."""
    for found in schedules:
        assert len({each[name] for each in found for name in ("digest", "reference")}) == 1, found
        assert len({tuple(each["parts"]) for each in found}) == 1, found


def test_one_process_out_of_memory_leaves_no_trace(tmp_path):
    # GIVEN two processes of a DDP and of an FSDP2 model, of which one at a time fails at random points
    schedules = run_schedules(tmp_path, 2, ("ddp", "fsdp"), range(2, 4), 4)

    # THEN their parameters are those of a run without failures, to the bit
    assert_untouched_by_failures(schedules)
    raised = [tuple(event) for found in schedules for each in found for event in each["raised"]]
    assert len(raised) >= 4, raised
    # AND micro-batches on several processes are what an ordinary loop computes
    assert all(0 <= each["difference"] <= 1e-12 for found in schedules for each in found)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 4])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_twenty_schedules_leave_no_trace(tmp_path, kind, num_processes):
    schedules = run_schedules(tmp_path, num_processes, (kind,), range(20), 6, timeout=1200)

    assert_untouched_by_failures(schedules)
    phases = {phase for found in schedules for each in found for phase, _ in each["raised"]}
    assert phases == {"forward", "backward", "finish", "commit"}


@pytest.mark.slow
def test_real_memory_that_one_process_lacks_makes_all_replay(tmp_path):
    ended = launch("real_memory.py", 2, tmp_path)

    assert ended.returncode == 0, ended.stderr[-4000:]
    healthy, starved = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert starved["sources"] == ["torch"]
    assert healthy["sources"] == ["another rank"]
    assert healthy["retries"] == starved["retries"]
    assert healthy["retries"][0] > 0
    assert healthy["parts"] == starved["parts"]
    assert healthy["digest"] == starved["digest"]


def resume(kind, num_processes, num_steps, folder, directory):
    directory.mkdir(exist_ok=True)
    ended = launch("resumed.py", num_processes, kind, num_steps, folder, directory)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(num_processes)]


@pytest.mark.slow
def test_a_sharded_run_goes_on_with_another_number_of_processes(tmp_path):
    # GIVEN a run of two processes with checkpoints
    saved = resume("fsdp", 2, 2, tmp_path / "checkpoints", tmp_path / "two")
    assert len({each["digest"] for each in saved}) == 1

    # WHEN a single process goes on from the last
    found = resume("fsdp", 1, 2, tmp_path / "checkpoints", tmp_path / "one")

    # THEN it has the same parameters and optimizer state
    assert [each["resumed_from"] for each in found] == [2]
    assert found[0]["resumed"] == saved[0]["digest"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_run_goes_on_with_more_and_as_many_processes(tmp_path, kind):
    saved = resume(kind, 2, 2, tmp_path / "checkpoints", tmp_path / "two")
    for num_processes in (4, 2):
        found = resume(kind, num_processes, 2, tmp_path / "checkpoints", tmp_path / "other")

        assert {each["resumed"] for each in found} == {saved[0]["digest"]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path, kind):
    whole = resume(kind, 2, 6, tmp_path / "undisturbed", tmp_path / "whole")
    resume(kind, 2, 3, tmp_path / "checkpoints", tmp_path / "half")

    found = resume(kind, 2, 6, tmp_path / "checkpoints", tmp_path / "rest")

    assert [each["digest"] for each in found] == [each["digest"] for each in whole]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_mistake_on_one_process_ends_the_job(kind):
    ended = launch("ordinary_error.py", 2, kind)

    assert ended.returncode != 0
    assert "a mistake in the loss function" in ended.stderr
