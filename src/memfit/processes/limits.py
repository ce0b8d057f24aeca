"""A limit on the script's data just below what the container gives.

The kernel kills a process that takes a page too many, and says nothing to it. Under RLIMIT_DATA the request that goes
too far is refused instead, which frameworks turn into an exception, and an exception can be answered. The limit
counts what a process has mapped, the container what processes have used; so a limit that keeps everybody safe is what
the container has left, beside what the process itself holds.

What a process has mapped without using it (arenas of allocators, stacks of threads, buffers that are never filled) is
address space and no memory. Once it has stayed unused for a moment it isn't counted any more: a script that fits must
not fail because we are careful. Where that comes too late, the next attempt begins without a limit, and gets one when
it holds half of what it may (`reserves`). What was left out and is used all the same can go beyond a budget: then the
process is stopped (`is_exceeded_by`), as the kernel does at the container's limit.
"""

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from memfit.core import env
from memfit.core.own_memory import limits as own_limits
from memfit.core.units import MIB
from memfit.processes.cgroups import Room
from memfit.processes.process_tree import MemoryUse

_MIN_MARGIN_BYTES = 32 * MIB
# Page tables and the kernel's own structures grow with what a process uses.
_MARGIN_SHARE = 0.02
# Memory that was mapped a moment ago is about to be used: filling a GiB takes about a second. In a container, where
# the kernel kills whoever uses it after all, it is given longer.
_SETTLED_SECONDS, _LONG_SETTLED_SECONDS = 1.0, 3.0
# What every process has mapped ahead isn't worth a limit of its own, which guards would take for another machine.
_RESERVED_STEP_BYTES = 32 * MIB
LIMITED_SHARE = 0.5  # of what it may hold, what a process holds that gets a limit although it may reserve what it likes
# Full to this share, with as much of it unused: what is refused then is address space.
_FULL_SHARE, _MUCH_SHARE = 0.95, 0.1
_LARGEST = 2**62
# Below that a change isn't worth telling the kernel.
_LEAST_CHANGE = 0.005


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The memory limit of a script."""

    data_bytes: int | None  # RLIMIT_DATA of its process; None without a limit
    # what it follows from: the limit of the container or machine, or the budget; None if unknown
    limit_bytes: int | None
    limit_of: str  # whose limit that is: "container", "machine", "budget", or ""


def margin(limit_bytes: int) -> int:
    """Bytes that stay free below a limit."""
    return max(_MIN_MARGIN_BYTES, int(limit_bytes * _MARGIN_SHARE))


def ceiling(room: Room | None, budget_bytes: int | None) -> Ceiling:
    """What a script that is about to start may have."""
    allowed = None if room is None else max(0, room.free_bytes - margin(room.limit_bytes))
    if budget_bytes is not None and (allowed is None or budget_bytes <= allowed):
        return Ceiling(budget_bytes, budget_bytes, "budget")
    return Ceiling(None, None, "") if room is None else Ceiling(allowed, room.limit_bytes, room.limit_of)


def set_data_limit(limit_bytes: int | None, pid: int = 0) -> bool:
    """Limits the data of a process, our own by default, or lifts its limit (None); whether that was possible here.

    Only the soft limit is set: a process may raise it again. One of our own that is lower already stays.
    """
    try:
        import resource

        soft, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
        bounds = [limit_bytes, hard] if pid or limit_bytes is None else [limit_bytes, soft, hard]
        wanted = min((bound for bound in bounds if bound not in (None, resource.RLIM_INFINITY)), default=hard)
        resource.prlimit(pid, resource.RLIMIT_DATA, (wanted or 0, hard))
    except (ImportError, AttributeError, OSError, ValueError):
        # Not on this system, or not ours to set.
        return False
    return True


def _current_limit(pid: int) -> int | None:
    """The soft limit of a process now; None where it is gone or can't be asked."""
    try:
        import resource

        soft = resource.prlimit(pid, resource.RLIMIT_DATA)[0]
    except (ImportError, AttributeError, OSError):
        return None
    return _LARGEST if soft == resource.RLIM_INFINITY else soft


def has_devices(folder: Path = Path("/dev")) -> bool:
    """Whether this machine has devices of NVIDIA or AMD that a program may see: then a budget is theirs."""
    if env.visible_cuda_devices() in ("", "-1"):
        return False
    return any(any(folder.glob(pattern)) for pattern in ("nvidia[0-9]*", "kfd", "dxg"))


class FollowingLimit:
    """Keeps a process's limit at what it may still use, as others come, grow and go and as it reserves.

    The budget is never exceeded. A process that `reserves` gets its limit only when it holds much of what it may.
    """

    def __init__(self, pid: int, start: Ceiling, budget_bytes: int | None, *, reserves: bool = False) -> None:
        self._pid, self._start, self._budget_bytes, self._reserves = pid, start, budget_bytes, reserves
        self._inherited = own_limits()[0] or _LARGEST
        self._unused: deque[tuple[float, int]] = deque()
        is_budget = start.limit_of == "budget"
        self._settled_seconds = _SETTLED_SECONDS if is_budget else _LONG_SETTLED_SECONDS
        # Followed more often than memory is sampled, except in a container, where others decide on it too.
        self.is_urgent = is_budget or reserves
        self._works = start.data_bytes is not None
        self._was_set = False
        self._least_bytes = 0
        # What the process sets itself when it starts.
        self.data_bytes = None
        if start.data_bytes is not None:
            self.data_bytes = self._inherited if reserves else min(start.data_bytes, self._inherited)

    def of_child(self, pid: int) -> "FollowingLimit":
        """The limit of a process that this one has started, which has inherited what was set by then."""
        child = FollowingLimit(pid, self._start, self._budget_bytes, reserves=self._reserves)
        child.data_bytes = _current_limit(pid) if self._works else None
        child._works = child._was_set = child.data_bytes is not None
        # Its exceptions reach nobody who could answer them. So it isn't refused what the script's own process, growing
        # beside it, makes scarce; where that is memory indeed, the kernel says who was killed for it.
        child._least_bytes = child.data_bytes or 0
        return child

    def follow(self, held: MemoryUse, room: Room | None, seconds: float | None = None) -> None:
        """Sets the limit anew where what is left has changed."""
        if not self._works or self.data_bytes is None or (room is None and self._budget_bytes is None):
            return
        wanted = self.wanted(held, room, seconds)
        if abs(wanted - self.data_bytes) < _LEAST_CHANGE * self.data_bytes:
            return
        if _current_limit(self._pid) == self.data_bytes:
            self._was_set = self._works = set_data_limit(wanted, self._pid)
            self.data_bytes = wanted if self._works else self.data_bytes
        elif self._was_set:
            # It has lifted its limit, and needs the room to say what went wrong.
            self._works = False

    def wanted(self, held: MemoryUse, room: Room | None, seconds: float | None = None) -> int:
        """The limit that lets the process use what is left, for what is held and free now."""
        unused = max(0, held.data_bytes - held.used_bytes)
        reserved = self._settled(unused, time.monotonic() if seconds is None else seconds)
        free = _LARGEST if room is None else room.free_bytes - margin(room.limit_bytes)
        most = min(held.used_bytes + free, _LARGEST if self._budget_bytes is None else self._budget_bytes)
        if self._reserves:
            if held.used_bytes < LIMITED_SHARE * most:
                return self._inherited
            reserved = unused
        # Never below what it has: the next request of any size would fail, that of whoever handles the failure too.
        allowed = _LARGEST if self._budget_bytes is None else self._budget_bytes + reserved
        return max(min(max(held.data_bytes, most + reserved), allowed, self._inherited), self._least_bytes)

    def _settled(self, unused: int, now: float) -> int:
        """What has been mapped and unused all the time of late."""
        recent = self._unused
        recent.append((now, unused))
        while len(recent) > 1 and recent[1][0] <= now - self._settled_seconds:
            recent.popleft()
        if recent[0][0] > now - self._settled_seconds:
            return 0
        least = min(size for _, size in recent)
        # A container's limit varies anyway, and has no byte to spare.
        return least if self._budget_bytes is None else least - least % _RESERVED_STEP_BYTES

    def is_exceeded_by(self, held: MemoryUse, room: Room | None = None) -> bool:
        """Whether the process has used more than it may, which only what was left out of the limit makes possible."""
        budget, limit = self._budget_bytes, self.data_bytes
        if self._reserves and room is not None and room.free_bytes < margin(room.limit_bytes) // 2:
            return True
        if budget is None or limit is None or limit <= budget:
            return False
        return held.used_bytes > budget + margin(budget)

    def refuses_reservations(self, held: MemoryUse) -> bool:
        """Whether the process has mapped all it may, and much of that is unused."""
        limit = self.data_bytes
        return limit is not None and is_full(held.data_bytes, limit) and is_mostly_reserved(held, limit)


def is_full(data_bytes: int, limit_bytes: int) -> bool:
    """Whether the limit will refuse the next request, or the one after it."""
    return data_bytes >= _FULL_SHARE * limit_bytes


def is_mostly_reserved(held: MemoryUse, limit_bytes: int) -> bool:
    """Whether what a process has mapped and doesn't use is a part of its limit that it may be short of."""
    return held.data_bytes - held.used_bytes >= max(_RESERVED_STEP_BYTES, _MUCH_SHARE * limit_bytes)
