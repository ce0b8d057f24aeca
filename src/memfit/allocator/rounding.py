"""Sizes as PyTorch's CUDA caching allocator rounds them.

Every request is rounded twice: to the size of a block (`round_size`), and, when no cached block fits, to the size of
the segment that is asked of the device (`segment_size`). The constants carry the values of PyTorch 2.x
(`c10/core/AllocatorConfig.h`; up to 2.8 in `c10/cuda/CUDACachingAllocator.cpp`), whose names are given beside them.
"""

from memfit.core.units import MIB

MIN_BLOCK_BYTES = 512  # kMinBlockSize: blocks are multiples of this
SMALL_BYTES = 1 * MIB  # kSmallSize: the largest request that the small pool serves
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer: a segment, or a page of an expandable segment, of the small pool
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer: a segment for medium requests, or a page, of the large pool
OWN_SEGMENT_BYTES = 10 * MIB  # kMinLargeAlloc: requests from here on get a segment of their own size
SEGMENT_ROUNDING_BYTES = 2 * MIB  # kRoundLarge: such segments are multiples of this
OVERSIZE_SLACK_BYTES = 20 * MIB  # max_non_split_rounding_mb: an oversize block exceeds the request by less than this
NO_LIMIT = 1 << 62  # stands for a `max_split_size` that isn't set; greater than any block


def round_size(size_bytes: int, divisions: int = 0) -> int:
    """Bytes of the block that a request of more than 0 bytes needs.

    The divisions are `roundup_power2_divisions`, a power of two; 0 and 1 turn it off.

    >>> round_size(1), round_size(512), round_size(513)
    (512, 512, 1024)
    >>> round_size(1200 * 1024, divisions=4) // 1024
    1280
    """
    if divisions > 1 and size_bytes > MIN_BLOCK_BYTES * divisions:
        # The step is at least 512 here, because the power of two below the size is at least 512 * divisions.
        step = (1 << (size_bytes.bit_length() - 1)) // divisions
        return -(-size_bytes // step) * step
    return -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def segment_size(size_bytes: int) -> int:
    """Bytes asked of the device for a new segment that must hold a block (`get_allocation_size`).

    >>> [segment_size(size * MIB) // MIB for size in (1, 2, 9, 10, 11)]
    [2, 20, 20, 10, 12]
    """
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size_bytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES
