import json
import os
from dataclasses import replace

import pytest

from memfit.core.errors import BadFile, MemfitError
from memfit.core.plan import Plan, PlanNotFound, Seconds
from memfit.core.settings import Keeps
from tests.unit.reports.plan_builders import make_plan


@pytest.fixture
def plan():
    return make_plan()


def test_a_plan_survives_json(plan):
    again = Plan.from_json(json.dumps(plan.to_json()))
    assert again == plan
    assert again.to_json() == plan.to_json()


def test_a_plan_survives_a_file(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_does_to_the_numbers_what_its_worst_move_does(plan):
    exact = replace(plan, moves=())
    assert exact.keeps is Keeps.EXACT
    worst = replace(plan, moves=(*plan.moves, replace(plan.moves[0], keeps=Keeps.CHANGES)))
    assert worst.keeps is Keeps.CHANGES


def test_slowdown_is_unknown_without_times(plan):
    assert replace(plan, seconds_after=Seconds(None)).slowdown is None
    known = replace(plan, seconds_before=Seconds(2.0), seconds_after=Seconds(3.0))
    assert known.slowdown == 1.5


def test_fits_compares_with_the_budget(plan):
    assert replace(plan, budget_bytes=plan.after.peak_bytes).fits
    assert not replace(plan, budget_bytes=plan.after.peak_bytes - 1).fits


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "memfit.plan", "version": 1}', "not json", "null", "3"])
def test_what_is_no_plan_is_refused(text, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(BadFile):
        Plan.load(path)


def test_another_version_is_refused_with_both_numbers(plan):
    data = plan.to_json() | {"version": 99}
    with pytest.raises(BadFile, match=r"version 1, got memfit.plan 99"):
        Plan.from_json(data)


def test_a_missing_file_is_one_message(tmp_path):
    with pytest.raises(BadFile, match="can't be read: No such file"):
        Plan.load(tmp_path / "none.json")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "plan.json")

    with pytest.raises(
        BadFile, match=r"can't be read: .*it is a FIFO, and a plain file was expected\. Give a file that"
    ):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": "memfit.plan", "version": 99}'])
def test_a_bad_file_is_named(tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_text(text)

    with pytest.raises(BadFile, match=r"the plan '.*mine\.json' can't be read: (not a plan|expected a memfit.plan)"):
        Plan.load(path)


def test_a_folder_that_is_not_there_is_one_message(plan, tmp_path):
    with pytest.raises(BadFile, match="can't be written"):
        plan.save(tmp_path / "nowhere" / "plan.json")
    assert list(tmp_path.iterdir()) == []


def test_nothing_found_exits_with_3():
    error = PlanNotFound("no plan", device_name="t4")
    assert isinstance(error, MemfitError) and error.exit_code == 3
    assert error.smallest is None and error.device_name == "t4"
