"""A plan as plain text: what `print(plan)` shows."""

from memfit.core.plan import Plan
from memfit.reports import plan_figures
from memfit.reports.parts import format_parts


def format_plan(plan: Plan) -> str:
    """The whole plan as plain text, without colours and without a trailing newline."""
    return "\n".join(format_parts(plan_figures.verdict(plan), plan_figures.details(plan), plan_figures.parts(plan)))
