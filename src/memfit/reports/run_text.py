"""A dry run as plain text: what `print(run)` shows, and what stands below the script's own output."""

from memfit.core.dryrun import DryRun
from memfit.reports import run_figures
from memfit.reports.parts import format_parts

RULE = "-" * 72


def format_run(run: DryRun) -> str:
    """The whole run as plain text, without colours and without a trailing newline."""
    lines = format_parts(run_figures.verdict(run), run_figures.details(run), run_figures.parts(run))
    return "\n".join([RULE, *lines])
