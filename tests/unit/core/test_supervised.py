import dataclasses
import json

import pytest

from memfit.core.errors import BadFile
from memfit.core.reporters import Reporters
from memfit.core.supervised import Cause, Configuration, SupervisedRun
from memfit.core.units import MIB
from tests.unit.core.supervised_builders import make_lost, make_supervised


def test_a_run_survives_its_json():
    run = make_supervised(budget_bytes=5)

    assert SupervisedRun.from_json(json.dumps(run.to_json())) == run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "memfit.plan"}, "expected a memfit.run of version 1, got memfit.plan 1"),
        ({"version": 9}, "got memfit.run 9"),
        ({"outcome": "eaten"}, "not a run written by memfit: outcome is 'eaten', and RunOutcome was expected"),
        ({"attempts": [{}]}, "not a run written by memfit: TypeError"),
    ],
)
def test_json_of_something_else_is_refused(change, message):
    with pytest.raises(BadFile, match=message):
        SupervisedRun.from_json({**make_supervised().to_json(), **change})


def test_text_that_is_no_json_is_refused():
    with pytest.raises(BadFile, match="not a run written by memfit"):
        SupervisedRun.from_json("{")


def test_the_peak_is_that_of_the_largest_process_of_any_attempt():
    assert make_supervised().peak.held_bytes == 990 * MIB
    assert make_supervised(attempts=()).peak is None


@pytest.mark.parametrize(
    ("configuration", "text"),
    [
        (Configuration(), "as it is"),
        (Configuration(4), "micro-batches of at most 4"),
        (Configuration(rescue=True), "rescue"),
        (Configuration(1, rescue=True, eager=True), "micro-batches of at most 1 and rescue of everything"),
    ],
)
def test_a_configuration_in_words(configuration, text):
    assert str(configuration) == text


def test_only_some_causes_are_memory():
    others = {Cause.ENDED, Cause.FAILED, Cause.INTERRUPTED, Cause.SIGNALLED}

    assert {cause for cause in Cause if not cause.is_memory} == others


def test_what_it_says_of_itself_comes_from_the_reports(monkeypatch, tmp_path):
    monkeypatch.setattr(SupervisedRun, "reporters", Reporters())
    run = make_lost()
    assert repr(run) == "<SupervisedRun of train.py: out of memory, 1 attempts, peak 990.0 MiB>"
    with pytest.raises(NotImplementedError):
        run.report(tmp_path / "page.html")

    SupervisedRun.reporters.use(lambda run: "words", lambda run, path: (_ for _ in ()).throw(OSError(28, "disk full")))

    assert str(run) == "words"
    with pytest.raises(BadFile, match=r"page\.html': disk full"):
        run.report(tmp_path / "page.html")


def test_a_run_can_not_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_lost().exit_code = 0
