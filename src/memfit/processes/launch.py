"""The process in which a script runs on a simulated device.

A script may do anything to its process: end it, kill it, run out of host memory. So it gets one of its own, which is
handed a request in a file and leaves its result in another. Its output goes where ours goes, as it comes. However it
ends, the parent has an answer: what the child wrote, or a crash with the signal's name. Processes of the script, which
share the device, leave results of their own.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.allocator.shared import ProcessShare, read_shares
from memfit.core import interrupts as _interrupts
from memfit.core.dryrun import DryRun, Outcome, Request
from memfit.core.errors import BadFile
from memfit.core.estimate import Estimate, Note
from memfit.core.progress import announce, doing
from memfit.core.redirected_files import remove_made
from memfit.core.units import format_size
from memfit.core.worker_ends import name_of_signal
from memfit.processes import process_tree as processes
from memfit.processes.folders import temporary_folder
from memfit.processes.overlay import collect

DEVICE = "device"  # name of the file beside the request that tells what each process holds
FAILED = "process-failed"
_RESULT = "result.json"
# Of a terminal that goes away, too; a program that ignores it, as with nohup, goes on.
_TERMINATING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]

# Seconds after which a run without a step says what it is doing; the last again and again.
_MOMENTS = (10.0, 30.0, 60.0)
# Of a script whose first step is estimated, and of which nothing is seen before.
_UNTIL_FIT = "the script runs, no training step yet,"

# How long a script that is told to end may take to do so.
_GRACE_SECONDS = 10.0

# By name, because not every system has all of them.
_REASONS = {
    "SIGKILL": "probably because this machine ran out of memory: the script's host tensors are real",
    "SIGSEGV": "probably by a compiled extension, whose kernels can't be simulated",
    "SIGABRT": "probably by a compiled extension, whose kernels can't be simulated",
    "SIGBUS": "probably because shared memory (/dev/shm) is full",
}


class Interrupted(KeyboardInterrupt):
    """The user interrupted a run that had something to tell."""

    def __init__(self, run: DryRun) -> None:
        super().__init__()
        self.run = run


class _Terminated(BaseException):
    """We were asked to end, by the signal that is its argument."""


def run_child(
    request: Request,  # what to run; its `result_path` is filled in here
    *,
    stdout_to_stderr: bool = False,  # what the script prints goes there, to keep standard output for the answer
    silent: bool = False,  # what the script prints goes nowhere, and it has nothing to read
    command: Sequence[str] | None = None,  # what to start instead of `DRYRUN`
    timeout_seconds: float | None = None,  # how long it may take; it is then ended, and has crashed
) -> dict[str, Any]:
    """What the child found out, as the JSON of a `DryRun`, with anything it added.

    Raises:
        Interrupted: the user interrupted the run, and the child left a result before it ended.
    """
    with _passing_on_termination(), ExitStack() as stack:
        # One for all, and one in memory for layers that the first can't take.
        folder = stack.enter_context(temporary_folder())
        folders = [folder]
        with suppress(OSError):
            folders.append(stack.enter_context(temporary_folder("/dev/shm")))
        request_path = Path(folder, "request.json")
        # One run's files are enough; those of a further one would be the same.
        kept = "" if silent else request.checkpoint_folder
        asked = replace(
            request, result_path=os.path.join(folder, _RESULT), layers=tuple(folders), checkpoint_folder=kept
        )
        request_path.write_text(json.dumps(asked.to_json()), encoding="utf-8")
        try:
            words = [*(command or processes.DRYRUN), str(request_path)]
            # What the script prints is progress enough.
            with doing("running the script") if silent else nullcontext():
                return_code = _run(
                    words, stdout_to_stderr, silent, timeout_seconds, is_ours="-m" in words, until_fit=request.until_fit
                )
        except subprocess.TimeoutExpired:
            return _crash(request, -getattr(signal, "SIGALRM", signal.SIGTERM), folder).to_json()
        except KeyboardInterrupt:
            known = _read(folders)
            if known is None:
                raise
            known = _with_files(known, folder, kept)
            raise Interrupted(replace(DryRun.from_json(known), outcome=Outcome.INTERRUPTED, error="")) from None
        data = _read(folders) or _crash(request, return_code, folder).to_json()
        return _with_files(with_other_processes(data, Path(folder)), folder, kept)


def _with_files(data: dict[str, Any], folder: str, kept: str) -> dict[str, Any]:
    """The result with where the script's files are by now: "" for those that were not to be kept."""
    files = collect(Path(folder), kept)
    remove_made(folder)
    return {**data, "redirected": files}


def _read(folders: Sequence[str]) -> dict[str, Any] | None:
    """The result that the child has left in the first folder, or in another where that one's disk was full."""
    for folder in folders:
        with suppress(OSError, ValueError, BadFile):
            data = json.loads(Path(folder, _RESULT).read_text(encoding="utf-8"))
            DryRun.from_json(data)
            return dict(data)
    return None


def _run(
    command: list[str],
    stdout_to_stderr: bool,
    silent: bool,
    timeout_seconds: float | None = None,
    *,
    is_ours: bool,
    until_fit: bool = False,
) -> int:
    """Return code of the command; negative for a signal."""
    # What we have printed so far comes before what the script prints.
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere = subprocess.DEVNULL
    # A script in a group of its own could not read from the terminal; in ours, Ctrl-C reaches it without our help.
    shares_terminal = not silent and processes.is_terminal(0)
    with _interrupts.waiting() if is_ours else nullcontext():
        started = subprocess.Popen(
            command,
            stdin=nowhere if silent else None,
            stdout=nowhere if silent else 2 if stdout_to_stderr else None,
            stderr=nowhere if silent else None,
            # Hashes order sets, and sets may order allocations: the same script is to stop at the same place each time.
            env={"PYTHONHASHSEED": "0", **os.environ},
            process_group=None if shares_terminal or not hasattr(os, "killpg") else 0,
        )
    with started as process:
        try:
            if silent:
                return process.wait(timeout_seconds)
            return _wait(process, Path(command[-1]).parent / DEVICE, until_fit=until_fit)
        except BaseException as error:
            _stop(process, error, shares_terminal)
            raise


def _wait(process: subprocess.Popen[bytes], device: Path, *, until_fit: bool) -> int:
    """Waits for the process, and says from time to time how far it is, as long as there is no step."""
    started = time.monotonic()
    for moment in itertools.chain(_MOMENTS, itertools.count(2 * _MOMENTS[-1], _MOMENTS[-1])):
        try:
            return process.wait(max(0.0, started + moment - time.monotonic()))
        except subprocess.TimeoutExpired:
            text = _UNTIL_FIT if until_fit else progress(*read_shares(str(device)))
            if text:
                announce(f"{text} after {moment:.0f} s")
    raise AssertionError("time has ended")


def progress(peak_bytes: int, shares: list[ProcessShare]) -> str:
    """What a run that has taken no step yet is doing; "" for one that has."""
    if not shares:
        return "still importing PyTorch"
    if any(share.num_steps for share in shares):
        return ""
    held = f"peak so far {format_size(peak_bytes)}" if peak_bytes else "nothing on the device yet"
    return f"the script runs, no optimizer step yet, {held},"


def _stop(process: subprocess.Popen[bytes], error: BaseException, shares_terminal: bool) -> None:
    """Tells the script to end, and ends it and all it started when it doesn't."""
    number = signal.SIGTERM if isinstance(error, _Terminated) else signal.SIGINT
    try:
        if not (shares_terminal and number == signal.SIGINT):
            processes.send_to(process.pid, number, group=not shares_terminal)
        process.wait(_GRACE_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt, _Terminated):
        # Not in time, or asked for a second time.
        pass
    finally:
        # Also what has left the group, or is in ours.
        processes.kill_all([process.pid])
        if not shares_terminal:
            processes.send_to(process.pid, processes.KILL, group=True)
        process.wait()


@contextmanager
def _passing_on_termination() -> Iterator[None]:
    """SIGTERM and SIGHUP end the script and clear up before they end us."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise _Terminated(number)

    numbers = [number for number in _TERMINATING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in numbers}
    terminated: _Terminated | None = None
    try:
        yield
    except _Terminated as error:
        terminated = error
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if terminated is not None:
        os.kill(os.getpid(), terminated.args[0])
        # Only a handler of the caller's own lets us get here.
        raise KeyboardInterrupt


def _crash(request: Request, return_code: int, folder: str) -> DryRun:
    """A run that left no result: why, as far as its return code tells, and what its device has seen until then."""
    error = f"the process ended with exit code {return_code} and left no result; what it printed last may say why"
    if return_code < 0:
        name = name_of_signal(-return_code)
        error = f"the process was ended by {name}" + (f", {_REASONS[name]}" if name in _REASONS else "")
    peak_bytes, shares = read_shares(os.path.join(folder, DEVICE))
    num_steps = max((share.num_steps for share in shares), default=0)
    if peak_bytes:
        error += f"; until then it took {num_steps} steps and held {format_size(peak_bytes)} at most (simulated)"
    return DryRun(
        script=request.script,
        arguments=request.arguments,
        estimate=None,
        outcome=Outcome.CRASHED,
        num_steps=num_steps,
        steps_wanted=request.steps,
        num_devices=request.count,
        error=error,
        exit_code=return_code if return_code >= 0 else None,
    )


def with_other_processes(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The result of the script's first process with what others did, which left their results in `folder`."""
    peak_bytes, shares = read_shares(str(folder / DEVICE))
    others = []
    for path in sorted(folder.glob("process-*.json")):
        # One that was killed while it wrote left no whole result; what it held is known all the same.
        with suppress(OSError, ValueError, BadFile):
            others.append(DryRun.from_json(json.loads(path.read_text(encoding="utf-8"))))
    if not others and not any(share.peak_bytes for share in shares[1:]):
        # Most runs: reading all of a result takes a while.
        return data
    run = DryRun.from_json(data)
    largest = max([run, *others], key=lambda each: 0 if each.estimate is None else each.estimate.peak_bytes)
    fatal = next((other for other in others if other.outcome is Outcome.OUT_OF_MEMORY), None)
    if fatal is not None and (run.outcome is not Outcome.COMPLETED or not run.num_steps):
        # Whatever became of the others, the one that died is the one to look at.
        largest = run = replace(fatal, script=run.script, arguments=run.arguments)
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
        allocator=largest.allocator,
        seen=largest.seen if run.seen is not None else None,
        processes=_named(shares),
    )
    return {**data, **together.to_json()}


def _outcome(run: DryRun, others: list[DryRun], failed: list[DryRun]) -> tuple[Outcome, str, str]:
    """(how it ended, the error, why the simulation may be its reason)."""
    if run.outcome not in (Outcome.ENDED, Outcome.NO_STEP):
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
        certain_bytes=estimate.certain_bytes + other_bytes,
        tight_bytes=estimate.tight_bytes + other_bytes,
        # Another process has put something there.
        notes=tuple(note for note in notes if note.code != "nothing-on-device"),
    )


def _named(shares: list[ProcessShare]) -> dict[str, int]:
    names: Counter[str] = Counter()
    held = {}
    for number, share in enumerate(shares):
        if not share.peak_bytes:
            continue
        name = share.name if number else "the script itself"
        names[name] += 1
        held[name if names[name] == 1 else f"{name} ({names[name]})"] = share.at_peak_bytes
    return held
