"""A limit on the script's data just below what the container gives.

The kernel kills a process that takes a page too many, and says nothing to it. Under RLIMIT_DATA the request that goes
too far is refused instead, which frameworks turn into an exception, and an exception can be answered. The limit
counts what a process has mapped, the container what processes have used; so a limit that keeps everybody safe is what
the container has left, beside what the process itself holds.

What a process has mapped for long without using it (stacks of threads, mostly) will hardly be used now, and is
counted as free: a script that fits into its container must not fail because we are careful.
"""

from collections import deque
from dataclasses import dataclass

from memfit.core.units import MIB
from memfit.runs.groups import Room
from memfit.runs.processes import Held

_MIN_MARGIN_BYTES = 32 * MIB
# Page tables and the kernel's own structures grow with what a process uses.
_MARGIN_SHARE = 0.02
# Memory that was mapped a moment ago is about to be used.
_NUM_SETTLED = 15
_LARGEST = 2**62
# Below that a change isn't worth telling the kernel.
_LEAST_CHANGE = 0.005


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What a script may have.

    Args:
        data_bytes: RLIMIT_DATA of its process; None without a limit.
        limit_bytes: what it follows from: the limit of the container or machine, or the budget; None if unknown.
        limit_of: whose limit that is: "container", "machine", "budget", or "".
    """

    data_bytes: int | None
    limit_bytes: int | None
    limit_of: str


def margin(limit_bytes: int) -> int:
    """What is left free below a limit."""
    return max(_MIN_MARGIN_BYTES, int(limit_bytes * _MARGIN_SHARE))


def ceiling(room: Room | None, budget_bytes: int | None) -> Ceiling:
    """What a script that is about to start may have.

    Args:
        room: what is free here; None where that isn't known.
        budget_bytes: what the user allows; None where all there is.
    """
    if room is None and budget_bytes is None:
        return Ceiling(None, None, "")
    allowed = None if room is None else max(0, room.free_bytes - margin(room.limit_bytes))
    if budget_bytes is not None and (room is None or allowed is None or budget_bytes <= allowed):
        return Ceiling(budget_bytes, budget_bytes, "budget")
    return Ceiling(allowed, None if room is None else room.limit_bytes, "" if room is None else room.limit_of)


def set_data_limit(limit_bytes: int, pid: int = 0) -> bool:
    """Limits the data of a process, our own by default; whether that was possible here.

    Only the soft limit is set: a process may raise it again. One that is lower already stays.
    """
    try:
        import resource
    except ImportError:
        return False
    try:
        if pid:
            hard = resource.prlimit(pid, resource.RLIMIT_DATA)[1]
            resource.prlimit(pid, resource.RLIMIT_DATA, (_within(limit_bytes, hard), hard))
        else:
            soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (_within(_within(limit_bytes, soft), hard), hard))
    except (AttributeError, OSError, ValueError):
        # Not on this system, or not ours to set.
        return False
    return True


def _within(limit_bytes: int, other: int) -> int:
    import resource

    return limit_bytes if other == resource.RLIM_INFINITY else min(limit_bytes, other)


def inherited_limit() -> int | None:
    """The limit on data that was set before us and that processes we start inherit; None without one."""
    try:
        import resource

        soft = resource.getrlimit(resource.RLIMIT_DATA)[0]
    except (ImportError, AttributeError, OSError):
        return None
    return None if soft == resource.RLIM_INFINITY else soft


def lift_data_limit() -> None:
    """Takes our own limit back: it has done its work, and telling what happened needs memory too."""
    try:
        import resource

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    except (ImportError, AttributeError, OSError, ValueError):
        return


class FollowingLimit:
    """Keeps a process's limit at what the container has left, as its other processes come, grow and go.

    Args:
        pid: of the process.
        start: what it was given at the start.
        budget_bytes: what the user allows, which is never exceeded.
    """

    def __init__(self, pid: int, start: Ceiling, budget_bytes: int | None) -> None:
        self._pid = pid
        self._bounds = [bound for bound in (budget_bytes, inherited_limit()) if bound is not None]
        self._unused: deque[int] = deque(maxlen=_NUM_SETTLED)
        self._works = start.data_bytes is not None
        self.data_bytes = start.data_bytes

    def follow(self, held: Held, room: Room | None) -> None:
        """Sets the limit anew where what is left has changed.

        Args:
            held: what the process holds now.
            room: what is free now.
        """
        if not self._works or room is None or self.data_bytes is None:
            return
        wanted = self.wanted(held, room)
        if abs(wanted - self.data_bytes) < _LEAST_CHANGE * self.data_bytes:
            return
        self._works = set_data_limit(wanted, self._pid)
        if self._works:
            self.data_bytes = wanted

    def wanted(self, held: Held, room: Room) -> int:
        """The limit that keeps the container from killing, for what is held and free now."""
        self._unused.append(max(0, held.data_bytes - held.anonymous_bytes))
        settled = min(self._unused) if len(self._unused) == _NUM_SETTLED else 0
        free = room.free_bytes - margin(room.limit_bytes)
        # Never below what it has: the next request of any size would fail, that of whoever handles the failure too.
        return min(max(held.data_bytes, held.anonymous_bytes + free + settled), *self._bounds, _LARGEST)
