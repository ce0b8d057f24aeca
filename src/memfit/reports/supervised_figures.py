"""What every report of a supervised run says, before any of them decides how it looks."""

from memfit.core.supervised import Attempt, Cause, Outcome, ProcessMemory, SupervisedRun
from memfit.core.units import format_size
from memfit.reports.figures import Figure, printable
from memfit.reports.parts import Grid, Line, Part

_MEASURED, _GIVEN = "measured", "given"


def command(run: SupervisedRun) -> str:
    """The script and its arguments."""
    return printable(" ".join((run.script, *run.arguments)))


def verdict(run: SupervisedRun) -> str:
    """The one line that says how it went."""
    return f"{printable(run.script)}: {answer(run)} after {attempts(run)}, {duration(run.seconds)}{_peak(run)}"


def answer(run: SupervisedRun) -> str:
    """The outcome in a few words."""
    if run.outcome is Outcome.FAILED:
        return f"failed with exit code {run.exit_code}"
    if run.outcome is Outcome.SIGNALLED:
        return f"ended by {run.attempts[-1].ending.signal}"
    return run.outcome.value


def is_good(run: SupervisedRun) -> bool | None:
    """Whether it got through; None where memory isn't the reason why it didn't."""
    return {Outcome.COMPLETED: True, Outcome.OUT_OF_MEMORY: False}.get(run.outcome)


def attempts(run: SupervisedRun) -> str:
    """How many attempts, in words."""
    return "1 attempt" if len(run.attempts) == 1 else f"{len(run.attempts)} attempts"


def duration(seconds: float) -> str:
    """A duration as people read it.

    >>> duration(3.21), duration(75), duration(7384)
    ('3.2 s', '1 min 15 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _peak(run: SupervisedRun) -> str:
    if run.peak is None:
        return ""
    limit = "" if run.limit_bytes is None else f" of {format_size(run.limit_bytes)}"
    return f", peak {format_size(run.peak.held_bytes)}{limit}"


def process(memory: ProcessMemory | None) -> str:
    """A process and what it held, in words."""
    if memory is None:
        return "unknown"
    name = f" ({printable(memory.name)})" if memory.name else ""
    return f"process {memory.pid}{name}, {format_size(memory.held_bytes)}"


def figures(run: SupervisedRun) -> list[Figure]:
    """Every headline figure with its origin."""
    found = [
        Figure("peak of one process", format_size(None if run.peak is None else run.peak.held_bytes), _MEASURED),
        Figure(limit_name(run), format_size(run.limit_bytes), _GIVEN if run.limit_of == "budget" else _MEASURED),
        Figure("attempts", str(len(run.attempts)), ""),
        Figure("time", duration(run.seconds), _MEASURED),
    ]
    groups = [sample.group_bytes for sample in run.history if sample.group_bytes is not None]
    if groups:
        found.insert(1, Figure("peak of the container", format_size(max(groups)), _MEASURED))
    swapped = max((attempt.swapped_bytes for attempt in run.attempts), default=0)
    if swapped:
        found.append(Figure("most of it in swap", format_size(swapped), _MEASURED))
    return found


def limit_name(run: SupervisedRun) -> str:
    """Whose limit it is."""
    return {"budget": "budget", "": "limit"}.get(run.limit_of, f"limit of the {run.limit_of}")


def details(run: SupervisedRun) -> list[str]:
    """Lines below the verdict: why it ended, where that isn't plain."""
    last = run.attempts[-1].ending
    lines = [] if last.cause is Cause.ENDED else [printable(last.text)]
    if run.peak is not None:
        lines.append(f"most was held by {process(run.peak)}, at {duration(run.peak.seconds)}")
    return lines


def parts(run: SupervisedRun) -> list[Part]:
    """Everything below the verdict and its lines."""
    notes = Part("Notes", lines=tuple(map(printable, run.notes)))
    return [*attempt_parts(run), *([notes] if notes.holds_something else [])]


def attempt_parts(run: SupervisedRun) -> list[Part]:
    """A table of the attempts, where there was more than one."""
    if len(run.attempts) < 2:
        return []
    columns = ("attempt", "run with", ">time", ">peak", "steps", "started from", "ended")
    return [Part("Attempts", grid=Grid(columns, tuple(Line(tuple(row(attempt))) for attempt in run.attempts)))]


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
