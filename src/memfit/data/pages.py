"""Memory straight from the system, in huge pages where it has such.

The C library keeps large blocks that were freed by a thread for the next one of that thread, which may never come: over
a few epochs that is several times what a stream holds. What comes from the system goes back to it at once. And the disk
is handed memory page by page, which costs the less the larger they are.
"""

import ctypes
import mmap
from contextlib import suppress

HUGE_BYTES = 2 << 20


def pages(size: int) -> memoryview:
    """`size` bytes of zeros that begin with a huge page; given back when nobody uses them any more."""
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    mapping = mmap.mmap(-1, size + HUGE_BYTES, **flags)
    skipped = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE_BYTES
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Some kernels have none.
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE, skipped, size)
    return memoryview(mapping)[skipped : skipped + size]
