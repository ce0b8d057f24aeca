"""Runs a script to its end: starts it, watches it, and starts it again with something smaller when memory runs out.

An attempt that ended for a reason of its own is the last one: its exit code is passed on. One that ended for lack of
memory is followed by another, from the last checkpoint, that is told something no attempt was told before; until the
script gets through or nothing is left to tell it.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.core import env
from memfit.core.run_events import TRACEBACK, RunRequest, read_events
from memfit.core.supervised import Attempt, Cause, Configuration, Ending, RunMark, RunOutcome, SupervisedRun
from memfit.core.units import format_size
from memfit.processes import child, kills, limits
from memfit.processes import process_tree as processes
from memfit.processes.cgroups import ControlGroups
from memfit.processes.folders import temporary_folder
from memfit.processes.limits import has_devices
from memfit.processes.watch import History, Watch, WatchedMemory, is_shared_memory_full

_OUTCOMES = {
    Cause.ENDED: RunOutcome.COMPLETED,
    Cause.FAILED: RunOutcome.FAILED,
    Cause.INTERRUPTED: RunOutcome.INTERRUPTED,
    Cause.SIGNALLED: RunOutcome.SIGNALLED,
}
EXIT_OUT_OF_MEMORY = 3
EXIT_INTERRUPTED = 130
_MAX_MARKS = 500
_MARKS = {
    "oom": ("out of memory", "an allocation failed{at}, and the guard rolled the step back"),
    "settings": ("settings", "{text}"),
    "checkpoint": ("checkpoint", "checkpoint written{at}"),
    "resume": ("checkpoint", "resumed from a checkpoint{at}"),
}
# Of the memory, what the plan of an attempt may use beside that of the one before.
_NEXT_SHARE, _LEAST_SHARE = 0.75, 0.3

# Events of an attempt, or the last one of each kind by its name.
Event = dict[str, Any]
Last = dict[str, Event]


class Supervisor:
    """One supervised run."""

    def __init__(
        self,
        request: RunRequest,
        *,
        retries: int = 5,
        quiet_output: bool = False,
        announce: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._request = request
        self._retries = retries
        self._quiet_output = quiet_output
        self._announce = announce
        self._groups = ControlGroups()
        self._history = History()
        self._origin, self._clock_origin = time.monotonic(), time.time()
        self._attempts: list[Attempt] = []
        self._marks: list[RunMark] = []
        self._notes: list[str] = []
        self._ceiling = limits.Ceiling(None, None, "")
        self._checkpoint = ""

    def run(self) -> SupervisedRun:
        """Runs the script to its end, however many attempts that takes."""
        processes.adopt_orphans()
        try:
            with temporary_folder() as folder, child.passing_on_signals() as signals:
                configuration: Configuration | None = Configuration(rescue=self._request.rescue)
                while configuration is not None:
                    configuration = self._attempt(configuration, Path(folder), signals)
        finally:
            processes.adopt_orphans(False)
        ending = self._attempts[-1].ending
        outcome = _OUTCOMES.get(ending.cause, RunOutcome.OUT_OF_MEMORY)
        exit_code = ending.exit_code or 0
        if outcome is RunOutcome.SIGNALLED:
            exit_code = 128 + processes.number_of(ending.signal)
        fixed = {RunOutcome.OUT_OF_MEMORY: EXIT_OUT_OF_MEMORY, RunOutcome.INTERRUPTED: EXIT_INTERRUPTED}
        return SupervisedRun(
            script=self._request.script,
            arguments=self._request.arguments,
            attempts=tuple(self._attempts),
            outcome=outcome,
            exit_code=fixed.get(outcome, exit_code),
            history=tuple(self._history),
            marks=tuple(self._marks[:_MAX_MARKS]),
            budget_bytes=self._request.budget_bytes,
            limit_bytes=self._ceiling.limit_bytes,
            limit_of=self._ceiling.limit_of,
            seconds=round(self._seconds(), 3),
            notes=tuple(self._notes),
        )

    def _attempt(self, configuration: Configuration, folder: Path, signals: child.Signals) -> Configuration | None:
        """One attempt; what the next one is to be told, None where this was the last."""
        number = len(self._attempts) + 1
        folder = folder / f"attempt-{number}"
        folder.mkdir()
        self._ceiling = limits.ceiling(self._groups.room(), self._host_budget())
        request = replace(
            self._request,
            attempt=number,
            micro_batch_size=configuration.micro_batch_size,
            budget_bytes=self._request.budget_bytes if configuration.share >= 1 else self._planned_bytes(),
            share=configuration.share,
            rescue=configuration.rescue,
            eager=configuration.eager,
            data_limit_bytes=None if configuration.reserves else self._ceiling.data_bytes,
        )
        started = self._seconds()
        self._mark("start" if number == 1 else "restart", f"attempt {number}: {configuration}")
        counted, counted_around = self._groups.num_kills(), self._groups.num_kills(around=True)
        with contextlib.closing(kills.KernelLog()) as log:
            with child.started(request, folder, stdout_to_stderr=self._quiet_output) as running:
                limit = limits.FollowingLimit(
                    running.pid, self._ceiling, self._host_budget(), reserves=configuration.reserves
                )
                with Watch(running.pid, self._groups, limit, self._history, self._origin) as watch:
                    signals.become(running)
                    status = running.wait()
                    signals.become(None)
                seen = watch.seen
                if running.lost_keeper:
                    processes.kill_all([running.pid, *(seen.by_pid or {})])
            events = read_events(folder)
            last = {event["event"]: event for event in events}
            if status < 0:
                # The kernel writes its log after it has sent the signal.
                time.sleep(0.05)
            # TensorFlow crashes for lack of memory.
            uses_tensorflow = "guard" in last and last.get("keras", {}).get("backend") == "tensorflow"
            evidence = kills.Evidence(
                status=status,
                pid=running.pid,
                seconds=self._seconds(),
                seen=replace(seen, shared_memory_full=seen.shared_memory_full or is_shared_memory_full()),
                ceiling=self._ceiling,
                error=last.get("error"),
                cannot_fit=str(last.get("cannot fit", {}).get("text", "")),
                kills=_growth(counted, self._groups.num_kills()),
                kills_around=_growth(counted_around, self._groups.num_kills(around=True)),
                logged=log.kills(),
                passed_on=frozenset(signals.names),
                guarded_by="TensorFlow" if uses_tensorflow else "",
                reserves=configuration.reserves,
            )
        ending = kills.explain(evidence)
        self._finish(configuration, ending, started, seen, events, last)
        if not ending.cause.is_memory or signals.ask_to_end:
            return None
        return self._next(events, last, folder / TRACEBACK)

    def _finish(
        self,
        configuration: Configuration,
        ending: Ending,
        started: float,
        seen: WatchedMemory,
        events: list[Event],
        last: Last,
    ) -> None:
        """Adds the attempt, with what its events tell, and marks what happened."""
        number, guarded = len(self._attempts) + 1, "guard" in last
        resumed_from = str(last["resume"].get("path", "")) if "resume" in last else self._checkpoint if guarded else ""
        for event in events[-_MAX_MARKS:]:
            if event["event"] in _MARKS:
                (kind, text), step, moment = _MARKS[event["event"]], _step(event), event.get("time")
                at = "" if step is None else f" in step {step}"
                seconds = moment - self._clock_origin if isinstance(moment, int | float) else None
                self._mark(kind, text.format(at=at, text=event.get("text", "")), seconds)
        saved = last.get("checkpoint", {})
        if saved.get("path"):
            update = _step(saved)
            self._checkpoint = str(saved["path"]) + ("" if update is None else f", update {update}")
        kind = "killed" if ending.cause in (Cause.KILLED, Cause.WORKER_KILLED) else "out of memory"
        self._mark(kind if ending.cause.is_memory else "end", f"attempt {number}: {ending.text}")
        self._attempts.append(
            Attempt(
                number=number,
                configuration=configuration,
                ending=ending,
                started=started,
                seconds=round(self._seconds() - started, 3),
                peak=seen.peak,
                steps=max((step for event in events if (step := _step(event)) is not None), default=None),
                resumed_from=resumed_from,
                guarded=guarded,
                swapped_bytes=seen.swapped_bytes,
            )
        )
        budget, held = self._host_budget(), 0 if seen.peak is None else seen.peak.held_bytes or 0
        if budget is not None and held > budget + limits.margin(budget) and not ending.cause.is_memory:
            self._note(
                f"a process of the script held {format_size(held)}, more than its budget of {format_size(budget)}: "
                "memory that can be shared with other processes has no limit here"
            )

    def _next(self, events: list[Event], last: Last, traceback: Path) -> Configuration | None:
        """What the next attempt is told; says why and what, or why not."""
        attempt = self._attempts[-1]
        sizes = [event["micro_batch_size"] for event in events if isinstance(event.get("micro_batch_size"), int)]
        used = sizes[-1] if attempt.guarded and sizes else None
        most = attempt.configuration.micro_batch_size
        if most is not None and used is not None and used > most:
            self._notes.append(f"attempt {attempt.number} was to use micro-batches of at most {most} but used {used}")
        following = next_configuration(
            [a.configuration for a in self._attempts],
            used,
            rescues="keras" not in last or "torch" in last,
            plans=attempt.guarded and "keras" in last and self._planned_bytes() is not None,
            reserved=attempt.ending.cause is Cause.RESERVED,
        )
        reason = self._reason_to_give_up(attempt, last, following)
        if reason and self._may_only_reserve(attempt, last):
            following, reason = replace(self._attempts[0].configuration, reserves=True), ""
        what = "" if attempt.ending.cause is Cause.RESERVED else "memory ran out in "
        self._announce(f"{what}attempt {attempt.number}: {attempt.ending.text}")
        if reason:
            self._keep_traceback(traceback)
            self._notes.append(reason)
            self._announce(f"giving up: {reason}")
            return None
        start = "from its beginning, unless it resumes by itself"
        if attempt.guarded:
            start = f"from the checkpoint {self._checkpoint}" if self._checkpoint else "without a checkpoint"
        number = f"attempt {attempt.number + 1} of {self._retries + 1}"
        self._announce(f"starting it again {start}, with {following} ({number})")
        return following

    def _may_only_reserve(self, attempt: Attempt, last: Last) -> bool:
        """Whether what was refused may be a request for much that is never used, and nobody has tried to grant it."""
        error, most = last.get("error", {}), self._ceiling.data_bytes
        used = error.get("used_bytes")
        return (
            attempt.ending.cause is Cause.EXCEPTION
            and error.get("may_stay_unused") is True
            and "cannot fit" not in last
            and attempt.number <= self._retries
            and not any(earlier.configuration.reserves for earlier in self._attempts)
            and error.get("data_limit_bytes") is not None
            and most is not None
            and isinstance(used, int)
            and used < limits.LIMITED_SHARE * most
        )

    def _reason_to_give_up(self, attempt: Attempt, last: Last, following: Configuration | None) -> str:
        ending = attempt.ending
        whose, limit = self._ceiling.limit_of, format_size(self._ceiling.limit_bytes)
        no_more = ""
        if attempt.number > self._retries:
            no_more = f"it has been started {attempt.number} times, and --retries is {self._retries}"
        if ending.cause is Cause.RESERVED:
            return no_more
        if ending.importing:
            words = "budget" if whose == "budget" else f"limit of the {whose}"
            return f"the {words}, {limit}, is less than what importing {ending.importing} takes; give it more"
        if ending.cause is Cause.SHARED_MEMORY:
            return (
                "shared memory (/dev/shm) is too small for the processes of the script's data loaders; give the "
                "container more of it (docker run --shm-size) or use fewer workers"
            )
        planned = last.get("cannot fit", {})
        if planned.get("planned"):
            return str(planned.get("text", "")) or "no plan fits"
        if not attempt.guarded and "keras" in last and "torch" not in last:
            return (
                "memory ran out outside of `fit`, or before its first step, where memfit can change nothing; "
                f"the script's data and model need more than {limit}. Data can stay on disk with memfit.stream"
            )
        if not attempt.guarded and "torch" not in last:
            return (
                "the script uses no guard that could use less memory, and had not imported PyTorch when memory ran "
                f"out, so that nothing that memfit can change from outside would help; it needs more than {limit}"
            )
        if following is None and not attempt.guarded:
            return (
                "the script uses no guard (memfit.Guard, or a trainer that memfit knows) that could make do with "
                "less, and all that memfit can do from outside has been tried; use a smaller batch, or memfit.Guard"
            )
        if following is None and "keras" in last:
            return "the smallest micro-batches and plans have been tried; the model itself needs more"
        if following is None:
            return "micro-batches of one sample and every rescue have been tried; the model itself needs more"
        return no_more

    def _keep_traceback(self, path: Path) -> None:
        """Puts the traceback of the last attempt where it stays until the script's next one, unless it was shown."""
        if self._request.verbose:
            return
        with contextlib.suppress(OSError):
            text = path.read_bytes()
            kept = Path(env.cache_folder(), "tracebacks", f"{Path(self._request.script).name}.txt")
            kept.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
                file.write(text)
            os.replace(file.name, kept)
            self._note(f"the script's traceback is in {kept}")

    def _note(self, text: str) -> None:
        self._notes.append(text)
        self._announce(text)

    def _host_budget(self) -> int | None:
        """The budget of the script's own process: on a machine with devices it is theirs."""
        return None if has_devices() else self._request.budget_bytes

    def _planned_bytes(self) -> int | None:
        """What a plan may use in all; None where that isn't known."""
        budget = self._request.budget_bytes
        return budget if budget is not None or has_devices() else self._ceiling.limit_bytes

    def _seconds(self) -> float:
        return time.monotonic() - self._origin

    def _mark(self, kind: str, text: str, seconds: float | None = None) -> None:
        self._marks.append(RunMark(round(self._seconds() if seconds is None else seconds, 3), kind, text))


def next_configuration(
    tried: Collection[Configuration],  # what all attempts so far were told, the latest last
    used: int | None,  # size of the micro-batches at the end of the latest, where a guard or an integration tells
    *,
    rescues: bool = True,  # whether the script's framework is one whose operations can be rescued
    plans: bool = False,  # whether its guard plans for the memory it is told of
    reserved: bool = False,  # whether the latest was refused address space while it had memory left
) -> Configuration | None:
    """What the next attempt is told; None when nothing is left."""
    latest = list(tried)[-1]
    if reserved:
        # It needs nothing smaller.
        return replace(latest, reserves=True)
    size = used if used is not None else latest.micro_batch_size
    # A size that nobody has used changes nothing, so that it would be the same attempt again.
    halved = used // 2 if used is not None and used > 1 else latest.micro_batch_size
    share = round(latest.share * _NEXT_SHARE, 2)
    candidates = []
    if plans and share >= _LEAST_SHARE:
        # What may not be split is planned for with recomputation.
        candidates.append(replace(latest, micro_batch_size=halved, share=share))
    elif halved != latest.micro_batch_size:
        candidates.append(replace(latest, micro_batch_size=halved))
    if rescues:
        rescued = replace(latest, micro_batch_size=None if size is None else 1, rescue=True)
        candidates += [rescued, replace(rescued, eager=True)]
    return next((candidate for candidate in candidates if candidate not in tried), None)


def _step(event: Event) -> int | None:
    """The update that an event tells of, counted from the beginning of training."""
    step = event.get("update", event.get("step"))
    return step if isinstance(step, int) else None


def _growth(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
