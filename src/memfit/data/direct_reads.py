"""Reads that go past the kernel's page cache, from the disk into memory.

Blocks that are read in a random order gain nothing from the cache: each is read once an epoch. But pages have to be
found, filled, copied and given back, which costs more processor time than all else that a stream does, and fills a
container's memory meanwhile. O_DIRECT has none of that. It wants offsets, lengths and addresses on page boundaries,
which samples have not: so a run that covers them is read into scratch memory of the thread and copied from there.
Very short reads are served well by the cache, and very long ones better by the kernel's own reading ahead.
"""

import mmap
import os
import threading

import numpy as np

LEAST_BYTES = 32 << 10
MOST_BYTES = 2 << 20
_PAGE_BYTES = mmap.PAGESIZE
_scratch = threading.local()


def _start_anew() -> None:
    """For a forked child: the scratch memory is shared with its parent, which may be reading into it."""
    global _scratch
    _scratch = threading.local()


# Private memory would need no such care, but open(2) warns of forks during direct reads into it.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


def is_worth_it(length: int) -> bool:
    """Whether a read of so many bytes is better made past the cache."""
    return LEAST_BYTES <= length < MOST_BYTES


def open_direct(path: str) -> int | None:
    """A descriptor for such reads; None where the file system has none."""
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "preadv"):
        return None
    try:
        number = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # Some file systems accept the flag and refuse the reads.
        os.preadv(number, [_memory(_PAGE_BYTES)], 0)
    except OSError:
        os.close(number)
        return None
    return number


def read_direct(descriptor: int, view: memoryview, offset: int) -> bool:
    """Fills `view` with the bytes at `offset`; False where it couldn't, for whatever reason."""
    start = offset // _PAGE_BYTES * _PAGE_BYTES
    stop = -(-(offset + len(view)) // _PAGE_BYTES) * _PAGE_BYTES
    memory = _memory(stop - start)
    try:
        count = os.preadv(descriptor, [memory], start)
    except OSError:
        return False
    skipped = offset - start
    if count < skipped + len(view):
        return False
    # numpy lets others run while it copies.
    np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(memory, np.uint8, len(view), skipped))
    return True


def _memory(length: int) -> memoryview:
    """Scratch memory of this thread, on a page boundary."""
    block: mmap.mmap | None = getattr(_scratch, "block", None)
    if block is None or len(block) < length:
        # Whole powers of two, so that runs of different lengths don't need one after the other.
        block = _scratch.block = mmap.mmap(-1, max(64 << 10, 1 << (length - 1).bit_length()))
    return memoryview(block)[:length]
