"""PyTorch's CUDA caching allocator, replayed without CUDA.

What a program asks for is not what it occupies: sizes are rounded, memory is taken from the device in segments,
segments are split and rejoined, and freed memory is kept for later. The rules are those of PyTorch 2.x
(`c10/cuda/CUDACachingAllocator.cpp`); `docs/concepts/allocator.md` lists them with their upstream names.

The way of a request: round it; take the smallest sufficient free block of its pool; failing that, a new segment;
failing that, release cached segments and try again; failing that, it is out of memory. What exceeds the request is
split off.

Each stream has pools of its own, because nothing orders the work of two streams; so has each private pool of a CUDA
graph or of `torch.cuda.MemPool`. What one of them has cached serves no other, and only the release of the cache joins
them again.
"""

from bisect import bisect_left, insort
from typing import NamedTuple, final

from memfit.allocator.pool import ADDRESS_BITS, FREE, IN_USE, Pool, PoolBlock
from memfit.allocator.rounding import (
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    NO_LIMIT,
    OVERSIZE_SLACK_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
)
from memfit.allocator.segments import Segments, choose_growing
from memfit.allocator.shared import SharedDevice
from memfit.core.errors import BadInput
from memfit.core.replay import AllocatorOptions
from memfit.core.units import MIB

# Of a private pool, as PyTorch's snapshots name it (`MempoolId_t`); the first stands for no private pool.
PoolId = tuple[int, int]
NO_POOL_ID: PoolId = (0, 0)


class StreamPools(NamedTuple):
    """The pools that serve one stream, or one stream within a private pool."""

    small: Pool
    large: Pool


@final
class CachingAllocator:
    """The allocator of one device (`DeviceCachingAllocator`); `small` and `large` serve the default stream."""

    def __init__(self, options: AllocatorOptions, capacity_bytes: int | None) -> None:
        check_options(options)
        limit_bytes = NO_LIMIT if capacity_bytes is None else capacity_bytes
        self._collects = options.garbage_collection_threshold > 0 and capacity_bytes is not None
        # In whole MiB as upstream (max_split_size_mb), which is why oversize blocks are never parts of a segment.
        split_limit = options.max_split_size_bytes
        max_split_bytes = NO_LIMIT if split_limit is None else split_limit // MIB * MIB
        self._is_expandable = options.expandable_segments
        threshold_bytes = int(options.garbage_collection_threshold * limit_bytes) if self._collects else None
        self.source = Segments(limit_bytes, max_split_bytes, threshold_bytes, fraction_set=self._collects)
        self.max_split_bytes = max_split_bytes
        self._oversize_key = max_split_bytes << ADDRESS_BITS
        # Those of no private pool, by stream; and those of each private pool.
        self._streams: dict[int, StreamPools] = {}
        self._private: dict[PoolId, dict[int, StreamPools]] = {}
        self._unused: set[PoolId] = set()
        self.private_pools_grow = True
        """Whether private pools have expandable segments, too, where others do; at first they had plain ones, of which
        the rest was split off all the same (`alloc_block` and `should_split` of PyTorch 2.1)."""
        self.is_capturing = False
        """While a CUDA graph is captured, the cache is not released for a request that the device has no room for."""
        self._ages_together = False
        self.small, self.large = self.pools_of(0)
        self.allocated = 0
        self.num_retries = 0
        # Freed by the program, but still in use by another stream's work.
        self._waiting: dict[PoolBlock, None] = {}
        self.shared: SharedDevice | None = None
        """The device, where other processes take memory of it, too."""

    def pools_of(self, stream: int, pool_id: PoolId = NO_POOL_ID) -> StreamPools:
        """The pools of a stream, outside or inside of a private pool; a stream is known by any number."""
        streams = self._streams if pool_id == NO_POOL_ID else self._private.setdefault(pool_id, {})
        pools = streams.get(stream)
        if pools is None:
            remainder_bytes, below_bytes = SMALL_BYTES + 1, self.max_split_bytes
            if self._is_expandable:
                remainder_bytes, below_bytes = MIN_BLOCK_BYTES, NO_LIMIT
            grows = self._is_expandable and (pool_id == NO_POOL_ID or self.private_pools_grow)
            small = Pool(SMALL_SEGMENT_BYTES, MIN_BLOCK_BYTES, NO_LIMIT, stream, is_expandable=grows)
            large = Pool(LARGE_SEGMENT_BYTES, remainder_bytes, below_bytes, stream, is_expandable=grows)
            pools = streams[stream] = StreamPools(small, large)
            self._ages_together = self._collects and len(self._streams) > 1
            if self._ages_together and streams is self._streams:
                # They have missed what the default stream's pools have counted.
                small.num_searches, large.num_searches = self.small.num_searches, self.large.num_searches
        return pools

    def adopt(
        self, pools: StreamPools, is_large: bool, segment: tuple[int, int], used: list[tuple[int, int]]
    ) -> list[PoolBlock]:
        """A segment, or a mapped part of an expandable one, that is there already; returns its blocks in use.

        Ranges are (address, bytes). Parts of expandable segments come in the order of their addresses.
        """
        address, size = segment
        blocks = self.source.adopt(pools[is_large], address, size, used)
        self.allocated += sum(block.size for block in blocks)
        return blocks

    @property
    def has_streams(self) -> bool:
        """Whether there are more pools than those of the default stream."""
        return len(self._streams) > 1 or bool(self._private)

    def all_pools(self) -> list[StreamPools]:
        """Those of every stream, then those of every private pool."""
        return [pools for streams in (self._streams, *self._private.values()) for pools in streams.values()]

    def malloc(self, size: int, pools: StreamPools | None = None) -> PoolBlock | None:
        """A block of at least `size` bytes, a size that `round_size` made; None when out of memory.

        Without `pools` it is for the default stream.
        """
        pool = (self.small if size <= SMALL_BYTES else self.large) if pools is None else pools[size > SMALL_BYTES]
        if self._collects:
            pool.num_searches += 1
            if self._ages_together:
                self._count_search(pool)
        keys, by_key = pool.keys, pool.by_key
        block = None
        index = bisect_left(keys, size << ADDRESS_BITS)
        if index < len(keys):
            if pool.is_expandable:
                index = choose_growing(pool, index)
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
            rest = PoolBlock(pool, block.address + size, remaining, FREE)
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

    def free(self, block: PoolBlock) -> None:
        """Give a block of `malloc` back to its pool."""
        self.allocated -= block.size
        block.pool.insert_merged(block)

    def free_later(self, block: PoolBlock) -> None:
        """The program has freed a block that another stream still uses (`record_stream`): nobody can have it yet."""
        self.allocated -= block.size
        self._waiting[block] = None

    def complete(self, block: PoolBlock) -> None:
        """The other stream is done with a block of `free_later` (`process_events`); again: nothing happens."""
        if block in self._waiting:
            del self._waiting[block]
            block.pool.insert_merged(block)

    def is_waiting(self, block: PoolBlock) -> bool:
        """Whether another stream still uses a block that the program has freed."""
        return block in self._waiting

    def release_cached(self) -> None:
        """Return to the device all that isn't in use and can be returned (`release_cached_blocks`).

        Other streams are waited for; of private pools only those that nothing uses any more are looked at.
        """
        for block in list(self._waiting):
            self.complete(block)
        streams = [self._streams[stream] for stream in sorted(self._streams)]
        for pools in streams:
            self.source.release_cached(pools.large)
        for pools in streams:
            self.source.release_cached(pools.small)
        for pool_id in sorted(self._unused):
            self._release_private(pool_id)
        if self.shared is not None:
            self.shared.hold(self.source.reserved)

    def end_private(self, pool_id: PoolId) -> None:
        """Nothing uses a private pool any more (`releasePool`): from now on its cache is released with the others'."""
        self._unused.add(pool_id)

    def release_private(self, pool_id: PoolId) -> None:
        """Return what a private pool has cached, and nothing else (`emptyCache` of one that nothing uses)."""
        for block in [block for block in self._waiting if self._is_in(block, pool_id)]:
            self.complete(block)
        self._release_private(pool_id)
        if self.shared is not None:
            self.shared.hold(self.source.reserved)

    def _is_in(self, block: PoolBlock, pool_id: PoolId) -> bool:
        return any(block.pool in pools for pools in self._private.get(pool_id, {}).values())

    def _release_private(self, pool_id: PoolId) -> None:
        streams = self._private.get(pool_id, {})
        for is_large in (False, True):
            for stream in sorted(streams):
                self.source.release_cached(streams[stream][is_large])

    def _count_search(self, pool: Pool) -> None:
        """Ages of what is cached count in searches of all streams (`get_free_blocks_call_count`).

        Garbage of private pools is never collected, so that only the others count.
        """
        is_large = pool.page_bytes == LARGE_SEGMENT_BYTES
        own = self._streams.get(pool.stream)
        if own is not None and own[is_large] is pool:
            for pools in self._streams.values():
                pools[is_large].num_searches += pools is not own

    def _grow(self, pool: Pool, size: int) -> PoolBlock | None:
        """A block from new memory, making room for it step by step (the middle of `malloc`)."""
        if self._collects:
            self.source.collect_garbage([self._streams[stream].large for stream in sorted(self._streams)])
        block = self._take(pool, size)
        if block is None and self.source.release_oversize(pool, size):
            block = self._take(pool, size)
        if block is None and not self.is_capturing:
            self.release_cached()
            self.num_retries += 1
            block = self._take(pool, size)
        return block

    def _take(self, pool: Pool, size: int) -> PoolBlock | None:
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
