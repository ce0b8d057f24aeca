"""What every report of a supervised run says, before any of them decides how it looks."""

from typing import Any

from memfit.core.supervised import Attempt, Cause, RunOutcome, SupervisedRun
from memfit.core.units import format_size
from memfit.reports.estimate.figures import Figure, package_version, printable
from memfit.reports.parts import Grid, Line, Part, Report

_MEASURED, _GIVEN = "measured", "given"


def command(run: SupervisedRun) -> str:
    """The script and its arguments."""
    return printable(" ".join((run.script, *run.arguments)))


def verdict(run: SupervisedRun) -> str:
    """The one line that says how it went."""
    attempts = "1 attempt" if len(run.attempts) == 1 else f"{len(run.attempts)} attempts"
    peak = "" if run.peak is None else f", peak {format_size(run.peak.held_bytes)}"
    if run.peak is not None and run.limit_bytes is not None:
        peak += f" of {format_size(run.limit_bytes)}"
    return f"{printable(run.script)}: {answer(run)} after {attempts}, {duration(run.seconds)}{peak}"


def answer(run: SupervisedRun) -> str:
    """The outcome in a few words."""
    if run.outcome is RunOutcome.FAILED:
        return f"failed with exit code {run.exit_code}"
    if run.outcome is RunOutcome.SIGNALLED:
        return f"ended by {run.attempts[-1].ending.signal}"
    return run.outcome.value


def is_good(run: SupervisedRun) -> bool | None:
    """Whether it got through; None where memory isn't the reason why it didn't."""
    return {RunOutcome.COMPLETED: True, RunOutcome.OUT_OF_MEMORY: False}.get(run.outcome)


def duration(seconds: float) -> str:
    """A duration as people read it.

    >>> duration(3.21), duration(75), duration(7384)
    ('3.2 s', '1 min 15 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def figures(run: SupervisedRun) -> list[Figure]:
    """Every headline figure with its origin."""
    shown = [
        Figure("peak of one process", format_size(None if run.peak is None else run.peak.held_bytes), _MEASURED),
        Figure(limit_name(run), format_size(run.limit_bytes), _GIVEN if run.limit_of == "budget" else _MEASURED),
        Figure("attempts", str(len(run.attempts)), ""),
        Figure("time", duration(run.seconds), _MEASURED),
    ]
    groups = [sample.group_bytes for sample in run.history if sample.group_bytes is not None]
    if groups:
        shown.insert(1, Figure("peak of the container", format_size(max(groups)), _MEASURED))
    swapped = max((attempt.swapped_bytes for attempt in run.attempts), default=0)
    if swapped:
        shown.append(Figure("most of it in swap", format_size(swapped), _MEASURED))
    return shown


def limit_name(run: SupervisedRun) -> str:
    """Whose limit it is."""
    return {"budget": "budget", "": "limit"}.get(run.limit_of, f"limit of the {run.limit_of}")


def details(run: SupervisedRun) -> list[str]:
    """Lines below the verdict: why it ended, where that isn't plain."""
    last = run.attempts[-1].ending
    lines = [] if last.cause is Cause.ENDED else [printable(last.text)]
    if run.peak is not None:
        name = f" ({printable(run.peak.name)})" if run.peak.name else ""
        process = f"process {run.peak.pid}{name}, {format_size(run.peak.held_bytes)}"
        lines.append(f"largest process: {process}, at {duration(run.peak.seconds)}")
    return lines


def row(attempt: Attempt) -> list[str]:
    """An attempt as the cells of a table."""
    return [
        str(attempt.number),
        str(attempt.configuration),
        duration(attempt.seconds),
        format_size(None if attempt.peak is None else attempt.peak.held_bytes),
        "unknown" if attempt.steps is None else str(attempt.steps),
        printable(attempt.resumed_from) or "its beginning",
        attempt.ending.cause.value,
    ]


def report(run: SupervisedRun, *, brief: bool = False) -> Report:
    """The verdict, why the last attempt ended, the attempts, notes; `brief`: without what was told meanwhile."""
    parts = []
    if len(run.attempts) > 1:
        columns = ("attempt", "run with", ">time", ">peak", "steps", "started from", "ended")
        parts.append(Part("Attempts", grid=Grid(columns, tuple(Line(tuple(row(a))) for a in run.attempts))))
    if run.notes and not brief:
        parts.append(Part("Notes", lines=tuple(map(printable, run.notes))))
    return Report(verdict(run), [] if brief else details(run), parts, is_good(run))


def build_supervised_payload(run: SupervisedRun) -> dict[str, Any]:
    """Everything the page shows, as a plain structure that `json` can write."""
    history = run.history
    has_others = any(sample.others_bytes for sample in history)
    has_group = any(sample.group_bytes is not None for sample in history)
    return {
        "memfit": package_version(),
        "headline": f"memfit run: {command(run)}",
        "demand": verdict(run),
        "answer": answer(run),
        "fits": is_good(run),
        "details": details(run),
        "figures": [[f.label, f.value, f.origin] for f in figures(run)],
        "seconds": run.seconds,
        "limit": run.limit_bytes,
        "limitName": limit_name(run),
        "times": [sample.seconds for sample in history],
        "series": [
            ["script", [sample.script_bytes for sample in history]],
            *([["its other processes", [sample.others_bytes for sample in history]]] if has_others else []),
            *([["whole container", [sample.group_bytes for sample in history]]] if has_group else []),
        ],
        "marks": [[mark.seconds, mark.kind, mark.text] for mark in run.marks],
        "spans": [[attempt.started, attempt.started + attempt.seconds] for attempt in run.attempts],
        "attempts": [
            [*row(attempt), "" if attempt.ending.cause is Cause.ENDED else attempt.ending.text]
            for attempt in run.attempts
        ],
        "notes": [["note", note, ""] for note in run.notes],
    }
