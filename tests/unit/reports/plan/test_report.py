import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from memfit.core.estimate import Note
from memfit.core.plan import PlannedMove, Point, Refusal
from memfit.core.settings import Keeps, Settings
from memfit.reports.plan import figures as plan_figures
from memfit.reports.terminal import render_report
from tests.unit.reports.plan_builders import MOVES, make_easy_plan, make_plan, make_small_plan

GOLDEN = Path(__file__).parents[1] / "golden"

PLANS = {"plan": make_plan(), "plan_easy": make_easy_plan(), "plan_small": make_small_plan()}


def text_of(plan):
    return str(plan_figures.report(plan))


@pytest.mark.parametrize("name", PLANS)
def test_text_is_as_agreed(name):
    """The whole text; to change it, write `str(report(PLANS[name]))` to the golden file and read the change."""
    assert text_of(PLANS[name]) + "\n" == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_text_is_ascii(plan):
    text = text_of(plan)

    assert text.isascii()
    assert not text.endswith("\n")
    assert all(line == line.rstrip() for line in text.split("\n"))


def test_names_cannot_steer_the_terminal():
    # GIVEN escape sequences wherever text of others comes in
    bad = "\x1b[31mred\n"
    origin = MOVES[0].saves_origin
    plan = make_plan(
        subject=bad,
        moves=(PlannedMove(bad, bad, Keeps.CHANGES, 1, origin, 1.0, origin, bad), MOVES[2]),
        front=(Point(1, 1.0, bad, Settings()), Point(2, 1.0, bad, Settings())),
        refused=(Refusal(bad, bad),),
        notes=(Note(bad, bad, bad),),
    )

    # THEN only the text's own line ends are left
    text = text_of(plan)
    assert "\x1b" not in text
    assert all(line.isprintable() for line in text.split("\n"))


def shown(plan, width=200, **options):
    file = io.StringIO()
    Console(file=file, width=width, **options).print(render_report(plan_figures.report(plan)))
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
