"""Reads that go past the kernel's page cache, from the disk into memory.

Blocks that are read in a random order gain nothing from the cache: each is read once an epoch. But pages have to be
found, filled, copied and given back, which costs more processor time than all else that a stream does, and fills a
container's memory meanwhile. O_DIRECT has none of that. It wants offsets, lengths and addresses on page boundaries,
which samples have not: so a run that covers them is read into scratch memory and copied from there. Very short reads
are served well by the cache, and very long ones better by the kernel's own reading ahead.
"""

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

HUGE_BYTES = 2 << 20
LEAST_BYTES = 32 << 10
MOST_BYTES = 2 << 20
_PAGE_BYTES = mmap.PAGESIZE
_SLOT_BYTES = 64 << 10


def pages(size: int) -> memoryview:
    """`size` bytes of zeros straight from the system, in huge pages where it has such; given back when unused.

    The C library keeps large blocks that were freed by a thread for the next one of that thread, which may never come:
    over a few epochs that is several times what a stream holds. And the disk is handed memory page by page, which costs
    the less the larger they are.
    """
    mapping = mmap.mmap(-1, size + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    skipped = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE_BYTES
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Some kernels have none.
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE, skipped, size)
    return memoryview(mapping)[skipped : skipped + size]


class _Scratch:
    """Memory of the reads that are under way, which share huge pages: a read into these is twice as fast."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._rest = memoryview(b"")
        self._lock = threading.Lock()

    @contextmanager
    def taken(self, length: int) -> Iterator[memoryview]:
        size = -(-length // _SLOT_BYTES) * _SLOT_BYTES
        with self._lock:
            index = next((index for index, view in enumerate(self._free) if len(view) >= size), None)
            if index is not None:
                slot = self._free.pop(index)
            else:
                if len(self._rest) < size:
                    self._rest = pages(-(-size // HUGE_BYTES) * HUGE_BYTES)
                slot, self._rest = self._rest[:size], self._rest[size:]
        try:
            yield slot[:length]
        finally:
            with self._lock:
                self._free.append(slot)


_scratch = _Scratch()


def _start_anew() -> None:
    """For a forked child: its parent may be reading into the memory that they share until one of them writes.

    Only the disk writes into it, never the program, so that the parent keeps what is read meanwhile.
    """
    global _scratch
    _scratch = _Scratch()


os.register_at_fork(after_in_child=_start_anew)


def is_worth_it(length: int) -> bool:
    """Whether a read of so many bytes is better made past the cache."""
    return LEAST_BYTES <= length < MOST_BYTES


def open_direct(path: str) -> int:
    """A descriptor for such reads; raises OSError where the file system has none."""
    if not hasattr(os, "O_DIRECT"):
        raise OSError("the system has no O_DIRECT")
    number = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        # Some file systems accept the flag and refuse the reads.
        with _scratch.taken(_PAGE_BYTES) as memory:
            os.preadv(number, [memory], 0)
    except OSError:
        os.close(number)
        raise
    return number


def read_direct(descriptor: int, view: memoryview, offset: int) -> bool:
    """Fills `view` with the bytes at `offset`; False where it couldn't, for whatever reason."""
    start = offset // _PAGE_BYTES * _PAGE_BYTES
    stop = -(-(offset + len(view)) // _PAGE_BYTES) * _PAGE_BYTES
    skipped = offset - start
    with _scratch.taken(stop - start) as memory:
        try:
            count = os.preadv(descriptor, [memory], start)
        except OSError:
            return False
        if count < skipped + len(view):
            return False
        # numpy lets others run while it copies.
        np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(memory, np.uint8, len(view), skipped))
    return True
