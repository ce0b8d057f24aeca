import subprocess
import sys
from pathlib import Path

import pytest

from memfit.core.estimate import Note
from memfit.core.plan import PlannedMove, Point, Refusal
from memfit.core.settings import Keeps, Settings
from memfit.reports.plan_text import format_plan
from tests.unit.reports.plan_builders import MOVES, make_easy_plan, make_plan, make_small_plan

GOLDEN = Path(__file__).parent / "golden"

PLANS = {"plan": make_plan(), "plan_easy": make_easy_plan(), "plan_small": make_small_plan()}


@pytest.mark.parametrize("name", PLANS)
def test_text_is_as_agreed(name):
    """The whole text; to change it, write `format_plan(PLANS[name])` to the golden file and read the change."""
    assert format_plan(PLANS[name]) + "\n" == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_text_is_ascii(plan):
    text = format_plan(plan)

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
    text = format_plan(plan)
    assert "\x1b" not in text
    assert all(line.isprintable() for line in text.split("\n"))


def test_text_needs_no_rich():
    code = "import sys; sys.modules['rich'] = None\nimport memfit.reports.plan_text"
    source = Path(__file__).parents[3] / "src"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(source)}, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
