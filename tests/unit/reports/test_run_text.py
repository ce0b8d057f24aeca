import subprocess
import sys
from pathlib import Path

import pytest

from memfit.core.dryrun import Outcome
from memfit.core.estimate import Note
from memfit.reports.run_text import RULE, format_run
from tests.unit.reports.run_builders import ADVICE, make_dead_run, make_failure, make_run, make_run_estimate, make_scan

GOLDEN = Path(__file__).parent / "golden"

RUNS = {
    "run": make_run(redirected={"runs/last.pt": "tmp/runs/last.pt"}),
    "run_dead": make_dead_run(),
    "run_scan": make_run(scan=make_scan(), advice=ADVICE),
}


@pytest.mark.parametrize("name", RUNS)
def test_text_is_as_agreed(name):
    """The whole text; to change it, write `format_run(RUNS[name])` to the golden file and read the change."""
    assert format_run(RUNS[name]) + "\n" == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_text_is_ascii_and_begins_with_a_rule(run):
    text = format_run(run)

    assert text.isascii()
    assert text.startswith(f"{RULE}\n")
    assert not text.endswith("\n")


def test_names_cannot_steer_the_terminal():
    # GIVEN escape sequences wherever a script can put text
    bad = "\x1b[31mred\n"
    failure = make_failure(source=bad, code=bad, module=bad, op=bad, by_category={bad: 1})
    run = make_dead_run(
        script=bad,
        arguments=(bad,),
        failures=(failure, make_failure(handled=True, source=bad)),
        error=bad,
        redirected={bad: bad},
        scan=make_scan(problem=bad, failure=failure),
        estimate=make_run_estimate(notes=(Note(bad, bad, bad), Note("stand-in-value", bad, bad))),
    )

    # THEN only the text's own line ends are left
    for outcome in Outcome:
        text = format_run(_with(run, outcome))
        assert "\x1b" not in text
        assert all(line.isprintable() for line in text.split("\n"))


def _with(run, outcome):
    import dataclasses

    return dataclasses.replace(run, outcome=outcome)


def test_a_crash_is_a_verdict_and_nothing_else():
    run = make_run(estimate=None, outcome=Outcome.CRASHED, error="the process was ended by SIGSEGV", num_steps=0)

    assert format_run(run) == f"{RULE}\ntrain.py crashed: the process was ended by SIGSEGV"


def test_print_shows_the_text():
    import memfit

    assert memfit.DryRun is type(make_run())
    assert str(make_run()) == format_run(make_run())


def test_text_needs_no_rich():
    code = "import sys; sys.modules['rich'] = None\nimport memfit.reports.run_text"
    source = Path(__file__).parents[3] / "src"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(source)}, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
