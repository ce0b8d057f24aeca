"""A dry run for a terminal: the parts of `run_figures`, in colour where the terminal has colour."""

from typing import TYPE_CHECKING

from memfit.core.dryrun import DryRun
from memfit.reports import run_figures
from memfit.reports.terminal import breakdown_table, require_rich, verdict_style

if TYPE_CHECKING:
    from rich.console import RenderableType


def render_run(run: DryRun) -> "RenderableType":
    """The run as something rich can print: a rule, the verdict, where it ran out, what would help, notes."""
    require_rich()
    from rich.console import Group
    from rich.padding import Padding
    from rich.rule import Rule
    from rich.text import Text

    def line(text: str) -> "RenderableType":
        # What wraps stays below its beginning.
        indent = 2 + len(text) - len(text.lstrip())
        return Padding(Text(text.lstrip()), (0, 0, 0, indent), expand=False)

    style = verdict_style(run.fits)
    found: list[RenderableType] = [Rule(style="dim"), Text(run_figures.verdict(run), style=f"bold {style}")]
    found += map(line, run_figures.details(run))
    for part in run_figures.parts(run):
        found.append(Text(f"\n{part.title}", style="bold"))
        if part.rows:
            found.append(breakdown_table(list(part.rows), with_bar=part.with_bar))
        found += map(line, part.lines)
    return Group(*found)
