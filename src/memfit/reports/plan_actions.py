"""What makes a plan print, write its page, its code and its JSON; heavier parts load when they are used."""

from typing import Any

from memfit.core.plan import Plan, actions
from memfit.reports.plan_text import format_plan


def use_reports() -> None:
    """Lets `print(plan)`, `plan.report`, `plan.code` and `plan.save` do their work."""
    actions.describe = format_plan
    actions.write_page = _write_page
    actions.code = _code
    actions.write_json = _write_json


def _write_page(plan: Plan, path: str) -> object:
    from memfit.reports import page

    return page.write_plan_page(plan, path)


def _code(plan: Plan) -> str:
    from memfit.reports.plan_code import format_code

    return format_code(plan)


def _write_json(data: dict[str, Any], path: str) -> object:
    from memfit.reports import files

    return files.write_json(data, path)
