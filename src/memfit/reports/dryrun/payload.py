"""The data behind the page of a dry run: that of its estimate, with what happened to the script."""

from typing import Any

from memfit.core.dryrun import DryRun, Failure
from memfit.core.errors import BadInput
from memfit.core.units import format_size
from memfit.reports.dryrun import figures as run_figures
from memfit.reports.estimate import figures
from memfit.reports.estimate.payload import build_payload
from memfit.reports.parts import HARMLESS, KEEPS


def build_run_payload(run: DryRun) -> dict[str, Any]:
    """Everything the page shows, as a plain structure that `json` can write."""
    estimate = run.estimate
    if estimate is None:
        raise BadInput(f"there is nothing to draw: {run_figures.verdict(run)}.")
    notes = [[note.code, note.text, note.source] for note in run_figures.notes(run)]
    if run_figures.stand_ins(run):
        notes.append([HARMLESS, run_figures.stand_ins(run), ""])
    fatal, late = run.fatal, None if run.scan is None else run.scan.failure
    failed = [failure for failure in (fatal, late) if failure is not None]
    # The page has places of its own for these.
    shown = [line for failure in failed for line in run_figures.failure_lines(run, failure)]
    return {
        **build_payload(estimate),
        "headline": f"memfit dryrun: {run_figures.command(run)}",
        "demand": run_figures.verdict(run),
        "answer": run_figures.answer(run),
        "fits": run.fits,
        "bounds": figures.bounds(estimate) if run_figures.is_whole(run) else "",
        "failure": None if fatal is None else run_figures.asked(run, fatal),
        "figures": [[f.label, f.value, f.origin] for f in run_figures.run_figures(run)],
        "seconds": round(run.seconds, 2),
        "notes": notes,
        "run": {
            "details": [
                line for line in (*run_figures.details(run), *run_figures.advice_lines(run)) if line not in shown
            ],
            "failure": None if fatal is None else _failure(run, fatal),
            "scan": [line for line in run_figures.scan_lines(run) if line not in shown],
            "scanFailure": None if late is None else _failure(run, late),
            "advice": _advice(run),
            "redirected": [(given, real or "not kept") for given, real in run.redirected.items()],
        },
    }


def _failure(run: DryRun, failure: Failure) -> dict[str, Any]:
    groups = run_figures.failure_groups(run, failure)
    rows = figures.rows(groups, sum(groups.values()))
    return {
        "title": f"Held {run_figures.moment(failure)}",
        "source": failure.source,
        "code": failure.code.strip(),
        "message": failure.message,
        "rows": [[row.name, row.size_bytes, row.share] for row in rows],
    }


def _advice(run: DryRun) -> list[list[Any]]:
    capacity = None if run.estimate is None else run.estimate.capacity_bytes
    return [
        [
            advice.title,
            format_size(advice.saves_bytes),
            format_size(advice.peak_bytes),
            None if capacity is None else advice.peak_bytes <= capacity,
            KEEPS.get(advice.keeps, advice.keeps),
            advice.origin.value,
            advice.how,
        ]
        for advice in run.advice
    ]
