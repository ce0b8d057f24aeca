import io

import pytest

from memfit.core.dryrun import Outcome
from memfit.core.errors import MissingDependency
from memfit.reports import run_figures
from memfit.reports.run_terminal import render_run
from tests.unit.reports.run_builders import make_dead_run, make_failure, make_run, make_scan

rich_console = pytest.importorskip("rich.console")


def shown(run, width=200, **options):
    file = io.StringIO()
    rich_console.Console(file=file, width=width, **options).print(render_run(run))
    return file.getvalue()


@pytest.mark.parametrize("run", [make_run(), make_dead_run(), make_run(scan=make_scan())])
def test_the_terminal_says_what_the_figures_say(run):
    text = shown(run)

    for line in (run_figures.verdict(run), *run_figures.details(run)):
        assert line in text
    for part in run_figures.parts(run):
        assert part.title in text
        assert all(line in text for line in part.lines)
        assert all(row.name in text for row in part.rows)


def test_a_rule_separates_it_from_the_output_of_the_script():
    assert set(shown(make_run()).splitlines()[0]) == {"\u2500"}


def test_what_wraps_stays_below_its_beginning():
    lines = shown(make_dead_run(), width=60).splitlines()

    start = next(i for i, line in enumerate(lines) if "asked for" in line)
    assert lines[start].startswith("  aten.convolution")
    assert lines[start + 1].startswith("  ")
    assert not any(line.endswith(" ") for line in lines[start : start + 1])


@pytest.mark.parametrize(
    ("run", "colour"), [(make_run(), "32"), (make_dead_run(), "31"), (make_run(outcome=Outcome.NO_STEP), "33")]
)
def test_the_verdict_has_the_colour_of_the_answer(run, colour):
    text = shown(run, color_system="standard", force_terminal=True)

    assert f"\x1b[1;{colour}mtrain.py" in text


def test_names_are_no_markup():
    run = make_dead_run(script="[red]train.py", failures=(make_failure(code="[bold]x[/bold]"),))

    text = shown(run)
    assert "[red]train.py would run out" in text
    assert "[bold]x[/bold]" in text


def test_without_rich_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rich", None)
    with pytest.raises(MissingDependency, match="pip install rich"):
        render_run(make_run())
