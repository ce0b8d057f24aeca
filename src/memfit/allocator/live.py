"""The caching allocator while a program runs: block by block, with the counters that PyTorch would show.

`replay` has the whole timeline before it starts. A program that runs on a simulated device asks for one block
after another, may empty the cache, reset peaks or read statistics in between, and has to hear at once when the device
is full. Both use the same `CachingAllocator`; this module adds what such a program can ask.

Each quantity that `torch.cuda.memory_stats()` shows has a current value, the peak since the last reset, and how much it
rose and fell in all since the last reset (`c10/core/CachingDeviceAllocator.h`, `Stat`), once for each pool and once for
both together.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import final

from memfit.allocator.caching import CachingAllocator
from memfit.allocator.pool import FREE, IN_USE, UNMAPPED, Pool, PoolBlock
from memfit.allocator.rounding import (
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    NO_LIMIT,
    SMALL_BYTES,
    round_size,
    segment_size,
)
from memfit.allocator.settings import parse_options
from memfit.allocator.shared import SharedDevice
from memfit.core import env
from memfit.core.device import Device
from memfit.core.replay import AllocatorOptions

Configure = Callable[[Callable[[str], None]], None]


@final
class Level:
    """A quantity that rises and falls (`Stat`)."""

    def __init__(self) -> None:
        self.current = self.peak = 0
        # The sum of all rises. That of all falls follows from it and from the value at the last reset.
        self.total = self.base = self.before = 0

    def add(self, change: int) -> None:
        """One rise or one fall."""
        self.current = current = self.current + change
        if change > 0:
            self.total += change
            if current > self.peak:
                self.peak = current

    def move_through(self, current: int, risen: int) -> None:
        """Takes a new value after several rises and falls; `risen` is the sum of all rises since the beginning."""
        self.total = risen - self.before
        self.peak = max(self.peak, current)
        self.current = current

    def reset_total(self) -> None:
        """Nothing has risen or fallen yet."""
        self.before += self.total
        self.total = 0
        self.base = self.current

    def items(self) -> tuple[tuple[str, int], ...]:
        """Names and values as `torch.cuda.memory_stats()` has them."""
        freed = self.total - (self.current - self.base)
        return ("current", self.current), ("peak", self.peak), ("allocated", self.total), ("freed", freed)


@final
class PoolStatistics:
    """What is counted for the small pools, the large ones, or both.

    A block is active exactly as long as it is allocated, so that `active` is `allocation`: in a simulation no other
    stream is ever behind.
    """

    def __init__(self) -> None:
        self.allocation, self.allocated_bytes, self.requested_bytes = Level(), Level(), Level()
        self.segment, self.reserved_bytes = Level(), Level()
        self.inactive_split, self.inactive_split_bytes = Level(), Level()
        # Segments that are free as a whole; all other free blocks are inactive splits.
        self.num_whole = self.whole_bytes = 0

    def count(self, block: PoolBlock, sign: int) -> None:
        """Books a block that was handed out (1) or is taken back (-1)."""
        self.allocation.add(sign)
        self.allocated_bytes.add(sign * block.size)
        self.requested_bytes.add(sign * block.requested)

    def levels(self) -> dict[str, Level]:
        """Each quantity by its name."""
        own = {name: value for name, value in vars(self).items() if isinstance(value, Level)}
        return {**own, "active": self.allocation, "active_bytes": self.allocated_bytes}


@final
class LiveAllocator:
    """The memory of one device as one process sees it.

    May be used from several threads, and blocks may be freed while a call is under way: Python's garbage collector can
    drop the last reference to a tensor at any moment. The capacity is what the device can give to segments, without the
    CUDA context; None: no limit.
    """

    def __init__(self, options: AllocatorOptions, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.limit_bytes: int | None = None
        """What the process allows itself, or None."""
        self._lock = threading.RLock()
        self._waiting: deque[PoolBlock] = deque()
        self._busy = False
        self._live: set[PoolBlock] = set()
        self._small, self._large, self._all = PoolStatistics(), PoolStatistics(), PoolStatistics()
        self._oversize, self._oversize_segments = Level(), Level()
        self.allocated_bytes = self.reserved_bytes = self.num_segments = self.num_retries = self.num_failures = 0
        self._num_syncs = self._num_retries_before = 0
        self._num_taken = self._num_taken_before = self._num_returned_before = 0
        self._set_up(options)

    def _set_up(self, options: AllocatorOptions) -> None:
        self.options = options
        self._allocator = CachingAllocator(options, self.capacity_bytes)
        self._divisions = options.roundup_power2_divisions
        # Upstream leaves expandable segments out, because wholly free pages can always be returned.
        self._tracks_splits = not options.expandable_segments

    def share(self, device: SharedDevice | None) -> None:
        """From now on the device's memory is shared with other processes; None: no longer."""
        with self._lock:
            self._allocator.shared = device

    @property
    def others_bytes(self) -> int:
        """What other processes hold on the device."""
        shared = self._allocator.shared
        return 0 if shared is None else shared.others_bytes()

    def configure(self, options: AllocatorOptions) -> bool:
        """Takes other settings, as PyTorch does until the first allocation; False when it is too late."""
        with self._lock:
            if self._all.allocation.peak or self.num_failures:
                return False
            if options != self.options:
                shared = self._allocator.shared
                self._set_up(options)
                self._allocator.shared = shared
                self.limit(self.limit_bytes)
            return True

    def limit(self, limit_bytes: int | None) -> None:
        """Allows the process this much (`torch.cuda.set_per_process_memory_fraction`); None: all there is."""
        bounds = [bound for bound in (self.capacity_bytes, limit_bytes) if bound is not None]
        with self._lock:
            self.limit_bytes = limit_bytes
            self._allocator.source.capacity_bytes = min(bounds, default=NO_LIMIT)

    def malloc(self, size_bytes: int, stream: int = 0) -> PoolBlock | None:
        """A block of at least `size_bytes`; None when the device is full, even after the cache was released.

        Streams are known by any number; 0 is the default one.
        """
        with self._lock:
            nested, self._busy = self._busy, True
            try:
                if self._divisions > 1:
                    size = round_size(size_bytes, self._divisions) if size_bytes else 0
                else:
                    size = -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
                allocator = self._allocator
                if not size:
                    return PoolBlock(allocator.small, 0, 0, IN_USE)
                block = allocator.malloc(size, allocator.pools_of(stream) if stream else None)
                is_new = allocator.source.num_taken != self._num_taken
                if is_new or block is None:
                    self._follow_source()
                    if block is None:
                        self.num_failures += 1
                        return None
                block.requested = size_bytes
                self._live.add(block)
                pool = self._small if size <= SMALL_BYTES else self._large
                pool.count(block, 1)
                self._all.count(block, 1)
                self.allocated_bytes += block.size
                if block.size >= allocator.max_split_bytes:
                    self._oversize.add(1)
                if self._tracks_splits:
                    if not is_new and block.prev is None:
                        rest = block.next
                        if rest is None or (rest.state == FREE and rest.next is None):
                            # Free neighbours are always joined: block and rest were a whole segment.
                            pool.num_whole -= 1
                            pool.whole_bytes -= block.size if rest is None else block.size + rest.size
                    self._follow_splits(block.pool, pool)
                return block
            finally:
                self._busy = nested
                if self._waiting:
                    self._settle()

    def free(self, block: PoolBlock) -> None:
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

    def _settle(self) -> None:
        """Takes back the blocks that are waiting, unless a call is under way: that one will, when it ends."""
        while self._waiting and not self._busy:
            with self._lock:
                nested, self._busy = self._busy, True
                try:
                    while self._waiting:
                        self._free(self._waiting.popleft())
                finally:
                    self._busy = nested

    def _free(self, block: PoolBlock) -> None:
        if not block.size:
            return
        allocator, pool = self._allocator, block.pool
        self._live.remove(block)
        statistics = self._large if pool.page_bytes == LARGE_SEGMENT_BYTES else self._small
        statistics.count(block, -1)
        self._all.count(block, -1)
        self.allocated_bytes -= block.size
        if block.size >= allocator.max_split_bytes:
            self._oversize.add(-1)
        allocator.free(block)
        if self._tracks_splits:
            if block.prev is None and block.next is None:
                statistics.num_whole += 1
                statistics.whole_bytes += block.size
            self._follow_splits(pool, statistics)

    def _follow_splits(self, pool: Pool, statistics: PoolStatistics) -> None:
        """Books what is free in a pool and can't be returned, because the rest of its segment is in use."""
        num_free, reserved = len(pool.keys), pool.reserved
        if self._allocator.has_streams:
            same_size = [pools[statistics is self._large] for pools in self._allocator.all_pools()]
            num_free, reserved = sum(len(one.keys) for one in same_size), sum(one.reserved for one in same_size)
        change = num_free - statistics.num_whole - statistics.inactive_split.current
        if change:
            statistics.inactive_split.add(change)
            self._all.inactive_split.add(change)
        unused_bytes = reserved - statistics.allocated_bytes.current - statistics.whole_bytes
        change = unused_bytes - statistics.inactive_split_bytes.current
        if change:
            statistics.inactive_split_bytes.add(change)
            self._all.inactive_split_bytes.add(change)

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
        every = allocator.all_pools()
        for size, statistics in enumerate((self._small, self._large)):
            same_size = [pools[size] for pools in every]
            _follow_pools(same_size, statistics)
            if self._tracks_splits:
                free = [block for pool in same_size for block in pool.by_key.values()]
                whole = [block.size for block in free if block.prev is None and block.next is None]
                statistics.num_whole, statistics.whole_bytes = len(whole), sum(whole)
        _follow_pools([pool for pools in every for pool in pools], self._all)
        self._oversize_segments.move_through(source.num_oversize, source.num_oversize_taken)
        self.reserved_bytes, self.num_segments = source.reserved, source.num_segments

    def reset_peaks(self) -> None:
        """Peaks begin at what there is now (`torch.cuda.reset_peak_memory_stats`)."""
        with self._lock:
            for level in self._levels().values():
                level.peak = level.current

    def reset_counts(self) -> None:
        """Sums and numbers of events begin at 0 (`torch.cuda.reset_accumulated_memory_stats`)."""
        with self._lock:
            # Those of `active` are those of `allocation`; resetting them twice would lose a sum.
            for level in set(self._levels().values()):
                level.reset_total()
            source = self._allocator.source
            self._num_taken_before, self._num_returned_before = source.num_taken, source.num_returned
            self.num_retries = self.num_failures = self._num_syncs = 0

    def _levels(self) -> dict[str, Level]:
        groups = {"all": self._all, "small_pool": self._small, "large_pool": self._large}
        levels = {f"{name}.{pool}": level for pool, group in groups.items() for name, level in group.levels().items()}
        return levels | {"oversize_allocations": self._oversize, "oversize_segments": self._oversize_segments}

    def stats(self) -> dict[str, int]:
        """All that `torch.cuda.memory_stats()` shows, under its names."""
        with self._lock:
            source = self._allocator.source
            max_split_bytes = self._allocator.max_split_bytes
            named = self._levels().items()
            values = {f"{name}.{key}": value for name, level in named for key, value in level.items()}
            return values | {
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

    def segments(self) -> list[list[PoolBlock]]:
        """The blocks of each segment, or of each mapped stretch of an expandable one, in the order of addresses."""
        with self._lock:
            pools = [pool for of_stream in self._allocator.all_pools() for pool in of_stream]
            blocks = [*self._live, *(block for pool in pools for block in pool.by_key.values())]
            heads = [block for block in blocks if block.prev is None or block.prev.state == UNMAPPED]
            heads.sort(key=lambda block: (block.pool.page_bytes, block.pool.stream, block.address))
            stretches = []
            for head in heads:
                stretch, block = [head], head.next
                while block is not None and block.state != UNMAPPED:
                    stretch.append(block)
                    block = block.next
                stretches.append(stretch)
            return stretches


def memory_of(device: Device, *, unlimited: bool = False) -> tuple[LiveAllocator, Configure]:
    """(the memory of `device`, a function that reads the settings anew as long as nothing has been allocated).

    The function takes what to call with a sentence for each setting that isn't simulated, or only roughly.
    """
    has_end = not unlimited and device.usable_bytes is not None
    capacity_bytes = max(1, (device.usable_bytes or 0) - (device.context_bytes or 0)) if has_end else None
    memory = LiveAllocator(parse_options(env.allocator_settings()), capacity_bytes)

    def configure(report: Callable[[str], None]) -> None:
        memory.configure(parse_options(env.allocator_settings(), report))

    return memory, configure


def _follow_pools(pools: list[Pool], statistics: PoolStatistics) -> None:
    segments, taken = sum(pool.num_segments for pool in pools), sum(pool.num_segments_taken for pool in pools)
    statistics.segment.move_through(segments, taken)
    statistics.reserved_bytes.move_through(sum(pool.reserved for pool in pools), sum(pool.taken for pool in pools))
