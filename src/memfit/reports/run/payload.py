"""The data behind the page of a supervised run."""

from typing import Any

from memfit.core.supervised import Cause, SupervisedRun
from memfit.reports.estimate import figures
from memfit.reports.run import figures as supervised_figures


def build_supervised_payload(run: SupervisedRun) -> dict[str, Any]:
    """Everything the page shows, as a plain structure that `json` can write."""
    history = run.history
    has_others = any(sample.others_bytes for sample in history)
    has_group = any(sample.group_bytes is not None for sample in history)
    return {
        "memfit": figures.package_version(),
        "headline": f"memfit run: {supervised_figures.command(run)}",
        "demand": supervised_figures.verdict(run),
        "answer": supervised_figures.answer(run),
        "fits": supervised_figures.is_good(run),
        "details": supervised_figures.details(run),
        "figures": [[f.label, f.value, f.origin] for f in supervised_figures.figures(run)],
        "seconds": run.seconds,
        "limit": run.limit_bytes,
        "limitName": supervised_figures.limit_name(run),
        "times": [sample.seconds for sample in history],
        "series": [
            ["script", [sample.script_bytes for sample in history]],
            *([["its other processes", [sample.others_bytes for sample in history]]] if has_others else []),
            *([["whole container", [sample.group_bytes for sample in history]]] if has_group else []),
        ],
        "marks": [[mark.seconds, mark.kind, mark.text] for mark in run.marks],
        "spans": [[attempt.started, attempt.started + attempt.seconds] for attempt in run.attempts],
        "attempts": [
            [*supervised_figures.row(attempt), "" if attempt.ending.cause is Cause.ENDED else attempt.ending.text]
            for attempt in run.attempts
        ],
        "notes": [["note", note, ""] for note in run.notes],
    }
