"""What results do that core can't: how they print, the pages they write, how a plan is put into practice.

Whatever is called is loaded when it is first called, so that a result costs no more than its figures.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from memfit.core.dryrun import DryRun
from memfit.core.estimate import Estimate
from memfit.core.plan import actions
from memfit.core.supervised import SupervisedRun
from memfit.core.verification import Verification


def use_reports() -> None:
    """Lets results print themselves and write pages, and plans be applied and saved."""
    write_page, write_json = late("memfit.reports.page", "write_page"), late("memfit.reports.files", "write_json")
    Estimate.reporters.use(late("memfit.reports.estimate.figures", "format_estimate"), write_page)
    DryRun.reporters.use(late("memfit.reports.dryrun.figures", "report"), write_page)
    SupervisedRun.reporters.use(late("memfit.reports.run.figures", "report"), write_page)
    Verification.reporters.describe = late("memfit.reports.verify.figures", "format_verification")
    Verification.reporters.write_json = write_json
    actions.use(late("memfit.reports.plan.figures", "report"), write_page)
    actions.write_json, actions.apply = write_json, late("memfit.api.plan", "apply_plan")
    format_code = late("memfit.reports.plan.code", "format_code")
    actions.code = lambda plan: str(format_code(plan))


def late(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is loaded when it is first called."""
    return lambda *given: getattr(import_module(module), name)(*given)
