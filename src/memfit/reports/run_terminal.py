"""A dry run for a terminal: the parts of `run_figures`, in colour where the terminal has colour."""

from typing import TYPE_CHECKING

from memfit.core.dryrun import DryRun
from memfit.reports import run_figures
from memfit.reports.terminal import render_parts, require_rich, verdict_style

if TYPE_CHECKING:
    from rich.console import RenderableType


def render_run(run: DryRun) -> "RenderableType":
    """The run as something rich can print: a rule, the verdict, where it ran out, what would help, notes."""
    require_rich()
    from rich.console import Group
    from rich.rule import Rule

    verdict, details, parts = run_figures.verdict(run), run_figures.details(run), run_figures.parts(run)
    return Group(Rule(style="dim"), render_parts(verdict, details, parts, style=verdict_style(run.fits)))
