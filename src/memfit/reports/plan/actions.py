"""What makes a plan print, write its page, its code and its JSON; heavier parts load when they are used."""

from importlib import import_module

from memfit.core.plan import actions
from memfit.reports.plan import figures


def use_reports() -> None:
    """Lets `print(plan)`, `plan.report`, `plan.code` and `plan.save` do their work."""
    actions.describe = lambda plan: str(figures.report(plan))
    actions.write_page = lambda plan, path: import_module("memfit.reports.page").write_page(plan, path)
    actions.code = lambda plan: str(import_module("memfit.reports.plan.code").format_code(plan))
    actions.write_json = lambda data, path: import_module("memfit.reports.files").write_json(data, path)
