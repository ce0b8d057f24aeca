"""Watches the memory of a script, its processes and its container while it runs.

Five times a second, with reads that cost microseconds; the tree of processes is walked less often, and the script's
own process is looked at more often, so that its limit is right before the next large request. Kept are the history,
the process that held most, and what each process held last, which is what is known of one that the kernel has killed.
"""

import contextlib
import os
import threading
import time
from dataclasses import dataclass, replace

from memfit.core.supervised import ProcessMemory, Sample
from memfit.processes import process_tree as processes
from memfit.processes.cgroups import ControlGroups, Room
from memfit.processes.limits import FollowingLimit
from memfit.processes.process_tree import MemoryUse

_PERIOD_SECONDS = 0.2
# At first a script loads libraries, and may be gone before the first full period is.
_FIRST_PERIOD_SECONDS = 0.05
_LIMIT_PERIOD_SECONDS = 0.02
_TREE_EVERY = 5
# A script may start a process for every file it reads, for weeks.
_MAX_REMEMBERED = 1000
_MAX_SAMPLES = 2000


@dataclass(frozen=True, slots=True)
class WatchedMemory:
    """Peak memory and events of a watched process tree."""

    peak: ProcessMemory | None = None  # the process that held most, and when; None where nothing was seen
    last: ProcessMemory | None = None  # the script's own process when it was seen last; None where it never was
    by_pid: dict[int, ProcessMemory] | None = None  # every process of the script as it was seen last
    data_bytes: int = 0  # most data that the script's process had mapped
    data_limit_bytes: int | None = None  # its limit on that at the end; None without one
    least_free_bytes: int | None = None  # least that was free in container and machine; None where that isn't known
    shared_memory_full: bool = False  # whether /dev/shm was seen full
    swapped_bytes: int = 0  # most that was seen of the script in swap
    # when a process was last seen to have mapped all it may, much of it unused; None if never
    refused_seconds: float | None = None
    # the script's process when it had used more than it may and was stopped for it; None if it wasn't
    exceeded: ProcessMemory | None = None


class History(list[Sample]):
    """Memory over time in bounded space: where samples are too many, neighbours become one with the larger figures."""

    def __init__(self, max_samples: int = _MAX_SAMPLES) -> None:
        super().__init__()
        self._max = max_samples

    def add(self, sample: Sample) -> None:
        """Adds the next sample in time."""
        if len(self) >= self._max:
            self[:] = map(_larger, self[::2], self[1::2])
        self.append(sample)


def _larger(first: Sample, second: Sample) -> Sample:
    groups = [size for size in (first.group_bytes, second.group_bytes) if size is not None]
    return replace(
        first,
        script_bytes=max(first.script_bytes, second.script_bytes),
        others_bytes=max(first.others_bytes, second.others_bytes),
        group_bytes=max(groups, default=None),
    )


class Watch:
    """Watches one attempt, in a thread of its own, while the `with` block lasts."""

    def __init__(self, pid: int, groups: ControlGroups, limit: FollowingLimit, history: History, origin: float) -> None:
        self._pid, self._groups, self._limit, self._history, self._origin = pid, groups, limit, history, origin
        self._limits: dict[int, FollowingLimit] = {}
        self._room: Room | None = None
        self._used_bytes = self._num_samples = 0
        self._others: list[int] = []
        self._names: dict[int, str] = {}
        self._seen = WatchedMemory(by_pid={})
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memfit-watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._stopped.set()
        self._thread.join()

    @property
    def seen(self) -> WatchedMemory:
        """The figures so far."""
        return replace(self._seen, data_limit_bytes=self._limit.data_bytes)

    def _watch(self) -> None:
        due = 0.0
        while not self._stopped.wait(_LIMIT_PERIOD_SECONDS):
            # A process may end while we look at it: there is a next time.
            with contextlib.suppress(OSError, ValueError, IndexError):
                now = time.monotonic()
                if now >= due:
                    due = now + (_PERIOD_SECONDS if self._num_samples >= _TREE_EVERY else _FIRST_PERIOD_SECONDS)
                    self.sample()
                elif self._limit.is_urgent:
                    self._follow_quickly()

    def sample(self) -> None:
        """Looks once."""
        seconds = time.monotonic() - self._origin
        held = processes.held_by(self._pid)
        if held is None:
            return
        # After what is held: what it takes in between is missing from what is free, and not counted twice.
        self._room, self._used_bytes = self._groups.room(), held.used_bytes
        self._follow(self._pid, self._limit, held)
        if self._num_samples % _TREE_EVERY == 0:
            self._others = processes.descendants(self._pid)
        self._num_samples += 1
        seen, by_pid = self._seen, self._seen.by_pid or {}
        own, others = self._process(self._pid, held.held_bytes, seconds), []
        for pid in self._others:
            other = processes.held_by(pid)
            if other is not None:
                if pid not in self._limits:
                    self._limits[pid] = self._limit.of_child(pid)
                self._follow(pid, self._limits[pid], other)
                others.append(self._process(pid, other.held_bytes, seconds))
        by_pid |= {process.pid: process for process in (own, *others) if process.held_bytes}
        if len(by_pid) > _MAX_REMEMBERED:
            for pid in list(by_pid)[: _MAX_REMEMBERED // 2]:
                for known in (by_pid, self._names, self._limits):
                    known.pop(pid, None)
        free = (None if self._room is None else self._room.free_bytes, seen.least_free_bytes)
        self._seen = replace(
            self._seen,
            peak=max(filter(None, (self._seen.peak, own, *others)), key=lambda process: process.held_bytes or 0),
            last=own,
            by_pid=by_pid,
            data_bytes=max(seen.data_bytes, held.data_bytes),
            swapped_bytes=max(seen.swapped_bytes, held.swapped_bytes),
            least_free_bytes=min((size for size in free if size is not None), default=None),
            shared_memory_full=seen.shared_memory_full or is_shared_memory_full(),
        )
        others_bytes = sum(other.held_bytes or 0 for other in others)
        self._history.add(Sample(round(seconds, 3), held.held_bytes, others_bytes, self._groups.used_bytes()))

    def _follow_quickly(self) -> None:
        """Keeps the limit of the script's process between two samples: what it took since is not free any more."""
        held, room = processes.held_by(self._pid), self._room
        if held is None or room is None:
            return
        taken = held.used_bytes - self._used_bytes
        self._room, self._used_bytes = replace(room, free_bytes=room.free_bytes - taken), held.used_bytes
        self._follow(self._pid, self._limit, held)

    def _follow(self, pid: int, limit: FollowingLimit, held: MemoryUse) -> None:
        """Adjusts a process's limit, and stops the script if it uses more than its budget anyway."""
        seconds = time.monotonic() - self._origin
        if limit.refuses_reservations(held):
            self._seen = replace(self._seen, refused_seconds=seconds)
        limit.follow(held, self._room, seconds)
        if pid == self._pid and limit.is_exceeded_by(held, self._room) and self._seen.exceeded is None:
            process = self._process(pid, held.held_bytes, seconds)
            self._seen = replace(self._seen, exceeded=process, peak=process)
            processes.kill_all([pid])

    def _process(self, pid: int, held_bytes: int, seconds: float) -> ProcessMemory:
        if pid not in self._names:
            self._names[pid] = processes.name_of(pid)
        return ProcessMemory(pid, self._names[pid], held_bytes, round(seconds, 3))


def is_shared_memory_full(path: str = "/dev/shm") -> bool:
    """Whether hardly anything is left of the memory that processes share."""
    try:
        status = os.statvfs(path)
    except (OSError, AttributeError):
        return False
    return status.f_blocks > 0 and status.f_bavail < 0.02 * status.f_blocks
