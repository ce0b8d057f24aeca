import json
import subprocess
import sys

import pytest

from memfit.api.result_reports import use_reports
from memfit.catalogue.query import find_device
from memfit.core import plan as core_plan
from memfit.core.device import Origin
from memfit.core.errors import BadFile
from memfit.core.plan import Plan
from memfit.core.reporters import Reporters
from memfit.core.verification import Measured, Verification
from memfit.reports.page import render_page
from memfit.reports.plan.code import format_code
from memfit.reports.plan.figures import report
from memfit.reports.verify.figures import format_verification
from tests.unit.reports.plan_builders import make_plan


@pytest.fixture
def unset(monkeypatch):
    """Plans as they are without reports."""
    monkeypatch.setattr(core_plan, "actions", core_plan._Actions())
    monkeypatch.setattr(Plan, "reporters", core_plan.actions)
    monkeypatch.setattr("memfit.api.result_reports.actions", core_plan.actions)


def test_without_it_a_plan_only_says_its_figures(unset):
    assert str(make_plan()) == repr(make_plan())
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


@pytest.mark.parametrize("name", ["Estimate", "Plan", "DryRun", "SupervisedRun"])
def test_whoever_has_a_result_of_memfit_can_print_it(name):
    code = f"import memfit, sys; sys.exit(memfit.{name}.reporters.describe is repr)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_verification_prints_and_saves_as_other_results_do(tmp_path, monkeypatch):
    monkeypatch.setattr(Verification, "reporters", Reporters())
    use_reports()

    verification = Verification(find_device("t4"), Origin.SIMULATED, "2026-01-01", Measured(), ())
    verification.save(tmp_path / "t4.json")
    assert str(verification) == str(format_verification(verification))
    assert Verification.load(tmp_path / "t4.json") == verification


def test_an_estimate_inside_of_another_result_prints_as_any_other():
    code = "import memfit; memfit.dryrun; from memfit.core.estimate import Estimate; print(Estimate.reporters.describe)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "late" in done.stdout
