"""Processes and those that they start: what they hold, how they are told something, and that none is left behind.

Linux tells all of it in /proc. A process that dies by SIGKILL can't end its children, so it is the kernel that is
asked to: a child can be sent a signal when its parent dies, and processes whose parent is gone can be given to an
ancestor that asked for them. Elsewhere psutil tells what it can.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

IS_LINUX = sys.platform.startswith("linux")

# From linux/prctl.h.
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_SECONDS = 0.02
# Lines of /proc/PID/status.
_SIZES = {
    b"RssAnon": "anonymous_bytes",
    b"RssShmem": "shared_bytes",
    b"VmData": "data_bytes",
    b"VmSwap": "swapped_bytes",
}


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds.

    Args:
        anonymous_bytes: memory of its own.
        data_bytes: data that it has mapped, used or not, which is what RLIMIT_DATA limits.
        shared_bytes: memory that it shares with others and that no file stands behind.
        swapped_bytes: what of it is in swap.
    """

    anonymous_bytes: int
    data_bytes: int
    shared_bytes: int = 0
    swapped_bytes: int = 0

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


def send(process: subprocess.Popen[bytes], number: int, *, to_group: bool) -> None:
    """Sends a signal to a process, or to the whole group that it leads; one that is gone gets none."""
    with contextlib.suppress(ProcessLookupError):
        if to_group and hasattr(os, "killpg"):
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)


def send_to(pid: int, number: int) -> None:
    """Sends a signal to a process by its number; one that is gone, or another user's, gets none."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def send_to_group(group: int, number: int) -> None:
    """Sends a signal to a group of processes; one that is gone gets none."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


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


def held_by(pid: int) -> Held | None:
    """What a process holds; None where it is gone or can't be looked at."""
    if not IS_LINUX:
        return _held_elsewhere(pid)
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:
        return None
    sizes = {}
    for line in lines:
        name, _, value = line.partition(b":")
        if name in _SIZES:
            sizes[_SIZES[name]] = int(value.split()[0]) * 1024
    # One that has ended and was not waited for yet has none of these lines.
    return Held(**sizes) if "anonymous_bytes" in sizes and "data_bytes" in sizes else None


def _held_elsewhere(pid: int) -> Held | None:
    import psutil

    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.Error:
        return None
    return Held(int(memory.rss), int(memory.vms))


def name_of(pid: int) -> str:
    """Name of a process's program; "" where it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """Every process that a process has started, directly or not, and that is still there."""
    if not IS_LINUX:
        return _descendants_elsewhere(pid)
    found: list[int] = []
    waiting = [pid]
    while waiting:
        children = _children(waiting.pop())
        found += children
        waiting += children
    return found


def _children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return children
    for thread in threads:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="ascii")
            children += map(int, text.split())
    return children


def _descendants_elsewhere(pid: int) -> list[int]:
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def kill_all(pids: Iterable[int]) -> None:
    """Ends processes and what they have started, at once."""
    for pid in pids:
        for found in (pid, *descendants(pid)):
            send_to(found, getattr(signal, "SIGKILL", signal.SIGTERM))


def end_descendants(pid: int, grace_seconds: float, spared: frozenset[int] = frozenset()) -> None:
    """Ends what a process has started and what was given to it, at first with a word of warning.

    Args:
        pid: the process, which is our own where those that ended are to be waited for too.
        grace_seconds: how long they may take to end by themselves once they are told.
        spared: processes that are none of ours to end.
    """
    if _told(pid, signal.SIGTERM, spared):
        deadline = time.monotonic() + grace_seconds
        while time.monotonic() < deadline and _running(pid, spared):
            time.sleep(_POLL_SECONDS)
    # One that is told to end may have started others, which now are ours.
    while _told(pid, getattr(signal, "SIGKILL", signal.SIGTERM), spared):
        time.sleep(_POLL_SECONDS)


def _running(pid: int, spared: frozenset[int]) -> list[int]:
    if pid == os.getpid():
        _reap(spared)
    return [child for child in descendants(pid) if child not in spared and not _has_ended(child)]


def _told(pid: int, number: int, spared: frozenset[int]) -> bool:
    found = _running(pid, spared)
    for child in found:
        send_to(child, number)
    return bool(found)


def _reap(spared: frozenset[int]) -> None:
    for child in _children(os.getpid()):
        if child not in spared:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)


def _has_ended(pid: int) -> bool:
    """Whether a process is gone, or only waits to be waited for."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return IS_LINUX
    return text.rsplit(")", 1)[-1].split()[0] in "ZX"


def name_of_signal(number: int) -> str:
    """The signal's name, or its number in words.

    >>> name_of_signal(9), name_of_signal(250)
    ('SIGKILL', 'signal 250')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def number_of(name: str) -> int:
    """The number of a signal that `name_of_signal` has named.

    >>> number_of("SIGKILL"), number_of("signal 250")
    (9, 250)
    """
    return int(getattr(signal, name)) if name.startswith("SIG") else int(name.split()[-1])
