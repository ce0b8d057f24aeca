import json

import pytest

import memfit  # noqa: F401 (importing it is what gives plans their reports)
from memfit.core import plan as core_plan
from memfit.core.errors import BadFile
from memfit.core.plan import Plan
from memfit.reports.page import render_page
from memfit.reports.plan.code import format_code
from memfit.reports.plan.figures import report, use_reports
from tests.unit.reports.plan_builders import make_plan


@pytest.fixture
def unset(monkeypatch):
    """Plans as they are without reports."""
    monkeypatch.setattr(core_plan, "actions", core_plan._Actions())
    monkeypatch.setattr("memfit.reports.plan.figures.actions", core_plan.actions)


def test_without_it_a_plan_only_says_its_figures(unset):
    assert str(make_plan()) == "ResNet: 900.0 MiB"
    with pytest.raises(NotImplementedError):
        make_plan().code()


def test_with_it_everything_works(unset, tmp_path):
    use_reports()
    plan = make_plan()
    plan.report(tmp_path / "plan.html")
    plan.save(tmp_path / "plan.json")

    assert str(plan) == str(report(plan))
    assert plan.code() == format_code(plan)
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == render_page(plan)
    assert json.loads((tmp_path / "plan.json").read_text(encoding="utf-8")) == json.loads(json.dumps(plan.to_json()))
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_place_that_cannot_be_written_is_named(unset, tmp_path):
    use_reports()
    for write, what in ((make_plan().report, "page"), (make_plan().save, "plan")):
        with pytest.raises(BadFile, match=f"the {what} can't be written to .*missing"):
            write(tmp_path / "missing" / "file")
        with pytest.raises(BadFile, match="it is not a file"):
            write(tmp_path)


def test_importing_memfit_is_enough():
    assert str(make_plan()) == str(report(make_plan()))
