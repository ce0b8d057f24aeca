"""Where the pools get memory from: segments as `cudaMalloc` gives them, taken whole and returned whole.

This is how the allocator deals with the device by default, without expandable segments. Here the device hands out
rising addresses and never the same one twice; a real driver may reuse them, which can only matter between two free
blocks of exactly the same size.
"""

from bisect import bisect_left
from typing import final

from memfit.allocator.pool import ADDRESS_BITS, IN_USE, Block, Pool
from memfit.allocator.rounding import NO_LIMIT, segment_size


class Source:
    """What the pools take memory from and return it to, within a capacity."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.reserved = 0
        self.num_segments = 0
        # Calls that took memory from the device, and that returned some: cudaMalloc and cudaFree, or pages mapped.
        self.num_taken = self.num_returned = 0
        # Segments that can't be split, held now and taken since the beginning.
        self.num_oversize = self.num_oversize_taken = 0

    def choose(self, pool: Pool, index: int) -> int:
        """Position in the pool of the block to use, given that of the smallest sufficient one."""
        return index

    def take(self, pool: Pool, size_bytes: int) -> Block | None:
        """A block of new memory that holds `size_bytes`, in no list yet; None when the device is full."""
        raise NotImplementedError

    def release_cached(self, pool: Pool) -> None:
        """Return all of the pool that can be returned (`release_blocks`)."""
        raise NotImplementedError

    def release_oversize(self, pool: Pool, size_bytes: int) -> bool:
        """Return enough oversize blocks for a request; True when enough were (`release_available_cached_blocks`)."""
        return False

    def collect_garbage(self, large: Pool) -> None:
        """Return what has been unused for long (`garbage_collect_cached_blocks`)."""


@final
class Segments(Source):
    """Segments of `cudaMalloc`.

    Args:
        capacity_bytes: what the device can give.
        max_split_bytes: size from which blocks are oversize.
        garbage_threshold_bytes: reserved bytes above which old segments are returned before a new one; None: never.
    """

    def __init__(self, capacity_bytes: int, max_split_bytes: int, garbage_threshold_bytes: int | None) -> None:
        super().__init__(capacity_bytes)
        self._max_split_bytes = max_split_bytes
        self._garbage_threshold_bytes = garbage_threshold_bytes
        self._address = 0

    def take(self, pool: Pool, size_bytes: int) -> Block | None:
        """A new segment (`alloc_block`)."""
        segment_bytes = segment_size(size_bytes)
        if self.reserved + segment_bytes > self.capacity_bytes:
            return None
        block = Block(pool, self._address, segment_bytes, IN_USE)
        self._address += segment_bytes
        self.reserved += segment_bytes
        self.num_segments += 1
        self.num_taken += 1
        pool.reserved += segment_bytes
        pool.taken += segment_bytes
        pool.num_segments += 1
        pool.num_segments_taken += 1
        if segment_bytes >= self._max_split_bytes:
            self.num_oversize += 1
            self.num_oversize_taken += 1
        return block

    def release_cached(self, pool: Pool) -> None:
        """Return every segment of the pool that is free as a whole."""
        for block in _whole_segments(pool):
            self._release(block)

    def release_oversize(self, pool: Pool, size_bytes: int) -> bool:
        """Return the smallest sufficient oversize block, or else the largest ones."""
        max_split_bytes = self._max_split_bytes
        if max_split_bytes == NO_LIMIT:
            return False
        wanted_bytes = max(size_bytes, max_split_bytes)
        index = bisect_left(pool.keys, wanted_bytes << ADDRESS_BITS)
        if index < len(pool.keys):
            self._release(pool.by_key[pool.keys[index]])
            return True
        released_bytes = 0
        while released_bytes < wanted_bytes and pool.keys:
            largest = pool.by_key[pool.keys[-1]]
            if largest.size < max_split_bytes:
                break
            released_bytes += largest.size
            self._release(largest)
        return released_bytes >= wanted_bytes

    def collect_garbage(self, large: Pool) -> None:
        """Return old free segments of the large pool, when above the threshold.

        The age of a segment is the number of searches in its pool since it was freed. In each round all segments of
        at least the average age go, until the reserved bytes are down to the threshold or nothing is left.
        """
        threshold_bytes = self._garbage_threshold_bytes
        if threshold_bytes is None or self.reserved <= threshold_bytes:
            return
        blocks = _whole_segments(large)
        total_age = sum(large.num_searches - block.born for block in blocks)
        while blocks and self.reserved > threshold_bytes:
            average_age = total_age / len(blocks)
            kept = []
            for block in blocks:
                age = large.num_searches - block.born
                if age >= average_age:
                    total_age -= age
                    self._release(block)
                else:
                    kept.append(block)
            blocks = kept

    def _release(self, block: Block) -> None:
        pool = block.pool
        pool.remove(block)
        self.reserved -= block.size
        self.num_segments -= 1
        self.num_returned += 1
        pool.reserved -= block.size
        pool.num_segments -= 1
        if block.size >= self._max_split_bytes:
            self.num_oversize -= 1


def _whole_segments(pool: Pool) -> list[Block]:
    return [block for block in pool.free_blocks() if block.prev is None and block.next is None]
