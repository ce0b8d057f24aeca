"""What a device held before its history began, as far as the history and the end of it tell.

Recording may begin late, and a full buffer drops its oldest entries. What is freed and was never allocated in the
history was there before; so was what is there at the end and was never allocated. The same goes for segments.

The end of a block in a snapshot's list is exact. A freed one tells only how much was asked for: the block was as large
as that rounded up, or larger by what was too little to split off. In the large pool that is up to 1 MiB, and no free
block there is as small, so that a short gap belongs to the block before it; in a longer gap the next block to be
allocated shows where the free block began.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from memfit.allocator.caching import NO_POOL_ID, PoolId
from memfit.allocator.rounding import LARGE_SEGMENT_BYTES, NO_LIMIT, SMALL_BYTES, SMALL_SEGMENT_BYTES
from memfit.snapshots.reader import (
    ALLOCATED,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOCATED,
    SEGMENT_FREED,
    SEGMENT_MAPPED,
    SEGMENT_UNMAPPED,
    Event,
    MemorySnapshot,
    Segment,
)

_OF_BLOCKS = (ALLOCATED, FREE_REQUESTED, FREE_COMPLETED)


@dataclass(slots=True)
class OldSegment:
    """A segment, or a mapped stretch of an expandable one, that was there before the history.

    `used` holds (address, bytes, whether another stream still used what the program had freed).
    """

    address: int
    size_bytes: int
    stream: int
    pool_id: PoolId
    is_large: bool
    is_expandable: bool
    used: list[tuple[int, int, bool]] = field(default_factory=list)


@dataclass(slots=True)
class State:
    """All that was there, by address; the private pools' ranges at the end as (address, end, pool), sorted."""

    segments: list[OldSegment]
    pool_ids: list[tuple[int, int, PoolId]]
    num_unknown: int = 0


@dataclass(slots=True)
class _OldBlock:
    address: int
    size_bytes: int
    is_exact: bool
    is_waiting: bool
    freed_at: int


def find_beginning(
    snapshot: MemorySnapshot, events: Sequence[Event], rounded: Callable[[int], int], max_split_bytes: int
) -> State:
    """What was there before the first event; `rounded` makes a block's bytes of a request's."""
    at_end = [segment for segment in snapshot.segments if segment.device == events[0].device]
    ranges = sorted((one.address, one.address + one.total_bytes, one.pool) for one in at_end if one.pool != NO_POOL_ID)
    segments = _segments(at_end, events) + _stretches(at_end, events)
    segments.sort(key=lambda segment: segment.address)
    state = State(segments, ranges)
    starts = [segment.address for segment in segments]
    inside: list[list[_OldBlock]] = [[] for _ in segments]
    for block in _blocks(at_end, events, rounded):
        index = bisect_right(starts, block.address) - 1
        if index < 0 or block.address + block.size_bytes > starts[index] + segments[index].size_bytes:
            state.num_unknown += 1
        else:
            inside[index].append(block)
    allocations = sorted((event.address or 0, n) for n, event in enumerate(events) if event.action == ALLOCATED)
    for segment, blocks in zip(segments, inside, strict=True):
        _settle(segment, blocks, allocations, max_split_bytes)
    return state


def _blocks(at_end: Sequence[Segment], events: Sequence[Event], rounded: Callable[[int], int]) -> list[_OldBlock]:
    """The blocks in use; those that are freed in the history have their smallest size."""
    old: list[_OldBlock] = []
    live: set[int] = set()
    waiting: set[int] = set()
    for position, event in enumerate(events):
        address = event.address or 0
        if event.action == ALLOCATED:
            live.add(address)
        elif event.action == FREE_REQUESTED:
            if address not in live:
                old.append(_OldBlock(address, rounded(event.size_bytes), False, False, position))
            live.discard(address)
            waiting.add(address)
        elif event.action == FREE_COMPLETED:
            if address not in waiting and address not in live:
                old.append(_OldBlock(address, rounded(event.size_bytes), False, True, position))
            waiting.discard(address)
            live.discard(address)
    for segment in at_end:
        for block in segment.blocks:
            if block.state != "inactive" and block.address not in live and block.address not in waiting:
                is_waiting = not block.is_allocated
                old.append(_OldBlock(block.address, block.size_bytes, True, is_waiting, len(events)))
    return sorted(old, key=lambda block: block.address)


def _segments(at_end: Sequence[Segment], events: Sequence[Event]) -> list[OldSegment]:
    """Segments of `cudaMalloc`."""
    old: list[OldSegment] = []
    new: set[int] = set()
    for event in events:
        address = event.address or 0
        if event.action == SEGMENT_ALLOCATED:
            new.add(address)
        elif event.action == SEGMENT_FREED:
            if address not in new:
                pool_id, is_large = pool_id_of(event) or NO_POOL_ID, event.size_bytes != SMALL_SEGMENT_BYTES
                old.append(OldSegment(address, event.size_bytes, event.stream, pool_id, is_large, False))
            new.discard(address)
    for one in at_end:
        if not one.is_expandable and one.address not in new:
            old.append(OldSegment(one.address, one.total_bytes, one.stream, one.pool, one.kind != "small", False))
    return old


def _stretches(at_end: Sequence[Segment], events: Sequence[Event]) -> list[OldSegment]:
    """Mapped stretches of expandable segments: those of the end, with what was mapped or unmapped undone."""
    owners: dict[int, tuple[int, PoolId, bool]] = {}
    sizes = sorted((event.address or 0, event.size_bytes) for event in events if event.action in _OF_BLOCKS)
    for one in at_end:
        if one.is_expandable:
            owner = (one.stream, one.pool, one.kind != "small")
            owners.update(dict.fromkeys(_pages(one.address, one.total_bytes), owner))
    for event in reversed(events):
        if event.action == SEGMENT_MAPPED:
            for page in _pages(event.address or 0, event.size_bytes):
                owners.pop(page, None)
        elif event.action == SEGMENT_UNMAPPED:
            address, end = event.address or 0, (event.address or 0) + event.size_bytes
            inside = sizes[bisect_left(sizes, (address, 0)) : bisect_left(sizes, (end, 0))][:1]
            # By a block that was there; where there was none, by the size of the pages.
            is_large = inside[0][1] > SMALL_BYTES if inside else event.size_bytes % LARGE_SEGMENT_BYTES == 0
            owner = (event.stream, pool_id_of(event) or NO_POOL_ID, is_large)
            owners.update(dict.fromkeys(_pages(address, event.size_bytes), owner))
    stretches: list[OldSegment] = []
    for page in sorted(owners):
        address, (stream, pool_id, is_large) = page * SMALL_SEGMENT_BYTES, owners[page]
        last = stretches[-1] if stretches else None
        if (
            last is not None
            and last.address + last.size_bytes == address
            and (last.stream, last.pool_id, last.is_large) == owners[page]
        ):
            last.size_bytes += SMALL_SEGMENT_BYTES
        else:
            stretches.append(OldSegment(address, SMALL_SEGMENT_BYTES, stream, pool_id, is_large, is_expandable=True))
    return stretches


def _pages(address: int, size_bytes: int) -> range:
    """Numbers of the smallest pages that a range has; pages of both sizes begin at multiples of those."""
    return range(address // SMALL_SEGMENT_BYTES, (address + size_bytes) // SMALL_SEGMENT_BYTES)


def _settle(
    segment: OldSegment, blocks: list[_OldBlock], allocations: Sequence[tuple[int, int]], max_split_bytes: int
) -> None:
    """Gives the blocks of a segment their sizes: none reaches into the next, and slack belongs to the block before."""
    end = segment.address + segment.size_bytes
    has_slack = segment.is_large and not segment.is_expandable
    starts = [*(block.address for block in blocks), end]
    for block, following in zip(blocks, starts[1:], strict=True):
        gap = following - block.address - block.size_bytes
        if gap < 0:
            block.size_bytes += gap
        elif has_slack and not block.is_exact:
            if gap <= SMALL_BYTES or max_split_bytes <= block.size_bytes < NO_LIMIT:
                block.size_bytes += gap
            else:
                block.size_bytes += _slack(block, allocations)
        if block.size_bytes > 0:
            segment.used.append((block.address, block.size_bytes, block.is_waiting))


def _slack(block: _OldBlock, allocations: Sequence[tuple[int, int]]) -> int:
    """What the block has over, by the first allocation behind it while it lived; 0 where there is none."""
    end = block.address + block.size_bytes
    first, last = bisect_left(allocations, (end, 0)), bisect_right(allocations, (end + SMALL_BYTES, NO_LIMIT))
    behind = [(position, address) for address, position in allocations[first:last] if position < block.freed_at]
    return min(behind)[1] - end if behind else 0


def pool_id_of(event: Event) -> PoolId | None:
    """The private pool that an event names, (0, 0) for none; events of PyTorch before 2.12 don't tell: None."""
    given = event.raw.get("pool_id")
    if isinstance(given, Sequence) and len(given) == 2 and all(type(number) is int for number in given):
        return given[0], given[1]
    return None
