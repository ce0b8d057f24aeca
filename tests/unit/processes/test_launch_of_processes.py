import json
from dataclasses import replace

import pytest

from memfit.allocator import LiveAllocator
from memfit.allocator.shared import SharedDevice
from memfit.core.dryrun import DryRun, Failure, Outcome
from memfit.core.estimate import Note
from memfit.core.replay import AllocatorOptions
from memfit.core.timeline import Phase
from memfit.core.units import MIB
from memfit.processes.launch import DEVICE, with_other_processes
from tests.unit.reports.builders import make_estimate

ESTIMATE = make_estimate()
PEAK = ESTIMATE.peak_bytes


def run(outcome, num_steps=0, **changes):
    made = DryRun("train.py", ("--fast",), replace(ESTIMATE, notes=()), outcome, num_steps, 3)
    return replace(made, **changes)


def combined(first, folder):
    return DryRun.from_json(with_other_processes(first.to_json(), folder))


def failure():
    return Failure("full", 0, 1, 2, 3, "train.py:1", "x", "", "", Phase.FORWARD, 1)


@pytest.fixture
def left(tmp_path):
    """Leaves what the processes of a script leave: results, and what each held."""

    def leave(*results, held=()):
        for number, result in enumerate(results):
            text = result if isinstance(result, str) else json.dumps(result.to_json())
            (tmp_path / f"process-{number}.json").write_text(text)
        for number, size in enumerate(held):
            memory = LiveAllocator(AllocatorOptions(), None)
            memory.share(SharedDevice(str(tmp_path / DEVICE), None, 0, f"p{number}"))
            if size:
                memory.malloc(size)
        return tmp_path

    return leave


def test_a_script_without_processes_is_as_it_is(left):
    alone = run(Outcome.COMPLETED, 3)

    data = alone.to_json()

    assert with_other_processes(data, left()) is data
    assert with_other_processes(data, left(held=(PEAK,))) is data


def test_the_peak_is_that_of_the_device_and_each_has_its_part(left):
    small = run(Outcome.NO_STEP, estimate=replace(ESTIMATE, notes=(Note("nothing-on-device", "x"), Note("a", "b"))))
    folder = left(run(Outcome.COMPLETED, 3), run(Outcome.ENDED, 1), held=(32 * MIB, PEAK, PEAK))
    result = combined(small, folder)

    assert (result.outcome, result.num_steps, result.script) == (Outcome.COMPLETED, 3, "train.py")
    assert sum(result.processes.values()) == result.estimate.peak_bytes
    assert list(result.processes) == ["the script itself", "p1", "p2"]
    assert result.estimate.breakdown.by_category["other processes"] == result.estimate.other_bytes > PEAK
    assert [note.code for note in result.estimate.notes] == ["a"]
    assert DryRun.from_json(result.to_json()).processes == result.processes


def test_one_that_was_killed_is_counted_all_the_same(left):
    result = combined(run(Outcome.ENDED, 2), left('{"cut', held=(PEAK, PEAK)))

    assert (result.outcome, result.num_steps) == (Outcome.ENDED, 2)
    assert result.estimate.peak_bytes == sum(result.processes.values())


def test_a_process_that_died_of_the_device(left):
    died = run(Outcome.OUT_OF_MEMORY, 1, failures=(failure(),), error="OutOfMemoryError", exit_code=1)
    result = combined(run(Outcome.FAILED, error="a process failed"), left(died, held=(0, PEAK)))

    assert (result.outcome, result.error, result.fits) == (Outcome.OUT_OF_MEMORY, "OutOfMemoryError", False)
    assert result.fatal == failure()


@pytest.mark.parametrize(
    ("script", "others", "outcome", "error"),
    [
        (run(Outcome.NO_STEP), [run(Outcome.FAILED, error="ValueError")], Outcome.FAILED,
         "in a process that it started: ValueError"),
        (run(Outcome.COMPLETED, 3), [run(Outcome.FAILED, error="ValueError")], Outcome.COMPLETED, ""),
        (run(Outcome.FAILED, error="own"), [run(Outcome.COMPLETED, 3)], Outcome.FAILED, "own"),
        (run(Outcome.NO_STEP), [run(Outcome.ENDED, 1)], Outcome.ENDED, ""),
        (run(Outcome.NO_STEP), [run(Outcome.NO_STEP)], Outcome.NO_STEP, ""),
        (run(Outcome.CRASHED, estimate=None, error="SIGKILL"), [run(Outcome.COMPLETED, 3)], Outcome.CRASHED, "SIGKILL"),
    ],
)  # fmt: skip
def test_how_it_went(left, script, others, outcome, error):
    result = combined(script, left(*others, held=(0, PEAK)))

    assert (result.outcome, result.error) == (outcome, error)


def test_why_the_simulation_may_be_the_reason_of_a_failure_is_that_of_the_process(left):
    failed = run(Outcome.FAILED, error="ValueError", suspicion="it had read values")
    held = left(failed, held=(0, PEAK))

    assert combined(run(Outcome.NO_STEP), held).suspicion == "it had read values"
    assert combined(run(Outcome.COMPLETED, 3), held).suspicion == ""
    assert combined(run(Outcome.FAILED, error="own", suspicion="own"), held).suspicion == "own"


def test_a_failure_beside_a_script_that_went_on_is_noted(left):
    result = combined(run(Outcome.COMPLETED, 3), left(run(Outcome.FAILED, error="ValueError"), held=(0, PEAK)))

    assert [note.code for note in result.estimate.notes] == ["process-failed"]
