"""A dry run as plain text: what `print(run)` shows, and what stands below the script's own output."""

from memfit.core.dryrun import DryRun
from memfit.reports import run_figures
from memfit.reports.text import format_row

RULE = "-" * 72


def format_run(run: DryRun) -> str:
    """The whole run as plain text, without colours and without a trailing newline."""
    lines = [RULE, run_figures.verdict(run), *(f"  {line}" for line in run_figures.details(run))]
    for part in run_figures.parts(run):
        lines += ["", part.title]
        lines += [format_row(row, with_bar=part.with_bar) for row in part.rows]
        lines += [f"  {line}" for line in part.lines]
    return "\n".join(line.rstrip() for line in lines)
