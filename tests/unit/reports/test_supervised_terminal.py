import io

from rich.console import Console

from memfit.reports.supervised_terminal import render_supervised
from tests.unit.core.supervised_builders import make_lost, make_supervised


def shown(run):
    console = Console(file=io.StringIO(), width=140, force_terminal=True, color_system="standard")
    console.print(render_supervised(run))
    return console.file.getvalue()


def test_the_verdict_has_its_colour():
    assert "\x1b[1;32mtrain.py: completed" in shown(make_supervised())
    assert "\x1b[1;31mtrain.py: out of memory" in shown(make_lost())


def test_what_was_said_between_attempts_is_not_said_again():
    text = shown(make_supervised(script="[red]train.py"))

    assert "[red]train.py" in text
    assert "killed for its memory" in text
    assert "the kernel killed it" not in text
