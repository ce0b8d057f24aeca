"""PyTorch's CUDA caching allocator, replayed without CUDA.

What a program asks for is not what it occupies: sizes are rounded, memory is taken from the device in segments,
segments are split and rejoined, and freed memory is kept for later. The rules are those of PyTorch 2.x
(`c10/cuda/CUDACachingAllocator.cpp`), for one stream and without private pools; `docs/concepts/allocator.md` lists them
with their upstream names.

The way of a request: round it; take the smallest sufficient free block of its pool; failing that, a new segment;
failing that, release cached segments and try again; failing that, it is out of memory. What exceeds the request is
split off.
"""

from bisect import bisect_left, insort
from typing import final

from memfit.allocator.pool import ADDRESS_BITS, FREE, IN_USE, Block, Pool
from memfit.allocator.rounding import (
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    NO_LIMIT,
    OVERSIZE_SLACK_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
)
from memfit.allocator.segments import ExpandableSegments, Segments, Source
from memfit.allocator.shared import SharedDevice
from memfit.core.errors import BadInput
from memfit.core.replay import AllocatorOptions
from memfit.core.units import MIB


@final
class CachingAllocator:
    """The allocator of one device and one stream (`DeviceCachingAllocator`)."""

    def __init__(self, options: AllocatorOptions, capacity_bytes: int | None) -> None:
        check_options(options)
        limit_bytes = NO_LIMIT if capacity_bytes is None else capacity_bytes
        collects = options.garbage_collection_threshold > 0 and capacity_bytes is not None
        # In whole MiB as upstream (max_split_size_mb), which is why oversize blocks are never parts of a segment.
        split_limit = options.max_split_size_bytes
        max_split_bytes = NO_LIMIT if split_limit is None else split_limit // MIB * MIB
        self.source: Source
        self._choose = None
        if options.expandable_segments:
            self.source = ExpandableSegments(limit_bytes, fraction_set=collects)
            self._choose = self.source.choose
            self.large = Pool(LARGE_SEGMENT_BYTES, MIN_BLOCK_BYTES, NO_LIMIT)
        else:
            threshold_bytes = int(options.garbage_collection_threshold * limit_bytes) if collects else None
            self.source = Segments(limit_bytes, max_split_bytes, threshold_bytes)
            self.large = Pool(LARGE_SEGMENT_BYTES, SMALL_BYTES + 1, max_split_bytes)
        self.small = Pool(SMALL_SEGMENT_BYTES, MIN_BLOCK_BYTES, NO_LIMIT)
        self.max_split_bytes = max_split_bytes
        self._oversize_key = max_split_bytes << ADDRESS_BITS
        self.allocated = 0
        self.num_retries = 0
        self.shared: SharedDevice | None = None
        """The device, where other processes take memory of it, too."""

    def malloc(self, size: int) -> Block | None:
        """A block of at least `size` bytes, a size that `round_size` made; None when out of memory."""
        pool = self.small if size <= SMALL_BYTES else self.large
        pool.num_searches += 1
        keys, by_key = pool.keys, pool.by_key
        block = None
        index = bisect_left(keys, size << ADDRESS_BITS)
        if index < len(keys):
            if self._choose is not None:
                index = self._choose(pool, index)
            key = keys[index]
            # A block of `max_split_size` or more is for requests of about its size (the end of `get_free_block`).
            if key < self._oversize_key or (
                size >= self.max_split_bytes and key >> ADDRESS_BITS < size + OVERSIZE_SLACK_BYTES
            ):
                block = by_key.pop(key)
                del keys[index]
        if block is None:
            block = self._grow(pool, size)
            if block is None:
                return None
        remaining = block.size - size
        if remaining >= pool.split_remainder_bytes and size < pool.split_below_bytes:
            # Pool.insert and Block.link_after, written out because most allocations come here.
            rest = Block(pool, block.address + size, remaining, FREE)
            rest.prev = block
            rest.next = after = block.next
            if after is not None:
                after.prev = rest
            block.next = rest
            block.size = size
            rest.born = pool.num_searches
            rest.key = key = remaining << ADDRESS_BITS | rest.address
            by_key[key] = rest
            insort(keys, key)
        block.state = IN_USE
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Give a block of `malloc` back to its pool."""
        self.allocated -= block.size
        block.pool.insert_merged(block)

    def release_cached(self) -> None:
        """Return to the device all that isn't in use and can be returned (`release_cached_blocks`)."""
        self.source.release_cached(self.large)
        self.source.release_cached(self.small)
        if self.shared is not None:
            self.shared.hold(self.source.reserved)

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """A block from new memory, making room for it step by step (the middle of `malloc`)."""
        self.source.collect_garbage(self.large)
        block = self._take(pool, size)
        if block is None and self.source.release_oversize(pool, size):
            block = self._take(pool, size)
        if block is None:
            self.release_cached()
            self.num_retries += 1
            block = self._take(pool, size)
        return block

    def _take(self, pool: Pool, size: int) -> Block | None:
        if self.shared is None:
            return self.source.take(pool, size)
        return self.shared.take(self.source, pool, size)


def check_options(options: AllocatorOptions) -> None:
    """Refuse settings that PyTorch refuses."""
    max_split = options.max_split_size_bytes
    if max_split is not None and max_split < LARGE_SEGMENT_BYTES:
        raise BadInput(
            f"max_split_size_bytes must be at least 20 MiB ({LARGE_SEGMENT_BYTES}), as in PyTorch, "
            f"but {max_split!r} was given. Use None for no limit."
        )
    divisions = options.roundup_power2_divisions
    if divisions < 0 or divisions & (divisions - 1):
        raise BadInput(
            f"roundup_power2_divisions must be a power of two, as in PyTorch, but {divisions!r} was given. "
            f"Use 0 to turn it off."
        )
