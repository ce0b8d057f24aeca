import io
import re

from rich.console import Console

from memfit.reports.run import figures
from memfit.reports.terminal import render_report
from tests.unit.core.supervised_builders import make_lost, make_supervised


def text_of(run):
    return str(figures.report(run))


def test_the_whole_run():
    lines = text_of(make_supervised()).splitlines()

    assert lines[0].startswith("train.py: completed after 2 attempts")
    assert lines[3] == "Attempts"
    assert re.split(r"  +", lines[4].strip()) == [
        "attempt",
        "run with",
        "time",
        "peak",
        "steps",
        "started from",
        "ended",
    ]
    assert "killed for its memory" in lines[5]
    assert lines[-1] == "  attempt 2 was to use micro-batches of at most 8 but used 16"


def test_one_attempt_needs_no_table():
    assert "Attempts" not in text_of(make_lost())


def shown(run):
    console = Console(file=io.StringIO(), width=140, force_terminal=True, color_system="standard")
    console.print(render_report(figures.report(run, brief=True)))
    return console.file.getvalue()


def test_the_verdict_has_its_colour():
    assert "\x1b[1;32mtrain.py: completed" in shown(make_supervised())
    assert "\x1b[1;31mtrain.py: out of memory" in shown(make_lost())


def test_what_was_said_between_attempts_is_not_said_again():
    text = shown(make_supervised(script="[red]train.py"))

    assert "[red]train.py" in text
    assert "killed for its memory" in text
    assert "the kernel killed it" not in text
