"""A device that several processes share: what each of them holds, in a file that all of them have mapped.

Each process has an allocator and a CUDA context of its own; the memory they take is the device's. The kernel gives up
the lock of a process that dies, and what such a process held is the device's again. There is one row per process,
written by that process alone.
"""

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from memfit.allocator.pool import Pool, PoolBlock
from memfit.allocator.segments import Segments

_MAX_ROWS = 256
_NAME_BYTES = 64
# Rows, peak of all, processes that were started and are to come.
_HEAD = struct.Struct("<qqq")
# The fields of a `ProcessShare`.
_ROW = struct.Struct(f"<qqqqqqq{_NAME_BYTES}s")
_SIZE = _HEAD.size + _MAX_ROWS * _ROW.size


@dataclass(slots=True)
class ProcessShare:
    """What one process has of the device."""

    pid: int  # 0 when it has ended
    held_bytes: int = 0  # its CUDA context included
    at_peak_bytes: int = 0  # what it held when all of them together held most
    peak_bytes: int = 0  # the most that it has held
    num_steps: int = 0  # optimizer steps that it has taken
    num_events: int = 0  # allocations and frees, which tell that it is alive
    has_ended: bool = False  # whether it has taken all the steps that were wanted, or failed
    name: str = ""  # what the program calls it


def can_share() -> bool:
    """Whether this system has the locks that sharing needs."""
    return find_spec("fcntl") is not None


class SharedDevice:
    """The device as one of its processes, of this name, sees it; the file is made where it isn't there.

    The device can give `usable_bytes` to all (None: no limit); each process takes a context before its first tensor.
    """

    def __init__(self, path: str, usable_bytes: int | None, context_bytes: int, name: str = "") -> None:
        self._path, self._usable_bytes, self._context_bytes = path, usable_bytes, context_bytes
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with self._locked():
            if os.fstat(self._file).st_size < _SIZE:
                os.ftruncate(self._file, _SIZE)
            self._memory = mmap.mmap(self._file, _SIZE)
            num_rows, peak_bytes, num_expected = _HEAD.unpack_from(self._memory, 0)
            # One too many shares the last row: its figures are lost, the script goes on.
            self._row = min(num_rows, _MAX_ROWS - 1)
            _HEAD.pack_into(self._memory, 0, self._row + 1, peak_bytes, max(0, num_expected - 1))
            self._write(self._row, ProcessShare(os.getpid(), name=name))

    def again(self, name: str) -> "SharedDevice":
        """This device for a forked process, with a lock of its own: the inherited one locks nobody out."""
        return SharedDevice(self._path, self._usable_bytes, self._context_bytes, name)

    def take(self, source: Segments, pool: Pool, size_bytes: int) -> PoolBlock | None:
        """What `source` can take of the device beside the other processes, within what this one is allowed."""
        with self._locked():
            rows, limit_bytes = self._living(), source.capacity_bytes
            if self._usable_bytes is not None:
                others = sum(share.held_bytes for row, share in rows if row != self._row)
                source.capacity_bytes = min(limit_bytes, self._usable_bytes - self._context_bytes - others)
            try:
                block = source.take(pool, size_bytes)
            finally:
                source.capacity_bytes = limit_bytes
            self._hold(source.reserved, rows)
            return block

    def hold(self, reserved_bytes: int) -> None:
        """This process has returned something."""
        with self._locked():
            self._hold(reserved_bytes, self._living())

    def note(self, num_steps: int, num_events: int, has_ended: bool) -> None:
        """Tells how far this process is."""
        with self._locked():
            share = _read_row(self._memory, self._row)
            share.num_steps, share.num_events, share.has_ended = num_steps, num_events, has_ended
            self._write(self._row, share)

    def end(self) -> None:
        """This process holds nothing any more."""
        with self._locked():
            share = _read_row(self._memory, self._row)
            share.pid = share.held_bytes = 0
            self._write(self._row, share)

    def expect(self, number: int) -> None:
        """So many more processes have been started that will share the device; negative: fewer are to come."""
        with self._locked():
            num_rows, peak_bytes, num_expected = _HEAD.unpack_from(self._memory, 0)
            _HEAD.pack_into(self._memory, 0, num_rows, peak_bytes, max(0, num_expected + number))

    def others(self) -> tuple[int, int, int]:
        """(processes to come, those at work beside this one and the script itself, a sign of their progress)."""
        with self._locked():
            rows = self._living()
            num_rows, _, num_expected = _HEAD.unpack_from(self._memory, 0)
        at_work = [share for row, share in rows if row not in (0, self._row) and share.pid and not share.has_ended]
        sign = num_rows + sum(share.num_steps + share.num_events + share.peak_bytes for _, share in rows)
        return num_expected, len(at_work), sign

    def pids(self) -> set[int]:
        """The processes that have come."""
        with self._locked():
            return {share.pid for _, share in self._living() if share.pid}

    def others_bytes(self) -> int:
        """Bytes that the other processes hold."""
        with self._locked():
            return sum(share.held_bytes for row, share in self._living() if row != self._row)

    def have_taken_steps(self) -> bool:
        """Whether there are processes that took steps, and all of those have taken all they were to, or are gone.

        One that failed takes none any more: where all have, whoever waits for them waits for ever.
        """
        with self._locked():
            rows = self._living()
            num_expected = _HEAD.unpack_from(self._memory, 0)[2]
        stepping = [share for _, share in rows if share.num_steps]
        if not stepping and not num_expected:
            stepping = [share for row, share in rows if row != self._row]
            if not any(share.has_ended for share in stepping):
                return False
        return bool(stepping) and all(share.has_ended or not share.pid for share in stepping)

    def _hold(self, reserved_bytes: int, rows: "list[tuple[int, ProcessShare]]") -> None:
        own = rows[self._row][1]
        if not reserved_bytes and not own.held_bytes:
            # It never got anything: not even its context is there.
            return
        own.held_bytes = reserved_bytes + self._context_bytes
        own.peak_bytes = max(own.peak_bytes, own.held_bytes)
        total = sum(share.held_bytes for _, share in rows)
        num_rows, peak_bytes, num_expected = _HEAD.unpack_from(self._memory, 0)
        if total <= peak_bytes:
            self._write(self._row, own)
            return
        _HEAD.pack_into(self._memory, 0, num_rows, total, num_expected)
        for row, share in rows:
            share.at_peak_bytes = share.held_bytes
            self._write(row, share)

    def _living(self) -> list[tuple[int, ProcessShare]]:
        """The rows of processes that are still there; one that is gone without a word holds nothing."""
        rows = []
        for row in range(_HEAD.unpack_from(self._memory, 0)[0]):
            share = _read_row(self._memory, row)
            if row != self._row and share.held_bytes and _is_gone(share.pid):
                share.pid = share.held_bytes = 0
                self._write(row, share)
            rows.append((row, share))
        return rows

    def _write(self, row: int, share: ProcessShare) -> None:
        *numbers, name = astuple(share)
        text = name.encode(errors="replace")[:_NAME_BYTES]
        _ROW.pack_into(self._memory, _HEAD.size + row * _ROW.size, *numbers, text)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl

        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def read_shares(path: str) -> tuple[int, list[ProcessShare]]:
    """(the most that all processes have held at once, each process in the order in which they began).

    For one who has no part in the device; (0, []) where there is no such file.
    """
    try:
        content = Path(path).read_bytes()
    except OSError:
        content = b""
    if len(content) < _SIZE:
        return 0, []
    num_rows, peak_bytes, _ = _HEAD.unpack_from(content, 0)
    return peak_bytes, [_read_row(content, row) for row in range(num_rows)]


def _read_row(content: Any, row: int) -> ProcessShare:
    pid, held, at_peak, peak, steps, events, has_ended, name = _ROW.unpack_from(content, _HEAD.size + row * _ROW.size)
    return ProcessShare(
        pid, held, at_peak, peak, steps, events, bool(has_ended), name.rstrip(b"\0").decode(errors="replace")
    )


def _is_gone(pid: int) -> bool:
    """Whether a process has ended, be it waited for or not."""
    try:
        os.kill(pid, 0)
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return text.rsplit(")", 1)[-1].split()[0] in "ZX"
