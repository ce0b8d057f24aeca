"""A supervised run as plain text: what `print(run)` shows."""

from memfit.core.supervised import SupervisedRun
from memfit.reports import supervised_figures
from memfit.reports.parts import format_parts


def format_supervised(run: SupervisedRun) -> str:
    """The whole run as plain text, without colours and without a trailing newline."""
    figures = supervised_figures
    return "\n".join(format_parts(figures.verdict(run), figures.details(run), figures.parts(run)))
