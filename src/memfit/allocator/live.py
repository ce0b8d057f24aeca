"""The caching allocator while a program runs: block by block, with the counters that PyTorch would show.

`caching.replay` has the whole timeline before it starts. A program that runs on a simulated device asks for one block
after another, may empty the cache, reset peaks or read statistics in between, and has to hear at once when the device
is full. Both use the same `CachingAllocator`; this module adds what such a program can ask.
"""

import threading
from collections import deque
from typing import cast, final

from memfit.allocator.caching import CachingAllocator, Source
from memfit.allocator.pool import FREE, IN_USE, UNMAPPED, Block, Pool
from memfit.allocator.rounding import MIN_BLOCK_BYTES, NO_LIMIT, SMALL_BYTES, round_size, segment_size
from memfit.allocator.shared import SharedDevice, SharedSource
from memfit.allocator.statistics import Level, PoolStatistics
from memfit.core.replay import AllocatorOptions


@final
class LiveAllocator:
    """The memory of one device as one process with one stream sees it.

    May be used from several threads, and blocks may be freed while a call is under way: Python's garbage collector can
    drop the last reference to a tensor at any moment.

    Args:
        options: settings of the allocator.
        capacity_bytes: what the device can give to segments, without the CUDA context; None: no limit.
    """

    __slots__ = (
        "_all",
        "_allocator",
        "_busy",
        "_divisions",
        "_large",
        "_live",
        "_lock",
        "_num_retries_before",
        "_num_returned_before",
        "_num_syncs",
        "_num_taken",
        "_num_taken_before",
        "_oversize",
        "_oversize_segments",
        "_shared",
        "_small",
        "_tracks_splits",
        "_waiting",
        "allocated_bytes",
        "capacity_bytes",
        "limit_bytes",
        "num_failures",
        "num_retries",
        "num_segments",
        "options",
        "requested_bytes",
        "reserved_bytes",
    )

    def __init__(self, options: AllocatorOptions, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.limit_bytes: int | None = None
        """What the process allows itself, or None."""
        self._lock = threading.RLock()
        self._waiting: deque[Block] = deque()
        self._busy = False
        self._live: set[Block] = set()
        self._small, self._large, self._all = PoolStatistics(), PoolStatistics(), PoolStatistics()
        self._oversize, self._oversize_segments = Level(), Level()
        self.allocated_bytes = self.reserved_bytes = self.requested_bytes = 0
        self.num_segments = self.num_retries = self.num_failures = 0
        self._num_syncs = self._num_retries_before = 0
        self._num_taken = self._num_taken_before = self._num_returned_before = 0
        self._shared: SharedDevice | None = None
        self._set_up(options)

    def _set_up(self, options: AllocatorOptions) -> None:
        self.options = options
        self._allocator = CachingAllocator(options, self.capacity_bytes)
        if self._shared is not None:
            self._allocator.source = cast(Source, SharedSource(self._allocator.source, self._shared))
        self._divisions = options.roundup_power2_divisions
        # Upstream leaves expandable segments out, because wholly free pages can always be returned.
        self._tracks_splits = not options.expandable_segments

    def share(self, device: SharedDevice | None) -> None:
        """From now on the device's memory is shared with other processes; None: no longer."""
        with self._lock:
            self._shared = device
            self.limit(self.limit_bytes)
            plain = getattr(self._allocator.source, "plain", self._allocator.source)
            plain.capacity_bytes = self._allocator.source.capacity_bytes
            self._allocator.source = plain if device is None else cast(Source, SharedSource(plain, device))

    @property
    def others_bytes(self) -> int:
        """What other processes hold on the device."""
        return 0 if self._shared is None else self._shared.others_bytes()

    def configure(self, options: AllocatorOptions) -> bool:
        """Takes other settings, as PyTorch does until the first allocation; False when it is too late."""
        with self._lock:
            if self._all.allocation.peak or self.num_failures:
                return False
            if options != self.options:
                self._set_up(options)
                self.limit(self.limit_bytes)
            return True

    def limit(self, limit_bytes: int | None) -> None:
        """Allows the process this much (`torch.cuda.set_per_process_memory_fraction`); None: all there is."""
        bounds = [bound for bound in (self.capacity_bytes, limit_bytes) if bound is not None]
        with self._lock:
            self.limit_bytes = limit_bytes
            self._allocator.source.capacity_bytes = min(bounds, default=NO_LIMIT)

    def malloc(self, size_bytes: int) -> Block | None:
        """A block of at least `size_bytes`; None when the device is full, even after the cache was released."""
        with self._lock:
            nested, self._busy = self._busy, True
            try:
                if self._divisions > 1:
                    size = round_size(size_bytes, self._divisions) if size_bytes else 0
                else:
                    size = -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
                allocator = self._allocator
                if not size:
                    return Block(allocator.small, 0, 0, IN_USE)
                block = allocator.malloc(size)
                if allocator.source.num_taken != self._num_taken or block is None:
                    self._follow_source()
                    if block is None:
                        self.num_failures += 1
                        return None
                    is_new = True
                else:
                    is_new = False
                block.requested = size_bytes
                self._live.add(block)
                self._count(block, size <= SMALL_BYTES, is_new)
                return block
            finally:
                self._busy = nested
                if self._waiting:
                    self._settle()

    def free(self, block: Block) -> None:
        """Takes a block back."""
        self._waiting.append(block)
        self._settle()

    def empty_cache(self) -> None:
        """Returns to the device whatever isn't in use (`torch.cuda.empty_cache`)."""
        with self._lock:
            nested, self._busy = self._busy, True
            try:
                self._allocator.release_cached()
                self._num_syncs += 1
                self._follow_source()
            finally:
                self._busy = nested
                self._settle()

    def _count(self, block: Block, is_small: bool, is_new: bool) -> None:
        """Books a block that was handed out; written out because every allocation comes here."""
        size, requested = block.size, block.requested
        both, pool = self._all, self._small if is_small else self._large
        level = pool.allocation
        level.total += 1
        level.current = current = level.current + 1
        if current > level.peak:
            level.peak = current
        if (current := len(self._live)) > both.allocation.peak:
            both.allocation.peak = current
        level = pool.allocated_bytes
        level.total += size
        level.current = current = level.current + size
        if current > level.peak:
            level.peak = current
        self.allocated_bytes = current = self.allocated_bytes + size
        if current > both.allocated_bytes.peak:
            both.allocated_bytes.peak = current
        level = pool.requested_bytes
        level.total += requested
        level.current = current = level.current + requested
        if current > level.peak:
            level.peak = current
        self.requested_bytes = current = self.requested_bytes + requested
        if current > both.requested_bytes.peak:
            both.requested_bytes.peak = current
        if size >= self._allocator.max_split_bytes:
            self._oversize.move_to(self._oversize.current + 1)
        if self._tracks_splits:
            if not is_new and block.prev is None:
                rest = block.next
                if rest is None or (rest.state == FREE and rest.next is None):
                    # Free neighbours are always joined: the block, with what was split off it, was a whole segment.
                    pool.num_whole -= 1
                    pool.whole_bytes -= size if rest is None else size + rest.size
            self._follow_splits(block.pool, pool)

    def _follow_splits(self, pool: Pool, statistics: PoolStatistics) -> None:
        """Books what is free in a pool and can't be returned, because the rest of its segment is in use."""
        level = statistics.inactive_split
        current = len(pool.keys) - statistics.num_whole
        if current != level.current:
            level.move_to(current)
            current = self._small.inactive_split.current + self._large.inactive_split.current
            if current > self._all.inactive_split.peak:
                self._all.inactive_split.peak = current
        level = statistics.inactive_split_bytes
        current = pool.reserved - statistics.allocated_bytes.current - statistics.whole_bytes
        if current != level.current:
            level.move_to(current)
            current = self._small.inactive_split_bytes.current + self._large.inactive_split_bytes.current
            if current > self._all.inactive_split_bytes.peak:
                self._all.inactive_split_bytes.peak = current

    def _settle(self) -> None:
        """Takes back the blocks that are waiting, unless a call is under way: that one will, when it ends."""
        while self._waiting and not self._busy:
            with self._lock:
                self._free_waiting()

    def _free_waiting(self) -> None:
        nested, self._busy = self._busy, True
        allocator, live = self._allocator, self._live
        try:
            while self._waiting:
                block = self._waiting.popleft()
                if not block.size:
                    continue
                live.remove(block)
                size, requested, pool = block.size, block.requested, block.pool
                statistics = self._small if pool is allocator.small else self._large
                statistics.allocation.current -= 1
                statistics.allocated_bytes.current -= size
                statistics.requested_bytes.current -= requested
                self.allocated_bytes -= size
                self.requested_bytes -= requested
                if size >= allocator.max_split_bytes:
                    self._oversize.move_to(self._oversize.current - 1)
                allocator.free(block)
                if self._tracks_splits:
                    if block.prev is None and block.next is None:
                        statistics.num_whole += 1
                        statistics.whole_bytes += block.size
                    self._follow_splits(pool, statistics)
        finally:
            self._busy = nested

    def _follow_source(self) -> None:
        """Books what was taken from the device and returned to it."""
        allocator = self._allocator
        source = allocator.source
        if allocator.num_retries != self._num_retries_before:
            # Each retry has waited for the device before it released the cache.
            retried = allocator.num_retries - self._num_retries_before
            self._num_retries_before = allocator.num_retries
            self.num_retries += retried
            self._num_syncs += retried
        self._num_taken = source.num_taken
        for pool, statistics in ((allocator.small, self._small), (allocator.large, self._large)):
            statistics.segment.move_through(pool.num_segments, pool.num_segments_taken)
            statistics.reserved_bytes.move_through(pool.reserved, pool.taken)
            if self._tracks_splits:
                whole = [block.size for block in pool.by_key.values() if block.prev is None and block.next is None]
                statistics.num_whole, statistics.whole_bytes = len(whole), sum(whole)
        self._oversize_segments.move_through(source.num_oversize, source.num_oversize_taken)
        both = self._all
        self.reserved_bytes, self.num_segments = source.reserved, source.num_segments
        both.reserved_bytes.peak = max(both.reserved_bytes.peak, source.reserved)
        both.segment.peak = max(both.segment.peak, self._small.segment.current + self._large.segment.current)

    @property
    def allocated_peak_bytes(self) -> int:
        """Greatest of `allocated_bytes` since the last reset."""
        return self._all.allocated_bytes.peak

    @property
    def reserved_peak_bytes(self) -> int:
        """Greatest of `reserved_bytes` since the last reset."""
        return self._all.reserved_bytes.peak

    def reset_peaks(self) -> None:
        """Peaks begin at what there is now (`torch.cuda.reset_peak_memory_stats`)."""
        with self._lock:
            for level in self._levels():
                level.reset_peak()

    def reset_counts(self) -> None:
        """Sums and numbers of events begin at 0 (`torch.cuda.reset_accumulated_memory_stats`)."""
        with self._lock:
            for level in self._levels():
                level.reset_total()
            source = self._allocator.source
            self._num_taken_before, self._num_returned_before = source.num_taken, source.num_returned
            self.num_retries = self.num_failures = self._num_syncs = 0

    def _levels(self) -> list[Level]:
        self._all.add(self._small, self._large)
        # Those of `active` are those of `allocation`; resetting them twice would lose a sum.
        pools = (self._all, self._small, self._large)
        levels = {id(level): level for pool in pools for _, level in pool.levels()}
        return [*levels.values(), self._oversize, self._oversize_segments]

    def stats(self) -> dict[str, int]:
        """All that `torch.cuda.memory_stats()` shows, under its names."""
        with self._lock:
            self._all.add(self._small, self._large)
            source = self._allocator.source
            max_split_bytes = self._allocator.max_split_bytes
            found = {
                f"{name}.{pool}.{key}": value
                for pool, statistics in (("all", self._all), ("small_pool", self._small), ("large_pool", self._large))
                for name, level in statistics.levels()
                for key, value in level.items()
            }
            for name, level in (
                ("oversize_allocations", self._oversize),
                ("oversize_segments", self._oversize_segments),
            ):
                found |= {f"{name}.{key}": value for key, value in level.items()}
            return found | {
                "num_alloc_retries": self.num_retries,
                "num_ooms": self.num_failures,
                "num_sync_all_streams": self._num_syncs,
                "num_device_alloc": source.num_taken - self._num_taken_before,
                "num_device_free": source.num_returned - self._num_returned_before,
                # A size without limit is the greatest one upstream, which Python sees as -1.
                "max_split_size": -1 if max_split_bytes == NO_LIMIT else max_split_bytes,
            }

    def device_request_bytes(self, size_bytes: int) -> int:
        """What is asked of the device when nothing in the cache serves `size_bytes`; PyTorch's errors name it."""
        return segment_size(round_size(size_bytes, self._divisions))

    def segments(self) -> list[list[Block]]:
        """The blocks of each segment, or of each mapped stretch of an expandable one, in the order of addresses."""
        with self._lock:
            pools = (self._allocator.small, self._allocator.large)
            blocks = [*self._live, *(block for pool in pools for block in pool.by_key.values())]
            heads = [block for block in blocks if block.prev is None or block.prev.state == UNMAPPED]
            heads.sort(key=lambda block: (block.pool is pools[1], block.address))
            return [_stretch(head) for head in heads]


def _stretch(head: Block) -> list[Block]:
    found = []
    block: Block | None = head
    while block is not None and block.state != UNMAPPED:
        found.append(block)
        block = block.next
    return found
