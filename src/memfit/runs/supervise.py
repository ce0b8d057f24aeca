"""Runs a script to its end: starts it, watches it, and starts it again with something smaller when memory runs out.

An attempt that ended for a reason of its own is the last one: its exit code is passed on. One that ended for lack of
memory is followed by another, from the last checkpoint, that is told something no attempt was told before; until the
script gets through or nothing is left to tell it.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memfit.core import env
from memfit.core.run_events import TRACEBACK, RunRequest, read_events
from memfit.core.supervised import (
    Attempt,
    Cause,
    Configuration,
    Ending,
    Mark,
    Outcome,
    SupervisedRun,
)
from memfit.core.units import format_size
from memfit.runs import child, kills, limits, processes
from memfit.runs.devices import has_devices
from memfit.runs.groups import Groups
from memfit.runs.history import History
from memfit.runs.kernel_log import KernelLog
from memfit.runs.restarts import next_configuration
from memfit.runs.watch import Watch, is_shared_memory_full

_OUTCOMES = {
    Cause.ENDED: Outcome.COMPLETED,
    Cause.FAILED: Outcome.FAILED,
    Cause.INTERRUPTED: Outcome.INTERRUPTED,
    Cause.SIGNALLED: Outcome.SIGNALLED,
}
EXIT_OUT_OF_MEMORY = 3
EXIT_INTERRUPTED = 130
_MAX_MARKS = 500


@dataclass(frozen=True, slots=True)
class Task:
    """What to run.

    Args:
        script: path of the file, or dotted name of the module.
        module: whether it is a module, as for `python -m`.
        arguments: of the script.
        budget_bytes: what it may take; None where all there is.
        checkpoint: folder for checkpoints; None where the script has its own, or none.
        retries: how often it may be started again.
        rescue: whether the first attempt is rescued already.
        stdout_to_stderr: whether its output goes to standard error.
        verbose: whether its tracebacks are shown where memory was the reason.
    """

    script: str
    module: bool = False
    arguments: tuple[str, ...] = ()
    budget_bytes: int | None = None
    checkpoint: str | None = None
    retries: int = 5
    rescue: bool = False
    stdout_to_stderr: bool = False
    verbose: bool = False


class Supervisor:
    """One supervised run.

    Args:
        task: what to run.
        announce: told, in a line, what happens between attempts.
        groups: the container.
    """

    def __init__(
        self, task: Task, announce: Callable[[str], None] = lambda text: None, groups: Groups | None = None
    ) -> None:
        self._task = task
        self._announce = announce
        self._groups = groups or Groups()
        self._history = History()
        self._origin, self._clock_origin = time.monotonic(), time.time()
        self._attempts: list[Attempt] = []
        self._marks: list[Mark] = []
        self._notes: list[str] = []
        self._ceiling = limits.Ceiling(None, None, "")
        self._checkpoint = ""

    def run(self) -> SupervisedRun:
        """Runs the script to its end, however many attempts that takes."""
        processes.adopt_orphans()
        try:
            with (
                tempfile.TemporaryDirectory(prefix="memfit-", ignore_cleanup_errors=True) as folder,
                child.passing_on_signals() as signals,
            ):
                configuration: Configuration | None = Configuration(rescue=self._task.rescue)
                while configuration is not None:
                    configuration = self._attempt(configuration, Path(folder), signals)
        finally:
            processes.adopt_orphans(False)
        return self._result()

    def _attempt(self, configuration: Configuration, folder: Path, signals: child.Signals) -> Configuration | None:
        """One attempt; what the next one is to be told, None where this was the last."""
        number = len(self._attempts) + 1
        place = folder / f"attempt-{number}"
        place.mkdir()
        self._ceiling = limits.ceiling(self._groups.room(), self._host_budget())
        request = self._request(number, configuration)
        started = self._seconds()
        self._mark("start" if number == 1 else "restart", f"attempt {number}: {configuration}")
        counted, counted_around = self._groups.num_kills(), self._groups.num_kills_around()
        log = KernelLog()
        try:
            with child.started(request, place, stdout_to_stderr=self._task.stdout_to_stderr) as running:
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
            events = read_events(place)
            if status < 0:
                # The kernel writes its log after it has sent the signal.
                time.sleep(0.05)
            evidence = kills.Evidence(
                status=status,
                pid=running.pid,
                seconds=self._seconds(),
                seen=replace(seen, shared_memory_full=seen.shared_memory_full or is_shared_memory_full()),
                ceiling=self._ceiling,
                error=_last(events, "error"),
                cannot_fit=str((_last(events, "cannot fit") or {}).get("text", "")),
                kills=_growth(counted, self._groups.num_kills()),
                kills_around=_growth(counted_around, self._groups.num_kills_around()),
                logged=log.kills() if log.is_readable else None,
                passed_on=frozenset(signals.names),
                guarded_by=_crashing(events),
                reserves=configuration.reserves,
            )
        finally:
            log.close()
        ending = kills.explain(evidence)
        attempt = self._finished(number, configuration, ending, started, seen.peak, events)
        self._attempts.append(replace(attempt, swapped_bytes=seen.swapped_bytes))
        self._note_excess()
        if not ending.cause.is_memory or signals.ask_to_end:
            return None
        return self._next(events, place / TRACEBACK)

    def _note_excess(self) -> None:
        """Says that the last attempt went beyond its budget by what the system has no limit for."""
        budget, peak = self._host_budget(), self._attempts[-1].peak
        held = 0 if peak is None else peak.held_bytes or 0
        if budget is None or held <= budget + limits.margin(budget) or self._attempts[-1].ending.cause.is_memory:
            return
        self._notes.append(
            f"a process of the script held {format_size(held)}, more than its budget of {format_size(budget)}: memory "
            "that can be shared with other processes has no limit here"
        )
        self._announce(self._notes[-1])

    def _keep_traceback(self, path: Path) -> None:
        """Puts the traceback of the last attempt where it stays until the script's next one, unless it was shown."""
        if self._task.verbose:
            return
        with contextlib.suppress(OSError):
            text = path.read_bytes()
            kept = Path(env.cache_folder(), "tracebacks", f"{Path(self._task.script).name}.txt")
            kept.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
                file.write(text)
            os.replace(file.name, kept)
            self._notes.append(f"the script's traceback is in {kept}")
            self._announce(self._notes[-1])

    def _request(self, number: int, configuration: Configuration) -> RunRequest:
        task = self._task
        return RunRequest(
            attempt=number,
            checkpoint=task.checkpoint,
            micro_batch_size=configuration.micro_batch_size,
            budget_bytes=self._task.budget_bytes if configuration.share >= 1 else self._planned_bytes(),
            share=configuration.share,
            rescue=configuration.rescue,
            eager=configuration.eager,
            script=task.script,
            module=task.module,
            arguments=task.arguments,
            verbose=task.verbose,
            data_limit_bytes=None if configuration.reserves else self._ceiling.data_bytes,
        )

    def _finished(
        self,
        number: int,
        configuration: Configuration,
        ending: Ending,
        started: float,
        peak: Any,
        events: list[dict[str, Any]],
    ) -> Attempt:
        """The attempt, with what its events tell; they are marked."""
        resumed = _last(events, "resume")
        guarded = _last(events, "guard") is not None
        resumed_from = str(resumed.get("path", "")) if resumed else self._checkpoint if guarded else ""
        for event in events[-_MAX_MARKS:]:
            self._mark_event(event)
        saved = _last(events, "checkpoint")
        if saved is not None and saved.get("path"):
            update = _step(saved)
            self._checkpoint = str(saved["path"]) + ("" if update is None else f", update {update}")
        kind = "killed" if ending.cause in (Cause.KILLED, Cause.WORKER_KILLED) else "out of memory"
        self._mark(kind if ending.cause.is_memory else "end", f"attempt {number}: {ending.text}")
        steps = [step for event in events if (step := _step(event)) is not None]
        return Attempt(
            number=number,
            configuration=configuration,
            ending=ending,
            started=started,
            seconds=round(self._seconds() - started, 3),
            peak=peak,
            steps=max(steps, default=None),
            resumed_from=resumed_from,
            guarded=guarded,
        )

    def _next(self, events: list[dict[str, Any]], traceback: Path) -> Configuration | None:
        """What the next attempt is told; says why and what, or why not."""
        attempt = self._attempts[-1]
        sizes = [event["micro_batch_size"] for event in events if isinstance(event.get("micro_batch_size"), int)]
        used = sizes[-1] if attempt.guarded and sizes else None
        told = attempt.configuration.micro_batch_size
        if told is not None and used is not None and used > told:
            self._notes.append(f"attempt {attempt.number} was to use micro-batches of at most {told} but used {used}")
        following = next_configuration(
            [a.configuration for a in self._attempts],
            used,
            rescues=_last(events, "keras") is None or _last(events, "torch") is not None,
            plans=attempt.guarded and _last(events, "keras") is not None and self._planned_bytes() is not None,
            reserved=attempt.ending.cause is Cause.RESERVED,
        )
        reason = self._reason_to_give_up(attempt, events, following)
        if reason and self._may_only_reserve(attempt, events):
            following, reason = replace(self._attempts[0].configuration, reserves=True), ""
        what = "" if attempt.ending.cause is Cause.RESERVED else "memory ran out in "
        self._announce(f"{what}attempt {attempt.number}: {attempt.ending.text}")
        if reason:
            self._keep_traceback(traceback)
            self._notes.append(reason)
            self._announce(f"giving up: {reason}")
            return None
        if attempt.guarded:
            whence = f"from the checkpoint {self._checkpoint}" if self._checkpoint else "without a checkpoint"
        else:
            whence = "from its beginning, unless it resumes by itself"
        total = self._task.retries + 1
        self._announce(f"starting it again {whence}, with {following} (attempt {attempt.number + 1} of {total})")
        return following

    def _may_only_reserve(self, attempt: Attempt, events: list[dict[str, Any]]) -> bool:
        """Whether what was refused may be a request for much that is never used, and nobody has tried to grant it."""
        error, most = _last(events, "error") or {}, self._ceiling.data_bytes
        used = error.get("used_bytes")
        return (
            attempt.ending.cause is Cause.EXCEPTION
            and error.get("may_stay_unused") is True
            and _last(events, "cannot fit") is None
            and attempt.number <= self._task.retries
            and not any(earlier.configuration.reserves for earlier in self._attempts)
            and error.get("data_limit_bytes") is not None
            and most is not None
            and isinstance(used, int)
            and used < limits.LIMITED_SHARE * most
        )

    def _reason_to_give_up(
        self, attempt: Attempt, events: list[dict[str, Any]], following: Configuration | None
    ) -> str:
        ending = attempt.ending
        whose, limit = self._ceiling.limit_of, format_size(self._ceiling.limit_bytes)
        no_more = attempt.number > self._task.retries
        started = f"it has been started {attempt.number} times, and --retries is {self._task.retries}"
        if ending.cause is Cause.RESERVED:
            return started if no_more else ""
        if ending.importing:
            words = "budget" if whose == "budget" else f"limit of the {whose}"
            return f"the {words}, {limit}, is less than what importing {ending.importing} takes; give it more"
        if ending.cause is Cause.SHARED_MEMORY:
            return (
                "shared memory (/dev/shm) is too small for the processes of the script's data loaders; give the "
                "container more of it (docker run --shm-size) or use fewer workers"
            )
        planned = _last(events, "cannot fit")
        if planned is not None and planned.get("planned"):
            return str(planned.get("text", "")) or "no plan fits"
        if not attempt.guarded and _last(events, "keras") is not None and _last(events, "torch") is None:
            return (
                "memory ran out outside of `fit`, or before its first step, where memfit can change nothing; "
                f"the script's data and model need more than {limit}. Data can stay on disk with memfit.stream"
            )
        if not attempt.guarded and _last(events, "torch") is None:
            return (
                "the script uses no guard that could make do with less, and had not imported PyTorch when memory ran "
                f"out, so that nothing that memfit can change from outside would help; it needs more than {limit}"
            )
        if following is None and not attempt.guarded:
            return (
                "the script uses no guard (memfit.Guard, or a trainer that memfit knows) that could make do with "
                "less, and all that memfit can do from outside has been tried; use a smaller batch, or memfit.Guard"
            )
        if following is None and _last(events, "keras") is not None:
            return "the smallest micro-batches and plans have been tried; the model itself needs more"
        if following is None:
            return "micro-batches of one sample and every rescue have been tried; the model itself needs more"
        return started if no_more else ""

    def _result(self) -> SupervisedRun:
        ending = self._attempts[-1].ending
        outcome = _OUTCOMES.get(ending.cause, Outcome.OUT_OF_MEMORY)
        return SupervisedRun(
            script=self._task.script,
            arguments=self._task.arguments,
            attempts=tuple(self._attempts),
            outcome=outcome,
            exit_code=_exit_code(outcome, ending),
            history=self._history.samples,
            marks=tuple(self._marks[:_MAX_MARKS]),
            budget_bytes=self._task.budget_bytes,
            limit_bytes=self._ceiling.limit_bytes,
            limit_of=self._ceiling.limit_of,
            seconds=round(self._seconds(), 3),
            notes=tuple(self._notes),
        )

    def _host_budget(self) -> int | None:
        """The budget of the script's own process: on a machine with devices it is theirs."""
        return None if has_devices() else self._task.budget_bytes

    def _planned_bytes(self) -> int | None:
        """What a plan may use in all; None where that isn't known."""
        if self._task.budget_bytes is not None or has_devices():
            return self._task.budget_bytes
        return self._ceiling.limit_bytes

    def _seconds(self) -> float:
        return time.monotonic() - self._origin

    def _mark(self, kind: str, text: str, seconds: float | None = None) -> None:
        self._marks.append(Mark(round(self._seconds() if seconds is None else seconds, 3), kind, text))

    def _mark_event(self, event: dict[str, Any]) -> None:
        name, step = event["event"], _step(event)
        at = "" if step is None else f" in step {step}"
        texts = {
            "oom": ("out of memory", f"an allocation failed{at}, and a guard took the step back"),
            "settings": ("settings", str(event.get("text", ""))),
            "checkpoint": ("checkpoint", f"checkpoint written{at}"),
            "resume": ("checkpoint", f"resumed from a checkpoint{at}"),
        }
        if name in texts:
            kind, text = texts[name]
            moment = event.get("time")
            seconds = moment - self._clock_origin if isinstance(moment, int | float) else None
            self._mark(kind, text, seconds)


def _last(events: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((event for event in reversed(events) if event["event"] == name), None)


def _crashing(events: list[dict[str, Any]]) -> str:
    """The framework of a guard that has begun, where that framework crashes for lack of memory; else ""."""
    keras, guard = _last(events, "keras"), _last(events, "guard")
    uses_tensorflow = keras is not None and guard is not None and keras.get("backend") == "tensorflow"
    return "TensorFlow" if uses_tensorflow else ""


def _step(event: dict[str, Any]) -> int | None:
    """The update that an event tells of, counted from the beginning of training."""
    found = event.get("update", event.get("step"))
    return found if isinstance(found, int) else None


def _growth(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _exit_code(outcome: Outcome, ending: Ending) -> int:
    if outcome is Outcome.OUT_OF_MEMORY:
        return EXIT_OUT_OF_MEMORY
    if outcome is Outcome.INTERRUPTED:
        return EXIT_INTERRUPTED
    if outcome is Outcome.SIGNALLED:
        return 128 + processes.number_of(ending.signal)
    return ending.exit_code or 0
