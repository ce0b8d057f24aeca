import dataclasses
import signal

import pytest

from memfit.core.dryrun import Outcome, Request
from memfit.core.estimate import NOT_COMPILED
from memfit.core.settings import Settings
from memfit.core.units import MIB
from memfit.processes import sequence
from memfit.processes.launch import Interrupted
from memfit.processes.sequence import dry_run, peak_with
from tests.unit.processes.test_launch import signal_when
from tests.unit.reports.builders import RTX_3090
from tests.unit.reports.run_builders import make_failure, make_run_estimate

SMALL = dataclasses.replace(RTX_3090, usable_bytes=900 * MIB)


def run(behaviour, **changes):
    told = []
    request = Request("train.py", False, (behaviour,), SMALL, **changes)
    return *dry_run(request, quiet_output=True, announce=told.append), told


def test_a_script_that_runs_is_run_once(child, capfd):
    result, too_large, told = run("complete")

    assert result.outcome is Outcome.COMPLETED
    assert result.scan is too_large is None
    assert told == []
    assert result.seconds != 8.2
    (asked,) = child()
    assert (asked["unlimited"], asked["largest_first"]) == (False, False)


@pytest.mark.parametrize("behaviour", ["no step", "failure", "SIGKILL", "caught"])
def test_other_ends_are_run_once_too(child, behaviour):
    result, too_large, _ = run(behaviour, scan=0)

    assert too_large is None
    assert len(child()) == 1
    assert result.fatal is None


def test_a_script_that_dies_runs_again_without_a_limit(child, capfd):
    result, too_large, told = run("oom", scan=9)

    # THEN the failure is that of the first run, and the need that of the second
    assert result.outcome is Outcome.OUT_OF_MEMORY
    assert result.fatal == make_failure()
    assert result.estimate.peak_bytes == make_run_estimate(SMALL).peak_bytes
    assert result.estimate.replay.out_of_memory.tick == 200
    assert result.estimate.device == SMALL
    assert result.estimate.fits is False
    assert too_large.estimate == result.estimate
    assert too_large.request.loader_ordinal == 4
    assert [asked["unlimited"] for asked in child()] == [False, True]
    assert told == ["running the script once more on a device without a limit, to see what it would need"]
    # What the script says is said once.
    assert capfd.readouterr().err.count("script says hello") == 1


def test_a_script_that_fails_with_its_compiled_code_runs_once_more_as_eager(child):
    result, _, told = run("fails compiled")

    assert result.outcome is Outcome.COMPLETED
    assert [asked["compiles"] for asked in child()] == [True, False]
    assert [note.text for note in result.estimate.notes if note.code == NOT_COMPILED] == [
        "the script failed with what torch.compile made of it, which counts as eager: TypeError: no (train.py:3)"
    ]
    assert len(told) == 1


def test_a_second_run_that_tells_nothing_leaves_the_first(child):
    result, too_large, _ = run("oom then failure")

    assert result.outcome is Outcome.OUT_OF_MEMORY
    assert result.estimate == too_large.estimate
    assert result.estimate.replay.out_of_memory.requested_bytes == 64 * MIB


def test_a_scan_starts_from_the_largest_batch(child):
    result, too_large, told = run("complete", scan=500, steps=1)

    assert result.scan.fits is True
    assert result.scan.peak_bytes == make_run_estimate(SMALL).peak_bytes
    assert result.scan.largest_index == 311
    assert too_large is None
    _, second = child()
    # The optimizer has its state from the second step on.
    assert (second["largest_first"], second["loader_ordinal"], second["steps"]) == (True, 4, 2)
    assert told == ["running the script once more, from the largest of 500 batches on"]


def test_a_largest_batch_that_does_not_fit(child):
    result, too_large, _ = run("long batch", scan=500)

    assert result.outcome is Outcome.COMPLETED
    assert result.scan.fits is False
    assert result.scan.failure == make_failure()
    assert result.fits is False
    assert result.estimate.replay.out_of_memory is None
    assert too_large.estimate.peak_bytes == result.scan.peak_bytes == make_run_estimate(SMALL).peak_bytes
    assert [(asked["largest_first"], asked["unlimited"]) for asked in child()] == [
        (False, False),
        (True, False),
        (True, True),
    ]


def test_a_change_is_tried_on_the_script_itself(child):
    _, too_large, _ = run("oom")
    halves = Settings(set_to_none=False, micro_batches=2)

    # Without a batch size there is nothing to split.
    assert peak_with(too_large, halves, 3, 60.0) is None
    splits = dataclasses.replace(too_large, request=dataclasses.replace(too_large.request, batch_size=16))
    assert peak_with(splits, halves, 2, 60.0) == make_run_estimate(SMALL).peak_bytes
    asked = child()[-1]
    assert (asked["unlimited"], asked["steps"], asked["settings"]["micro_batches"]) == (True, 2, 2)
    assert asked["accumulates"] is True

    # Half a batch for each update takes as many steps as the script's own run.
    assert peak_with(splits, halves, 3, 60.0, accumulates=False) == make_run_estimate(SMALL).peak_bytes
    asked = child()[-1]
    assert (asked["accumulates"], asked["steps"]) == (False, 3)


def test_a_change_that_was_not_in_force_tells_nothing(child):
    _, too_large, _ = run("oom")

    # The child says of no module that it was computed again.
    assert peak_with(too_large, Settings(checkpoint=("layers.0",)), 3, 60.0) is None


def test_a_try_that_takes_too_long_is_given_up(child, tmp_path):
    _, too_large, _ = run("oom")
    slow = dataclasses.replace(too_large.request, arguments=("waits", str(tmp_path / "pid")))

    assert peak_with(dataclasses.replace(too_large, request=slow), Settings(), 3, 1.0) is None


@pytest.mark.parametrize(
    ("behaviour", "problem"),
    [
        ("no loader", "the script reads no torch.utils.data.DataLoader for its steps"),
        (
            "fails on the largest",
            "the script failed when it was run from the largest batch on: IndexError: too long (train.py:3)",
        ),
    ],
)
def test_a_scan_that_tells_nothing_says_why(child, behaviour, problem):
    result, too_large, _ = run(behaviour, scan=500)

    assert result.scan.problem == problem
    assert result.scan.fits is None
    assert result.fits is True
    assert too_large is None


def test_a_script_that_fails_is_not_scanned(child):
    result, _, _ = run("failure", scan=500)

    assert result.scan is None
    assert len(child()) == 1


def test_bytes_at_the_failure_get_the_categories_of_the_run_that_went_on():
    # GIVEN a failure whose bytes were not told apart yet, on a timeline that tells them
    timeline = make_run_estimate().timeline
    known = timeline.breakdown(199, lambda block: str(block.category))
    early = make_failure(tick=200, by_category={"temporary": sum(known.values())})

    assert sequence._classified(early, timeline).by_category == known
    assert known["activation"] > 0

    # WHEN the two disagree on how much there was, the first is believed
    other = make_failure(tick=200, by_category={"temporary": 1})
    assert sequence._classified(other, timeline) == other


def test_a_further_run_that_is_interrupted_leaves_the_first(child, tmp_path):
    ready = tmp_path / "ready"
    sender = signal_when(ready, signal.SIGINT)
    request = Request("train.py", False, ("waits for more", str(ready)), SMALL, scan=5)

    with pytest.raises(Interrupted) as raised:
        dry_run(request, quiet_output=True)

    sender.join()
    assert raised.value.run.outcome is Outcome.COMPLETED
    assert raised.value.run.scan is None
