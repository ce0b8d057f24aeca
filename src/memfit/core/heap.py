"""The heap of the C library: what was freed goes back to the system, now or always."""

import ctypes
import functools
import gc
import sys

# M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of mallopt(3), and the size that the library itself goes up to.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_MAPPED_BYTES = 1 << 20
_MOST_MAPPED_BYTES = 32 << 20


@functools.cache
def _c_library() -> ctypes.CDLL | None:
    """The GNU C library; None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None


def map_large_blocks(wanted: bool) -> None:
    """Whether the GNU C library is to map every block of a mebibyte and more by itself, so that freed ones go at once.

    By default it raises that size, up to 32 MiB, whenever such a block is freed. Blocks below it are cut from a heap,
    which is faster, but free space in the middle of a heap stays counted as data of the process.
    """
    library = _c_library()
    if library is not None:
        size = _MAPPED_BYTES if wanted else _MOST_MAPPED_BYTES
        library.mallopt(_MMAP_THRESHOLD, size)
        library.mallopt(_TRIM_THRESHOLD, 2 * size)


def give_back() -> None:
    """Returns freed blocks to the system."""
    library = _c_library()
    if library is not None:
        library.malloc_trim(0)


def release() -> None:
    """Frees cycles of dead objects and returns freed blocks to the system."""
    gc.collect()
    give_back()
