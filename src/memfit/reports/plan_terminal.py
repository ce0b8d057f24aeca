"""A plan for a terminal: the parts of `plan_figures`, in colour where the terminal has colour."""

from typing import TYPE_CHECKING

from memfit.core.plan import Plan
from memfit.reports import plan_figures
from memfit.reports.terminal import render_parts, require_rich, verdict_style

if TYPE_CHECKING:
    from rich.console import RenderableType


def render_plan(plan: Plan) -> "RenderableType":
    """The plan as something rich can print: verdict, moves, before and after, front, refusals, notes."""
    require_rich()
    verdict, details, parts = plan_figures.verdict(plan), plan_figures.details(plan), plan_figures.parts(plan)
    return render_parts(verdict, details, parts, style=verdict_style(plan.fits))
