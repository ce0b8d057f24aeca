"""A supervised run for a terminal: the parts of `supervised_figures`, in colour where the terminal has colour."""

from typing import TYPE_CHECKING

from memfit.core.supervised import SupervisedRun
from memfit.reports import supervised_figures
from memfit.reports.terminal import render_parts, require_rich, verdict_style

if TYPE_CHECKING:
    from rich.console import RenderableType


def render_supervised(run: SupervisedRun) -> "RenderableType":
    """The run as something rich can print: the verdict and its attempts.

    Why each ended was said when it ended.
    """
    require_rich()
    figures = supervised_figures
    style = verdict_style(figures.is_good(run))
    return render_parts(figures.verdict(run), [], figures.attempt_parts(run), style=style)
