"""One dry run of the results of a script's processes, which shared the device."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.allocator.shared import Share, read_shares
from memfit.core.dryrun import DryRun, Outcome
from memfit.core.errors import BadFile
from memfit.core.estimate import Estimate, Note

DEVICE = "device"  # name of the file beside the request that tells what each process holds
_SCRIPT = "the script itself"
FAILED = "process-failed"
_ENDED = (Outcome.COMPLETED, Outcome.ENDED, Outcome.NO_STEP)


def with_other_processes(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The result of the script's first process with what others did, which left their results in `folder`."""
    peak_bytes, shares = read_shares(str(folder / DEVICE))
    others = []
    for path in sorted(folder.glob("process-*.json")):
        # One that was killed while it wrote left no whole result; what it held is known all the same.
        with contextlib.suppress(OSError, ValueError, BadFile):
            others.append(DryRun.from_json(json.loads(path.read_text(encoding="utf-8"))))
    if not others and not any(share.peak_bytes for share in shares[1:]):
        # Most runs: reading all of a result takes a while.
        return data
    run = DryRun.from_json(data)
    largest = max([run, *others], key=lambda one: 0 if one.estimate is None else one.estimate.peak_bytes)
    fatal = next((other for other in others if other.outcome is Outcome.OUT_OF_MEMORY), None)
    if fatal is not None and (run.outcome is not Outcome.COMPLETED or not run.num_steps):
        # Whatever became of the others, the one that died is the one to look at.
        largest = run = replace(fatal, script=run.script, arguments=run.arguments, redirected=run.redirected)
    failed = [other for other in others if other.outcome is Outcome.FAILED]
    outcome, error, suspicion = _outcome(run, others, failed)
    estimate = _estimate(largest, run, peak_bytes, [other.error for other in failed] if not error else ())
    together = replace(
        run,
        estimate=estimate,
        outcome=outcome,
        error=error,
        suspicion=suspicion,
        num_steps=max(run.num_steps, *(other.num_steps for other in others), 0),
        failures=largest.failures if fatal is not None else (*run.failures, *(f for o in others for f in o.failures)),
        redirected={path: place for one in (*others, run) for path, place in one.redirected.items()},
        allocator=largest.allocator,
        seen=largest.seen if run.seen is not None else None,
        processes=_named(shares),
    )
    return {**data, **together.to_json()}


def _outcome(run: DryRun, others: list[DryRun], failed: list[DryRun]) -> tuple[Outcome, str, str]:
    """(how it ended, the error, why the simulation may be its reason)."""
    if run.outcome not in _ENDED or run.outcome is Outcome.COMPLETED:
        return run.outcome, run.error, run.suspicion
    outcomes = {other.outcome for other in others}
    if failed and not run.num_steps:
        return Outcome.FAILED, f"in a process that it started: {failed[0].error}", failed[0].suspicion
    if Outcome.COMPLETED in outcomes:
        return Outcome.COMPLETED, "", ""
    if run.outcome is Outcome.ENDED or Outcome.ENDED in outcomes:
        return Outcome.ENDED, "", ""
    return run.outcome, run.error, run.suspicion


def _estimate(largest: DryRun, run: DryRun, peak_bytes: int, failures: Iterable[str]) -> Estimate | None:
    estimate = largest.estimate
    if estimate is None:
        return run.estimate
    other_bytes = max(0, peak_bytes - estimate.peak_bytes)
    known = () if run.estimate is None else run.estimate.notes
    notes = dict.fromkeys((*estimate.notes, *known, *(Note(FAILED, f"a process failed: {text}") for text in failures)))
    return replace(
        estimate,
        subject=estimate.subject if run.estimate is None else run.estimate.subject,
        other_bytes=other_bytes,
        lower_bytes=estimate.lower_bytes + other_bytes,
        upper_bytes=estimate.upper_bytes + other_bytes,
        # Another process has put something there.
        notes=tuple(note for note in notes if note.code != "nothing-on-device"),
    )


def _named(shares: list[Share]) -> dict[str, int]:
    names: Counter[str] = Counter()
    held = {}
    for number, share in enumerate(shares):
        if not share.peak_bytes:
            continue
        name = share.name if number else _SCRIPT
        names[name] += 1
        held[name if names[name] == 1 else f"{name} ({names[name]})"] = share.at_peak_bytes
    return held
