"""Why an attempt ended: its own reasons, somebody's signal, or memory; and what is known of it then.

A process that the kernel kills says nothing. What tells are the container's counter of kills, the kernel's log, and
what each process held when it was seen last. Each may be missing, so each can decide by itself.
"""

import contextlib
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memfit.core.supervised import Cause, Ending, ProcessMemory
from memfit.core.units import format_size
from memfit.core.worker_ends import name_of_signal
from memfit.processes.limits import Ceiling, is_full, is_mostly_reserved
from memfit.processes.process_tree import MemoryUse
from memfit.processes.watch import WatchedMemory

# Native code that gets no memory may crash instead of saying so, and may have asked for much at once.
_CLOSE = 0.7
_ALMOST_NOTHING = 0.03
_NARROW = ("container", "budget")
# A library that got no address space may fail later, where it misses what it could not set up.
_AFTERWARDS_SECONDS = 30.0


_LOG = Path("/dev/kmsg")
_RECORD_BYTES = 8192
_MAX_RECORDS = 100_000
_KILLED = re.compile(
    r"(?:Memory cgroup out of memory|Out of memory)[^:]*: Killed process (?P<pid>\d+) "
    r"\((?P<name>.*)\),? (?:UID|total-vm).*?anon-rss:(?P<anonymous>\d+)kB(?:.*?shmem-rss:(?P<shared>\d+)kB)?"
)


class KernelLog:
    """The kernel's log from now on, as far as it may be read."""

    def __init__(self, path: Path = _LOG) -> None:
        self._descriptor: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._descriptor, 0, os.SEEK_END)

    def kills(self) -> list[ProcessMemory] | None:
        """The processes killed since this was asked last, by the machine's numbers; None where it can't be read."""
        if self._descriptor is None:
            return None
        lines: list[str] = []
        for _ in range(_MAX_RECORDS):
            try:
                record = os.read(self._descriptor, _RECORD_BYTES)
            except BrokenPipeError:
                # Records were overwritten before we came to read them; the next read goes on after them.
                continue
            except OSError:
                break
            if not record:
                break
            lines += record.decode("utf-8", errors="replace").splitlines()
        return [kill for line in lines if (kill := logged_kill(line)) is not None]

    def close(self) -> None:
        """Reads no more."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def logged_kill(line: str) -> ProcessMemory | None:
    """The process of whose kill a line of the log tells; None where it tells of something else.

    >>> line = "Memory cgroup out of memory: Killed process 12 (python) total-vm:90kB, anon-rss:4kB, file-rss:0kB"
    >>> logged_kill(line)
    ProcessMemory(pid=12, name='python', held_bytes=4096, seconds=0.0)
    """
    match = _KILLED.search(line)
    if match is None:
        return None
    return ProcessMemory(int(match["pid"]), match["name"], (int(match["anonymous"]) + int(match["shared"] or 0)) * 1024)


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known of an attempt that ended."""

    status: int  # its exit code; negative for a signal
    pid: int  # the script's own process
    seconds: float  # when, from the start of the run on
    seen: WatchedMemory
    ceiling: Ceiling
    error: dict[str, Any] | None = None  # the exception that ended it, as its process told
    cannot_fit: str = ""  # a guard's last word that nothing is left to try
    kills: int | None = None  # how often the kernel killed in our container meanwhile; None where it doesn't tell
    kills_around: int | None = None  # the same, with the containers around ours
    logged: list[ProcessMemory] | None = None  # the kills that the kernel's log tells of; None where it can't be read
    passed_on: frozenset[str] = field(default_factory=frozenset)  # names of the signals that were passed on to it
    guarded_by: str = ""  # the framework whose guard had begun and that crashes for lack of memory
    reserves: bool = False  # it could map what it liked, so that nothing can have been refused but memory


def explain(evidence: Evidence) -> Ending:
    """How and why the attempt ended."""
    if evidence.status == 0:
        return Ending(Cause.ENDED, "it ended by itself", 0)
    if evidence.seen.exceeded is not None:
        return _memory(
            evidence, Cause.KILLED, "memfit stopped it because it exceeded its budget", evidence.seen.exceeded
        )
    if evidence.status < 0:
        return _of_signal(evidence)
    error = evidence.error or {}
    if _was_refused_address_space(evidence, error):
        return _of_exception(evidence, error, was_reserved=True)
    if error.get("memory") and error.get("source") != "worker":
        return _of_exception(evidence, error, was_reserved=False)
    if evidence.cannot_fit and not error.get("memory"):
        return _memory(evidence, Cause.EXCEPTION, evidence.cannot_fit)
    if evidence.kills or error.get("memory"):
        return _of_worker(evidence)
    error_text = f": {error['type']}: {error['text']}".rstrip(": ") if error else ""
    return Ending(Cause.FAILED, f"it failed with exit code {evidence.status}{error_text}", evidence.status)


def _was_refused_address_space(evidence: Evidence, error: dict[str, Any]) -> bool:
    """True if the limit was reached by address space that was mapped and not used, while memory was left."""
    most = evidence.ceiling.data_bytes
    if evidence.reserves or most is None or evidence.cannot_fit or error.get("source") in ("worker", "shared memory"):
        return False
    limit, data, used = (error.get(name) for name in ("data_limit_bytes", "data_bytes", "used_bytes"))
    if limit is not None and data is not None and used is not None:
        held, requested = MemoryUse(used, data), error.get("requested_bytes")
        if error.get("memory") and requested:
            return bool(data + requested > limit and used + requested <= most)
        if error.get("memory"):
            imports_little = bool(error.get("importing")) and used < most / 2
            return imports_little or is_mostly_reserved(held, most)
        if is_full(data, limit) and is_mostly_reserved(held, most):
            return True
    refused = evidence.seen.refused_seconds
    return refused is not None and evidence.seconds - refused < _AFTERWARDS_SECONDS and not error.get("memory")


def _of_exception(evidence: Evidence, error: dict[str, Any], *, was_reserved: bool) -> Ending:
    requested, data, used = (error.get(name) for name in ("requested_bytes", "data_bytes", "used_bytes"))
    error_text = f"{error['type']}: {error['text']}".rstrip(": ") if error else f"exit code {evidence.status}"
    at = f" at {error['at']}" if error.get("at") else ""
    if was_reserved:
        sizes = f": of {format_size(data)} that it had mapped it used {format_size(used)}" if data and used else ""
        return _memory(evidence, Cause.RESERVED, f"it was refused address space, not memory{sizes} ({error_text}){at}")
    asked, error_text = (f" of {format_size(requested)}", error["type"]) if requested else ("", error_text)
    importing = str(error.get("importing") or "")
    where = f" while it imported {importing}" if importing else ""
    cause = Cause.SHARED_MEMORY if error.get("source") == "shared memory" else Cause.EXCEPTION
    return _memory(evidence, cause, f"an allocation{asked} failed{where} ({error_text}){at}", importing=importing)


def _of_worker(evidence: Evidence) -> Ending:
    """One of the script's processes was ended by a signal, and the script with it."""
    process = logged = _logged(evidence)
    if logged is None:
        others = [process for pid, process in (evidence.seen.by_pid or {}).items() if pid != evidence.pid]
        process = max(others, key=lambda process: process.held_bytes or 0, default=None)
    if not evidence.kills and logged is None and evidence.kills is not None:
        text = "one of its processes was ended by a signal, and the kernel reports no OOM kill"
        return Ending(Cause.FAILED, text, evidence.status)
    return _memory(evidence, Cause.WORKER_KILLED, f"the kernel killed {_named(process)}", process)


def _of_signal(evidence: Evidence) -> Ending:
    name = name_of_signal(-evidence.status)
    if name in evidence.passed_on:
        cause = Cause.INTERRUPTED if name == "SIGINT" else Cause.SIGNALLED
        return Ending(cause, f"it was ended by {name}", signal=name)
    if name == "SIGKILL":
        process = _logged(evidence)
        known = evidence.kills_around is not None or evidence.logged is not None
        if process is None and not evidence.kills_around and (known or not _is_exhausted(evidence)):
            text = "it was ended by SIGKILL, and the kernel reports no OOM kill"
            return Ending(Cause.SIGNALLED, text, signal=name)
        process = process or evidence.seen.last
        who = "the kernel killed it" if known else "it was killed, probably by the kernel"
        return _memory(evidence, Cause.KILLED, f"{who}: {_named(process)}", process)
    if name == "SIGBUS" and evidence.seen.shared_memory_full:
        return _memory(evidence, Cause.SHARED_MEMORY, "it was ended by SIGBUS with shared memory (/dev/shm) full")
    if name in ("SIGSEGV", "SIGABRT"):
        if _was_refused_address_space(evidence, {}):
            return _memory(evidence, Cause.RESERVED, f"it crashed with {name} when it was refused address space")
        limit = evidence.seen.data_limit_bytes
        if _is_exhausted(evidence) or (limit is not None and evidence.seen.data_bytes >= _CLOSE * limit):
            text = f"it crashed with {name} close to its limit, as native code does when an allocation fails"
            return _memory(evidence, Cause.CRASHED, text)
        if evidence.guarded_by and evidence.ceiling.limit_of in _NARROW:
            # It may have asked for much at once, long before its limit.
            text = f"it crashed with {name} in a step of {evidence.guarded_by}, as its kernels do when memory runs out"
            return _memory(evidence, Cause.CRASHED, text)
    cause = Cause.INTERRUPTED if name == "SIGINT" else Cause.SIGNALLED
    return Ending(cause, f"it was ended by {name}", signal=name)


def _memory(
    evidence: Evidence, cause: Cause, text: str, process: ProcessMemory | None = None, *, importing: str = ""
) -> Ending:
    """An ending by memory, with what it held and what it could have."""
    # What it held goes while an exception ends it.
    has_gone = cause is Cause.EXCEPTION or process is None
    process = process or (evidence.seen.peak if has_gone else evidence.seen.last)
    limit, whose = evidence.ceiling.limit_bytes, evidence.ceiling.limit_of
    if process is not None and process.held_bytes is not None:
        text += f"; it held {format_size(process.held_bytes)}" + (" at most" if has_gone else " when seen last")
    if limit is not None and cause is not Cause.SHARED_MEMORY:
        whose = whose if whose == "budget" else f"{whose}'s limit"
        text += f", the {whose} is {format_size(limit)}"
    code = evidence.status if evidence.status >= 0 else None
    signal = "" if code is not None else name_of_signal(-evidence.status)
    return Ending(cause, text, code, signal, process, limit, importing)


def _logged(evidence: Evidence) -> ProcessMemory | None:
    """The process of ours of whose kill the log tells.

    A container may number its processes differently from the machine. Then the log's numbers mean nothing here, and
    the counter of our own container has to say that one of its kills was ours.
    """
    kills = evidence.logged or []
    ours = {evidence.pid, *(evidence.seen.by_pid or {})}
    named = [kill for kill in kills if kill.pid in ours] or (kills if evidence.kills else [])
    return replace(named[-1], seconds=round(evidence.seconds, 3)) if named else None


def _named(process: ProcessMemory | None) -> str:
    if process is None:
        return "one of its processes"
    return f"process {process.pid}" + (f" ({process.name})" if process.name else "")


def _is_exhausted(evidence: Evidence) -> bool:
    """Whether hardly anything was left when somebody looked last."""
    free, limit = evidence.seen.least_free_bytes, evidence.ceiling.limit_bytes
    return free is not None and limit is not None and free <= _ALMOST_NOTHING * limit
