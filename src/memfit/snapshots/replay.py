"""Replays the requests of a real device through the model of the caching allocator, and compares.

The model is given what the program and the device decided: requests and frees with their stream and private pool, when
another stream was done with a block, when the cache was emptied or the device was full. It decides itself which free
block serves a request, when a segment is needed and how large it is, and which segments go when the cache is released.
Each of its segments is compared with the real one, and, with `driver_addresses`, each block's place.

The driver's addresses belong to what the device decides: they break ties between free blocks of the same size.
Without them, new segments get rising addresses.
"""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from memfit.allocator.caching import NO_POOL_ID, CachingAllocator, PoolId, StreamPools
from memfit.allocator.pool import ADDRESS_BITS, Pool, PoolBlock
from memfit.allocator.rounding import NO_LIMIT, SMALL_BYTES, round_size
from memfit.core.errors import BadFile
from memfit.core.replay import AllocatorOptions
from memfit.core.units import MIB
from memfit.snapshots.beginning import State, find_beginning, pool_id_of
from memfit.snapshots.reader import (
    ALLOCATED,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OUT_OF_MEMORY,
    SEGMENT_ALLOCATED,
    SEGMENT_FREED,
    SEGMENT_MAPPED,
    SEGMENT_UNMAPPED,
    Event,
    MemorySnapshot,
)

_GROWS = (SEGMENT_ALLOCATED, SEGMENT_MAPPED)
_SHRINKS = (SEGMENT_FREED, SEGMENT_UNMAPPED)
# Where segments go that the driver never made: above every address of a device.
_INVENTED = 1 << 55
# No device has as much; pages of segments are counted one by one.
_MOST_SEGMENT_BYTES = 1 << 42

# What happened to a segment, its bytes and its stream.
_Change = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event at which the model took or returned other segments than the device did."""

    event: int
    real: tuple[str, ...]
    simulated: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SnapshotReplay:
    """What the model made of the requests of one device.

    Args:
        num_events: entries of the history.
        num_allocations: requests that were served, or failed, on the device.
        num_segments: segments, or stretches of pages, that the device took or returned.
        num_simulated: those of the model.
        num_matching: those of the same kind, size and stream at the same event.
        reserved_peak_bytes: of the device.
        simulated_peak_bytes: of the model.
        num_placed: requests that got the same address; means something with the driver's addresses only.
        num_failures: requests for which the device was out of memory.
        num_failures_matching: those for which the model was, too.
        num_unknown: frees of blocks, and blocks at the end, that fit into no segment that is known.
        difference: the first one, or None.
        before: (allocated, reserved) bytes of the model and of the device before the first event.
        levels: the same after each event. What is allocated is exact with the driver's addresses.
    """

    num_events: int
    num_allocations: int
    num_segments: int
    num_simulated: int
    num_matching: int
    reserved_peak_bytes: int
    simulated_peak_bytes: int
    num_placed: int
    num_failures: int
    num_failures_matching: int
    num_unknown: int
    difference: Difference | None
    before: tuple[int, int]
    levels: tuple[tuple[int, int], ...] = field(repr=False)

    @property
    def is_exact(self) -> bool:
        """Whether every segment, every failure and the peak are the device's."""
        return (
            self.num_segments == self.num_simulated == self.num_matching
            and self.reserved_peak_bytes == self.simulated_peak_bytes
            and self.num_failures == self.num_failures_matching
        )


def replay_snapshot(
    snapshot: MemorySnapshot, device: int | None = None, *, driver_addresses: bool = False
) -> SnapshotReplay:
    """Replays the history of a device; without a number, of the only one that has any.

    Raises:
        BadFile: there is no such history, or it holds what no device does.
    """
    events = snapshot.history(device)
    _check(snapshot, events)
    try:
        return _Replaying(snapshot, events, driver_addresses).run()
    except (KeyError, IndexError, ValueError) as error:
        raise BadFile(
            f"{snapshot.path} has events that contradict each other, such as a segment that is freed while a block of "
            "it is in use. The file is damaged: write or copy it again."
        ) from error


def options_of(snapshot: MemorySnapshot, events: Sequence[Event]) -> AllocatorOptions:
    """The settings with which a history was recorded; without them, the defaults and what the segments show.

    Divisions are left to `divisions_of`, because they may differ by size. Garbage is collected only where a program
    limits its share of the device, which no snapshot tells.
    """
    settings = snapshot.settings
    max_split = _number(settings, "max_split_size", -1)
    is_expandable = any(event.action == SEGMENT_MAPPED for event in events) or any(
        segment.is_expandable for segment in snapshot.segments if segment.device == events[0].device
    )
    return AllocatorOptions(
        expandable_segments=is_expandable, max_split_size_bytes=max_split if 20 * MIB <= max_split < NO_LIMIT else None
    )


def _private_pools_grow(snapshot: MemorySnapshot, events: Sequence[Event]) -> bool:
    """Whether private pools have expandable segments where others do: they have no plain ones."""
    private = [one for one in snapshot.segments if one.pool != NO_POOL_ID and one.device == events[0].device]
    named = any(event.action == SEGMENT_ALLOCATED and pool_id_of(event) not in (None, NO_POOL_ID) for event in events)
    return not named and all(one.is_expandable for one in private)


def divisions_of(settings: Mapping[str, Any], size_bytes: int) -> int:
    """`roundup_power2_divisions` for a size: one for each power of two, from 1 MiB to 32 GiB."""
    divisions = settings.get("roundup_power2_divisions")
    if not isinstance(divisions, Mapping):
        return 0
    power = min(max(size_bytes.bit_length() - 21, 0), 15)
    return _number(divisions, str(1 << power), 0)


def _number(values: Mapping[str, Any], name: str, default: int) -> int:
    value = values.get(name, default)
    return value if type(value) is int else default


def _check(snapshot: MemorySnapshot, events: Sequence[Event]) -> None:
    """Refuses what no device does, before anything is computed of it."""
    limit = 1 << ADDRESS_BITS - 1
    changes = (*_GROWS, *_SHRINKS)
    # What is asked for may be any number, and is refused by the device.
    ranges = [
        (event.address or 0, event.size_bytes, _MOST_SEGMENT_BYTES if event.action in changes else limit)
        for event in events
    ]
    ranges += [(segment.address, segment.total_bytes, _MOST_SEGMENT_BYTES) for segment in snapshot.segments]
    ranges += [(block.address, block.size_bytes, limit) for segment in snapshot.segments for block in segment.blocks]
    for address, size_bytes, most_bytes in ranges:
        if not (0 <= address < limit and 0 <= size_bytes < most_bytes):
            raise BadFile(
                f"{snapshot.path} has {size_bytes} bytes at address {address}, which no device has. "
                "The file is damaged, or no snapshot of a GPU: write or copy it again."
            )


@final
class _Replaying:
    """One run of the model over a history, with the device's own segments beside it."""

    def __init__(self, snapshot: MemorySnapshot, events: Sequence[Event], driver_addresses: bool) -> None:
        self._settings, self._events = snapshot.settings, events
        self._model = CachingAllocator(options_of(snapshot, events), None)
        self._model.private_pools_grow = _private_pools_grow(snapshot, events)
        # A recording may leave out when a free was completed (`skip_actions`): then it was at once.
        self._completes = any(event.action == FREE_COMPLETED for event in events)
        self._source = self._model.source
        self._max_split_bytes = self._model.max_split_bytes
        self._held: dict[int, PoolBlock] = {}
        self._waiting: dict[int, PoolBlock] = {}
        # The real segments since the last request, and the model's.
        self._batch: list[Event] = []
        self._changes: list[_Change] = []
        self._addresses: deque[tuple[int, int]] = deque()
        self._invented = _INVENTED
        self._num_segments = self._num_simulated = self._num_matching = 0
        self._num_allocations = self._num_placed = self._num_failures = self._num_failures_matching = 0
        self._difference: Difference | None = None
        self._position = 0
        beginning = find_beginning(snapshot, events, self._round, self._max_split_bytes)
        self._pool_ids, self._num_unknown = beginning.pool_ids, beginning.num_unknown
        self._begin(beginning)
        self._reserved = self._peak = self._simulated_peak = self._source.reserved
        self._before_batch = self._highest = self._reserved
        self._levels: list[tuple[int, int]] = []
        self._before = (self._model.allocated, self._reserved)
        self._source.watch = self._note
        if driver_addresses:
            self._source.place = self._place

    def _begin(self, beginning: State) -> None:
        for segment in beginning.segments:
            pools = self._model.pools_of(segment.stream, segment.pool_id)
            if segment.is_expandable != pools.large.is_expandable:
                # From before the program has changed the allocator's settings.
                self._num_unknown += 1 + len(segment.used)
                continue
            used = [(address, size) for address, size, _ in segment.used]
            blocks = self._model.adopt(pools, segment.is_large, (segment.address, segment.size_bytes), used)
            for block, (_, _, is_waiting) in zip(blocks, sorted(segment.used), strict=True):
                if is_waiting:
                    self._model.free_later(block)
                    self._waiting[block.address] = block
                else:
                    self._held[block.address] = block

    def run(self) -> SnapshotReplay:
        """Goes through all events."""
        for position, event in enumerate(self._events):
            self._position = position
            action = event.action
            if action in _GROWS or action in _SHRINKS:
                self._follow(event)
            elif action in (ALLOCATED, OUT_OF_MEMORY):
                self._allocate(event)
            elif action == FREE_REQUESTED:
                self._empty_cache()
                self._free(event)
            elif action == FREE_COMPLETED:
                self._complete(event)
            self._levels.append((self._model.allocated, self._reserved))
        self._empty_cache()
        return SnapshotReplay(
            num_events=len(self._events),
            num_allocations=self._num_allocations,
            num_segments=self._num_segments,
            num_simulated=self._num_simulated,
            num_matching=self._num_matching,
            reserved_peak_bytes=self._peak,
            simulated_peak_bytes=self._simulated_peak,
            num_placed=self._num_placed,
            num_failures=self._num_failures,
            num_failures_matching=self._num_failures_matching,
            num_unknown=self._num_unknown,
            difference=self._difference,
            before=self._before,
            levels=tuple(self._levels),
        )

    def _follow(self, event: Event) -> None:
        """A real segment: it is compared when it is known what it was for."""
        self._batch.append(event)
        self._reserved += event.size_bytes if event.action in _GROWS else -event.size_bytes
        self._peak = max(self._peak, self._reserved)
        self._highest = max(self._highest, self._reserved)

    def _allocate(self, event: Event) -> None:
        """A request, with what the device did for it."""
        size = self._round(event.size_bytes)
        pools = self._pools(event, size)
        released = [change for change in self._batch if change.action in _SHRINKS]
        failed = event.action == OUT_OF_MEMORY
        has_grown = bool(self._batch) and self._batch[-1].action in _GROWS
        self._addresses = deque(
            (change.size_bytes, change.address or 0) for change in self._batch if change.action in _GROWS
        )
        # A cache that is released for a request held nothing that served it; otherwise it was emptied before. Pages
        # that a program unmapped itself may be fewer than those it maps for the request, which tells nothing; emptying
        # first is then the same, unless that completes a block that would serve.
        was_emptied = not has_grown or _has_free(pools, size)
        is_expandable = pools.large.is_expandable
        if is_expandable and not self._waiting:
            was_emptied |= bool(self._batch) and self._batch[0].action in _SHRINKS
        if released and not failed and was_emptied:
            self._release(released)
        elif released or failed:
            # The device was full. It had room for as much as it gave in the end, and not for more.
            for change in released:
                self._end_private(change)
            most = self._highest if is_expandable and not failed else self._reserved
            self._source.capacity_bytes = self._source.reserved + most - self._before_batch
        # For a private pool the cache is released in newer versions only, and never while a graph is captured.
        is_private = pools is not self._model.pools_of(event.stream)
        before = self._events[self._position - 1].action if self._position else ""
        self._model.is_capturing = is_private and not released and before != FREE_COMPLETED
        block = self._model.malloc(size, pools) if size else None
        self._model.is_capturing = False
        self._source.capacity_bytes = NO_LIMIT
        self._num_allocations += 1
        if failed:
            self._num_failures += 1
            self._num_failures_matching += block is None
            if block is not None:
                self._model.free(block)
        elif block is not None and event.address is not None:
            self._num_placed += block.address == event.address
            self._held[event.address] = block
        self._compare()

    def _pools(self, event: Event, size: int) -> StreamPools:
        """The pools that served a request, or could not."""
        pools = self._model.pools_of(event.stream, self._pool_id(event))
        if event.action == OUT_OF_MEMORY and pool_id_of(event) is None and _has_free(pools, size):
            # It failed, so that it was for a private pool, which such events of older versions don't name.
            for pool_id in sorted({pool_id for _, _, pool_id in self._pool_ids}):
                private = self._model.pools_of(event.stream, pool_id)
                if not _has_free(private, size):
                    return private
        return pools

    def _free(self, event: Event) -> None:
        address = event.address or 0
        block = self._held.pop(address, None)
        if block is None:
            return
        following = self._events[self._position + 1 : self._position + 2]
        is_next = following and following[0].action == FREE_COMPLETED and following[0].address == event.address
        if is_next or not self._completes:
            self._model.free(block)
        else:
            self._model.free_later(block)
            self._waiting[address] = block

    def _complete(self, event: Event) -> None:
        address = event.address or 0
        if address in self._held:
            # The recording has left out that it was requested.
            self._empty_cache()
            self._model.free(self._held.pop(address))
        elif address in self._waiting and not self._is_before_release():
            self._model.complete(self._waiting.pop(address))

    def _empty_cache(self) -> None:
        """What was released since the last request was released for none: the program emptied the cache."""
        released = [change for change in self._batch if change.action in _SHRINKS]
        if released:
            self._release(released)
        if self._batch:
            self._compare()

    def _release(self, released: Sequence[Event]) -> None:
        pool_ids = [self._end_private(change) for change in released]
        if NO_POOL_ID in pool_ids:
            self._model.release_cached()
        else:
            for pool_id in dict.fromkeys(pool_ids):
                self._model.release_private(pool_id)

    def _end_private(self, change: Event) -> PoolId:
        """A private pool that returns a segment is one that nothing uses any more."""
        pool_id = self._pool_id(change)
        if pool_id != NO_POOL_ID:
            self._model.end_private(pool_id)
        return pool_id

    def _is_before_release(self) -> bool:
        """Whether the next that happens is a release of the cache, which waits for other streams by itself."""
        for position in range(self._position + 1, len(self._events)):
            action = self._events[position].action
            if action in _SHRINKS or action == OUT_OF_MEMORY:
                return True
            if action != FREE_COMPLETED:
                return False
        return False

    def _compare(self) -> None:
        """Compares the segments of a request, or of an emptied cache."""
        # What the model's release has completed by itself.
        for address in [address for address, block in self._waiting.items() if not self._model.is_waiting(block)]:
            del self._waiting[address]
        real = [(change.action, change.size_bytes, change.stream) for change in self._batch]
        changes = self._changes
        if real or changes:
            self._num_segments += len(real)
            self._num_simulated += len(changes)
            self._num_matching += sum((Counter(real) & Counter(changes)).values())
            if real != changes and self._difference is None:
                self._difference = Difference(self._position, _shown(real), _shown(changes))
            self._batch, self._changes = [], []
        self._before_batch = self._highest = self._reserved

    def _note(self, action: str, pool: Pool, _address: int, size_bytes: int) -> None:
        self._changes.append((action, size_bytes, pool.stream))
        self._simulated_peak = max(self._simulated_peak, self._source.reserved)

    def _place(self, pool: Pool, size_bytes: int) -> int:
        """Where the driver put the segment that the model asks for; 0 bytes are the space of an expandable one."""
        for index, (real_bytes, address) in enumerate(self._addresses):
            if size_bytes in (0, real_bytes):
                del self._addresses[index]
                return address
        self._invented += max(size_bytes, MIB)
        return self._invented - max(size_bytes, MIB)

    def _pool_id(self, event: Event) -> PoolId:
        named = pool_id_of(event)
        if named is not None:
            return named
        if not self._pool_ids or event.address is None:
            return NO_POOL_ID
        index = bisect_right(self._pool_ids, (event.address, NO_LIMIT, NO_POOL_ID)) - 1
        if index < 0:
            return NO_POOL_ID
        _, end, pool_id = self._pool_ids[index]
        return pool_id if event.address < end else NO_POOL_ID

    def _round(self, size_bytes: int) -> int:
        return round_size(size_bytes, divisions_of(self._settings, size_bytes)) if size_bytes else 0


def _has_free(pools: StreamPools, size: int) -> bool:
    keys = pools[size > SMALL_BYTES].keys
    return bool(keys) and keys[-1] >= size << ADDRESS_BITS


def _shown(changes: Sequence[_Change]) -> tuple[str, ...]:
    return tuple(f"{action} {size_bytes} on stream {stream}" for action, size_bytes, stream in changes)
