"""What the kernel's log says of processes that it killed for lack of memory, where it may be read."""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

_LOG = Path("/dev/kmsg")
_RECORD_BYTES = 8192
_MAX_RECORDS = 100_000
_KILLED = re.compile(
    r"(?:Memory cgroup out of memory|Out of memory)[^:]*: Killed process (?P<pid>\d+) "
    r"\((?P<name>.*)\),? (?:UID|total-vm).*?anon-rss:(?P<anonymous>\d+)kB(?:.*?shmem-rss:(?P<shared>\d+)kB)?"
)


@dataclass(frozen=True, slots=True)
class LoggedKill:
    """A process that the kernel killed.

    Args:
        pid: its number, as the machine counts; a container may count differently.
        name: of its program.
        held_bytes: what it held.
    """

    pid: int
    name: str
    held_bytes: int


class KernelLog:
    """The kernel's log from now on."""

    def __init__(self, path: Path = _LOG) -> None:
        self._descriptor: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._descriptor, 0, os.SEEK_END)

    @property
    def is_readable(self) -> bool:
        """Whether there is a log, and we may read it."""
        return self._descriptor is not None

    def kills(self) -> list[LoggedKill]:
        """The processes killed since this was asked last."""
        return [kill for text in self._records() if (kill := parse(text)) is not None]

    def close(self) -> None:
        """Reads no more."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _records(self) -> list[str]:
        records: list[str] = []
        if self._descriptor is None:
            return records
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
            records += record.decode("utf-8", errors="replace").splitlines()
        return records


def parse(text: str) -> LoggedKill | None:
    """The kill that a line of the log tells of; None where it tells of something else.

    >>> parse("Memory cgroup out of memory: Killed process 12 (python) total-vm:90kB, anon-rss:4kB, file-rss:0kB")
    LoggedKill(pid=12, name='python', held_bytes=4096)
    """
    match = _KILLED.search(text)
    if match is None:
        return None
    return LoggedKill(int(match["pid"]), match["name"], (int(match["anonymous"]) + int(match["shared"] or 0)) * 1024)
