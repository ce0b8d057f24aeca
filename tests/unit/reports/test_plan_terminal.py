import dataclasses
import io

import pytest

from memfit.core.errors import MissingDependency
from memfit.reports import plan_figures
from memfit.reports.plan_terminal import render_plan
from tests.unit.reports.plan_builders import MOVES, make_easy_plan, make_plan, make_small_plan

rich_console = pytest.importorskip("rich.console")


def shown(plan, width=200, **options):
    file = io.StringIO()
    rich_console.Console(file=file, width=width, **options).print(render_plan(plan))
    return file.getvalue()


@pytest.mark.parametrize("plan", [make_plan(), make_easy_plan(), make_small_plan()])
def test_the_terminal_says_what_the_figures_say(plan):
    text = shown(plan)

    for line in (plan_figures.verdict(plan), *plan_figures.details(plan)):
        assert line in text
    for part in plan_figures.parts(plan):
        assert part.title in text
        assert all(line in text for line in part.lines)
        for line in part.grid.lines if part.grid else ():
            assert all(cell in text for cell in (*line.cells, *line.remarks))


@pytest.mark.parametrize(("plan", "colour"), [(make_plan(), "32"), (make_small_plan(), "31")])
def test_the_verdict_has_the_colour_of_the_answer(plan, colour):
    assert f"\x1b[1;{colour}mResNet" in shown(plan, color_system="standard", force_terminal=True)


def test_numbers_are_never_broken():
    text = shown(make_plan(), width=80)

    assert all(figure in text for figure in ("310.0 MiB (simulated)", "+21.0 ms (assumed)", "1.13 GiB (simulated)"))


def test_names_are_no_markup():
    move = dataclasses.replace(MOVES[0], title="[red]x[/red]", caveat="[bold]y")
    text = shown(make_plan(subject="[red]ResNet", moves=(move,)))

    assert "[red]ResNet on" in text
    assert "[red]x[/red]" in text
    assert "\n    [bold]y" in text, "the caveat is not indented below its move"


def test_without_rich_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rich", None)
    with pytest.raises(MissingDependency, match="pip install rich"):
        render_plan(make_plan())
