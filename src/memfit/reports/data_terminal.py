"""Reports on data for a terminal: the parts of `data_figures`, in colour where the terminal has colour."""

from typing import TYPE_CHECKING

from memfit.data.convert import Conversion
from memfit.data.inspection import Inspection
from memfit.data.speed import Speed
from memfit.reports import data_figures
from memfit.reports.terminal import render_parts, require_rich, verdict_style

if TYPE_CHECKING:
    from rich.console import RenderableType


def render_inspection(found: Inspection) -> "RenderableType":
    """What a file holds, as something rich can print."""
    require_rich()
    style = verdict_style(data_figures.is_loadable(found))
    return render_parts(data_figures.inspection_verdict(found), [], data_figures.inspection_parts(found), style=style)


def render_conversion(done: Conversion) -> "RenderableType":
    """What a conversion did, as something rich can print."""
    require_rich()
    figures = data_figures
    # Values that were lost are no failure, but nobody should miss them.
    style = verdict_style(None if done.num_overflow or done.num_underflow else True)
    return render_parts(
        figures.conversion_verdict(done), figures.conversion_details(done), figures.conversion_parts(done), style=style
    )


def render_speed(found: Speed) -> "RenderableType":
    """How fast it streams, as something rich can print."""
    require_rich()
    figures = data_figures
    judgement, parts = figures.speed_judgement(found), figures.speed_parts(found)
    return render_parts(figures.speed_verdict(found), judgement, parts, style=verdict_style(True))
