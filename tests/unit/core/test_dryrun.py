import dataclasses
import json

import pytest

from memfit import commands
from memfit.core.dryrun import EXIT_CODES, DryRun, Outcome, ProgramFacts, Request
from memfit.core.errors import BadFile
from memfit.core.profile import Work
from memfit.core.reporters import Reporters
from memfit.core.settings import OptimizerKernels, Settings
from memfit.core.timeline import Phase
from tests.unit.reports.builders import MYSTERY, RTX_3090
from tests.unit.reports.run_builders import (
    ADVICE,
    make_dead_run,
    make_failure,
    make_run,
    make_run_estimate,
    make_scan,
)


@pytest.fixture
def reporters(monkeypatch):
    """Fresh reporters: as if nobody had set any."""
    monkeypatch.setattr(DryRun, "reporters", Reporters())


RUNS = {
    "completed": make_run(),
    "died": make_dead_run(),
    "scanned": make_run(scan=make_scan(), advice=ADVICE, redirected={"a.pt": "b/a.pt"}),
    "crashed": make_run(estimate=None, outcome=Outcome.CRASHED, error="SIGSEGV"),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_json_round_trip(run):
    text = json.dumps(run.to_json())

    assert DryRun.from_json(text) == run
    assert DryRun.from_json(json.loads(text)) == run


def test_what_a_child_adds_does_no_harm():
    assert DryRun.from_json({**make_run().to_json(), "loader_ordinal": 2}) == make_run()


def test_json_says_what_the_command_line_does():
    data = make_dead_run().to_json()

    assert (data["format"], data["version"]) == ("memfit.dryrun", 1)
    assert (data["fits"], data["exit_code_of_command"], data["outcome"]) == (False, 3, "out of memory")
    assert data["advice"][1]["origin"] == "simulated"
    assert data["failures"][0]["phase"] == "forward"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("{", "not a dry run written by memfit: JSONDecodeError"),
        ({}, "not a dry run written by memfit: KeyError: 'format'"),
        ({"format": "memfit.dryrun", "version": 9}, "expected a memfit.dryrun of version 1, got memfit.dryrun 9"),
        ({"format": "memfit.estimate", "version": 1}, "got memfit.estimate 1"),
        ({**make_run().to_json(), "outcome": "sideways"}, "outcome is 'sideways', and Outcome was expected"),
        ({**make_run().to_json(), "estimate": {}}, "not an estimate written by memfit"),
        ([], "TypeError"),
    ],
)
def test_other_files_are_refused(data, reason):
    with pytest.raises(BadFile, match=reason.replace("(", r"\(")):
        DryRun.from_json(data)


@pytest.mark.parametrize(
    ("run", "fits", "code"),
    [
        (make_run(), True, 0),
        (make_run(outcome=Outcome.ENDED, num_steps=2), True, 0),
        (make_run(estimate=make_run_estimate(MYSTERY)), None, 0),
        (make_dead_run(), False, 3),
        (make_run(scan=make_scan()), False, 3),
        (make_run(scan=make_scan(fits=True)), True, 0),
        (make_run(scan=make_scan(fits=None)), True, 0),
        (make_run(outcome=Outcome.FAILED), None, 4),
        (make_run(outcome=Outcome.CRASHED, estimate=None), None, 4),
        (make_run(outcome=Outcome.NO_STEP), None, 5),
        (make_run(outcome=Outcome.INTERRUPTED), None, 130),
        (make_run(failures=(make_failure(handled=True),)), True, 0),
    ],
)
def test_fits_and_exit_codes(run, fits, code):
    assert run.fits is fits
    assert run.exit_code_of_command == code


def test_exit_codes_are_those_of_the_command_line():
    assert set(EXIT_CODES) == set(Outcome)
    assert set(EXIT_CODES.values()) == {
        commands.EXIT_FITS,
        commands.EXIT_DOES_NOT_FIT,
        commands.EXIT_SCRIPT_FAILED,
        commands.EXIT_NO_STEP,
        commands.EXIT_INTERRUPTED,
    }


def test_the_fatal_failure_is_the_last_that_nobody_caught():
    caught, first, last = make_failure(handled=True), make_failure(step=1), make_failure(step=2)

    assert make_dead_run(failures=(caught, first, last)).fatal == last
    assert make_dead_run(failures=(first, caught)).fatal == first
    assert make_dead_run(failures=()).fatal is None
    assert make_run(failures=(first,)).fatal is None


def test_it_prints_and_reports_through_what_was_set(reporters):
    run = make_run()
    assert str(run) == repr(run)
    with pytest.raises(NotImplementedError, match="import memfit to have reports"):
        run.report("page.html")

    written = []
    DryRun.reporters.use(lambda run: f"<{run.script}>", lambda run, path: written.append((run, path)))
    run.report("page.html")
    assert str(run) == "<train.py>"
    assert written == [(run, "page.html")]


def test_a_page_that_cannot_be_written_is_bad_input(reporters):
    def fail(run, path):
        raise PermissionError(13, "Permission denied")

    DryRun.reporters.use(str, fail)
    with pytest.raises(BadFile, match=r"the page can't be written to 'page.html': Permission denied. Give the path"):
        make_run().report("page.html")


def test_the_representation_is_short():
    assert repr(make_run()) == "<DryRun of train.py: completed after 3 steps, 1.13 GiB>"
    assert repr(make_run(estimate=None)) == "<DryRun of train.py: completed after 3 steps>"


def test_a_request_survives_its_file():
    request = Request("train.py", False, ("--lr", "1e-3"), RTX_3090, count=2, scan=50, loader_ordinal=1, unlimited=True)
    data = json.loads(json.dumps(request.to_json()))

    assert Request.from_json(data) == request
    assert Request.from_json(json.dumps(data)) == request


def test_runs_are_values():
    assert dataclasses.replace(make_run(), num_steps=2) != make_run()
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_run().num_steps = 5


def test_settings_of_a_request_survive_its_file():
    settings = Settings(micro_batches=4, checkpoint=("h.0",), kernels=OptimizerKernels.FUSED)
    request = Request("train.py", False, (), RTX_3090, settings=settings, watch=True)

    assert Request.from_json(json.dumps(request.to_json())) == request


def test_what_a_run_showed_survives_json():
    seen = ProgramFacts(
        models=("GPT",),
        optimizers=("AdamW",),
        fusable=True,
        batch_size=16,
        work=(Work("h.0", Phase.FORWARD, "aten.mm", 100, 20, "float32"),),
        recomputed=("h.0",),
    )
    run = make_run(seen=seen)

    assert DryRun.from_json(json.dumps(run.to_json())) == run
    assert "seen" not in make_run().to_json()
    assert DryRun.from_json(make_run().to_json()).seen is None
