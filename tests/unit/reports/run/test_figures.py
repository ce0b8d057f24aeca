import dataclasses

import pytest

from memfit.core.supervised import Cause, Ending, RunOutcome
from memfit.reports.run import figures
from tests.unit.core.supervised_builders import make_attempts, make_lost, make_supervised


def test_the_verdict():
    assert figures.verdict(make_supervised()) == (
        "train.py: completed after 2 attempts, 10.0 s, peak 990.0 MiB of 1.00 GiB"
    )


def test_a_run_that_was_never_seen_has_no_peak():
    first, _ = make_attempts()
    run = make_supervised(attempts=(dataclasses.replace(first, peak=None),), history=(), limit_bytes=None)

    assert figures.verdict(run) == "train.py: completed after 1 attempt, 10.0 s"
    assert figures.figures(run)[0].value == "unknown"


@pytest.mark.parametrize(
    ("outcome", "exit_code", "answer", "is_good"),
    [
        (RunOutcome.COMPLETED, 0, "completed", True),
        (RunOutcome.FAILED, 7, "failed with exit code 7", None),
        (RunOutcome.OUT_OF_MEMORY, 3, "out of memory", False),
        (RunOutcome.INTERRUPTED, 130, "interrupted", None),
        (RunOutcome.SIGNALLED, 143, "ended by SIGTERM", None),
    ],
)
def test_outcomes_in_words(outcome, exit_code, answer, is_good):
    first, _ = make_attempts()
    ended = dataclasses.replace(first, ending=Ending(Cause.SIGNALLED, "it was ended", signal="SIGTERM"))
    run = make_supervised(attempts=(ended,), outcome=outcome, exit_code=exit_code)

    assert (figures.answer(run), figures.is_good(run)) == (answer, is_good)


def test_figures_have_origins():
    found = {figure.label: (figure.value, figure.origin) for figure in figures.figures(make_supervised())}

    assert found == {
        "peak of one process": ("990.0 MiB", "measured"),
        "peak of the container": ("1010.0 MiB", "measured"),
        "limit of the container": ("1.00 GiB", "measured"),
        "attempts": ("2", ""),
        "time": ("10.0 s", "measured"),
        "most of it in swap": ("2.00 MiB", "measured"),
    }


@pytest.mark.parametrize(("of", "name"), [("budget", "budget"), ("", "limit"), ("machine", "limit of the machine")])
def test_whose_limit_it_is(of, name):
    assert figures.limit_name(make_supervised(limit_of=of)) == name


def test_why_it_ended_is_told_where_it_is_not_plain():
    assert figures.details(make_lost())[0].startswith("the kernel killed it: process 70")
    assert figures.details(make_supervised()) == ["largest process: process 70 (python), 990.0 MiB, at 4.1 s"]


def test_parts():
    attempts, notes = figures.report(make_supervised()).parts
    assert attempts.grid.lines[1].cells == (
        "2",
        "micro-batches of at most 8 and rescue",
        "5.6 s",
        "600.0 MiB",
        "20",
        "runs/first/step-6",
        "ended by itself",
    )
    assert notes.lines == ("attempt 2 was to use micro-batches of at most 8 but used 16",)
    assert [part.title for part in figures.report(make_lost()).parts] == ["Notes"]


def test_text_can_not_steer_a_terminal():
    run = make_supervised(script="\x1b[31mtrain.py", notes=("\x1b[0m",))

    assert "\x1b" not in figures.verdict(run) + figures.command(run) + figures.report(run).parts[1].lines[0]
