"""Processes and those that they start: what they hold, how they are told something, and that none is left behind.

A process that dies by SIGKILL can't end its children, so it is the kernel that is asked to: a child can be sent a
signal when its parent dies, and processes whose parent is gone can be given to an ancestor that asked for them.
"""

import contextlib
import ctypes
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.core.own_memory import status_bytes

# Programs that memfit starts, by the words that start them. They lie above this package, which is told of them.
DRYRUN: tuple[str, ...] = ()  # runs a script on a simulated device; the path of a request is added
SUPERVISED: tuple[str, ...] = ()  # runs a supervised script; the path of a request and a descriptor are added

IS_LINUX = sys.platform.startswith("linux")
KILL: int = getattr(signal, "SIGKILL", signal.SIGTERM)

# From linux/prctl.h.
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of a process."""

    anonymous_bytes: int  # memory of its own
    data_bytes: int  # data that it has mapped, used or not, which is what RLIMIT_DATA limits
    shared_bytes: int = 0  # memory that it shares with others and that no file stands behind
    swapped_bytes: int = 0  # what of it is in swap

    @property
    def used_bytes(self) -> int:
        """Its own data that is in use, in memory or in swap."""
        return self.anonymous_bytes + self.swapped_bytes

    @property
    def held_bytes(self) -> int:
        """What it holds and the kernel can't take back."""
        return self.anonymous_bytes + self.shared_bytes


def is_terminal(descriptor: int) -> bool:
    """Whether a descriptor is open and a terminal's."""
    try:
        return os.isatty(descriptor)
    except OSError:
        return False


def send_to(pid: int, number: int, *, group: bool = False) -> None:
    """Sends a signal to a process, or to the group that it leads; one that is gone, or another user's, gets none."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group and hasattr(os, "killpg"):
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def die_with_parent(number: int) -> bool:
    """Has the kernel send us a signal when the thread that started us ends; whether it will."""
    return _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans(adopt: bool = True) -> bool:
    """Has the kernel give us the descendants whose own parent ends; whether it will."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def _prctl(option: int, value: int) -> bool:
    if not IS_LINUX:
        return False
    try:
        return int(ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False


def held_by(pid: int) -> MemoryUse | None:
    """What a process holds; None where it is gone or can't be looked at."""
    if not IS_LINUX:
        try:
            memory = psutil().Process(pid).memory_info()
        except psutil().Error:
            return None
        return MemoryUse(int(memory.rss), int(memory.vms))
    sizes = status_bytes(f"/proc/{pid}/status", b"RssAnon", b"VmData", b"RssShmem", b"VmSwap")
    # One that has ended and was not waited for yet has none of these lines.
    return None if sizes[0] is None or sizes[1] is None else MemoryUse(sizes[0], sizes[1], sizes[2] or 0, sizes[3] or 0)


def name_of(pid: int) -> str:
    """Name of a process's program; "" where it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def psutil() -> Any:
    """The library, which takes a moment to import."""
    return importlib.import_module("psutil")


def descendants(pid: int, *, recursive: bool = True) -> list[int]:
    """Every process that a process has started, directly or not, and that is still there."""
    if not IS_LINUX:
        try:
            return [child.pid for child in psutil().Process(pid).children(recursive=recursive)]
        except psutil().Error:
            return []
    # psutil would look at every process of the machine, which a watch can't do each second.
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="ascii")
                children += map(int, text.split())
    return [*children, *(each for child in children for each in descendants(child))] if recursive else children


def kill_all(pids: Iterable[int]) -> None:
    """Ends processes and what they have started, at once."""
    for pid in pids:
        for each in (pid, *descendants(pid)):
            send_to(each, KILL)


def end_descendants(pid: int, grace_seconds: float) -> None:
    """Ends what a process, perhaps our own, has started or was given: told to end, and killed after a while."""
    if _told(pid, signal.SIGTERM):
        deadline = time.monotonic() + grace_seconds
        while time.monotonic() < deadline and _told(pid, 0):
            time.sleep(_POLL_SECONDS)
    # One that is told to end may have started others, which now are ours.
    while _told(pid, KILL):
        time.sleep(_POLL_SECONDS)


def _told(pid: int, number: int) -> bool:
    """Sends a signal to all descendants that run; whether there are any."""
    if pid == os.getpid():
        for child in descendants(pid, recursive=False):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
    is_running = False
    for child in descendants(pid):
        with contextlib.suppress(psutil().Error):
            # One that only waits to be waited for has ended.
            if psutil().Process(child).status() not in (psutil().STATUS_ZOMBIE, psutil().STATUS_DEAD):
                is_running = True
                send_to(child, number)
    return is_running


def number_of(name: str) -> int:
    """The number of a signal that `name_of_signal` has named.

    >>> number_of("SIGKILL"), number_of("signal 250")
    (9, 250)
    """
    return int(getattr(signal, name)) if name.startswith("SIG") else int(name.split()[-1])
