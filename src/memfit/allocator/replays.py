"""What a device must provide for a whole timeline: the events one after another, on each kind of allocator."""

from collections.abc import Container
from itertools import accumulate
from typing import Any

from memfit.allocator.bfc import BestFitAllocator
from memfit.allocator.caching import CachingAllocator, StreamPools
from memfit.allocator.rounding import MIN_BLOCK_BYTES, round_size
from memfit.core.replay import AllocatorOptions, OutOfMemory, Replay
from memfit.core.timeline import Category, Timeline, is_optional

DEFAULT_OPTIONS = AllocatorOptions()


def replay(
    timeline: Timeline, options: AllocatorOptions = DEFAULT_OPTIONS, capacity_bytes: int | None = None
) -> Replay:
    """Memory over time as PyTorch's CUDA caching allocator would hold it.

    The first allocation that doesn't fit into the capacity, even after the cache was released, ends the replay: nothing
    is allocated or freed from there on, and that tick and all later ones show the state in which the allocator raised
    its error. Blocks of 0 bytes take nothing. A workspace that cuDNN can do without is left out where it doesn't fit:
    PyTorch takes the next algorithm then (`try_configs` in Conv_v8.cpp), but the cache has been released for it.
    """
    return _cached(timeline, options, capacity_bytes, _requests(timeline), signed_events(timeline))


def replay_otherwise(timeline: Timeline, options: AllocatorOptions, share: float) -> Replay:
    """Memory over time if libraries took what they take in another way that nobody can rule out.

    The workspaces that they keep are taken before anything else, as by a program that has used them before, and those
    that they can do without are `share` as large.
    """
    blocks = timeline.blocks
    requests = _requests(timeline)
    kept = []
    for number, block in enumerate(blocks, 1):
        if block.category is Category.WORKSPACE:
            if block.end is None:
                kept.append(number)
            elif is_optional(block.category, block.op):
                requests[number] = round(share * block.size_bytes)
    events = signed_events(timeline)
    first = set(kept)
    return _cached(timeline, options, None, requests, [*kept, *(event for event in events if event not in first)])


def _cached(
    timeline: Timeline, options: AllocatorOptions, capacity_bytes: int | None, requests: list[int], events: list[int]
) -> Replay:
    """What the caching allocator makes of these requests in this order."""
    allocator = CachingAllocator(options, capacity_bytes)
    divisions = options.roundup_power2_divisions
    if divisions > 1:
        sizes = [round_size(size, divisions) if size else 0 for size in requests]
    else:
        # `round_size` without a call for each.
        sizes = [-(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES for size in requests]
    streams = [0, *(block.stream for block in timeline.blocks)]
    pools = [allocator.pools_of(stream) for stream in streams] if any(streams) else None
    optional = {number for number, block in enumerate(timeline.blocks, 1) if is_optional(block.category, block.op)}
    return _replayed(events, requests, sizes, allocator, allocator.source, pools, optional)


def replay_variants(timeline: Timeline, options: AllocatorOptions = DEFAULT_OPTIONS) -> tuple[Replay, ...]:
    """A few such replays: without optional workspaces, and where there are any, with half of them."""
    has_optional = any(is_optional(block.category, block.op) for block in timeline.blocks)
    return tuple(replay_otherwise(timeline, options, share) for share in ((0.0, 0.5) if has_optional else (0.0,)))


def replay_best_fit(timeline: Timeline, capacity_bytes: int | None = None, growth: bool = True) -> Replay:
    """Memory over time as the allocator of TensorFlow and JAX hands it out; the end is as for `replay`.

    With `growth`, regions are taken as they are needed (TensorFlow's `allow_growth`, JAX without preallocation).
    """
    allocator, requests = BestFitAllocator(capacity_bytes, growth=growth), _requests(timeline)
    return _replayed(signed_events(timeline), requests, requests, allocator, allocator)


def replay_plain(timeline: Timeline, capacity_bytes: int | None = None) -> Replay:
    """Memory over time where nothing is rounded or cached: reserved equals allocated equals the live bytes.

    A host allocator rounds and keeps far less than the CUDA caching allocator, and differently on every system, so that
    the plain sum of live bytes is the honest answer there. The first allocation beyond the capacity ends the replay,
    and the remaining ticks repeat the last value.
    """
    sizes = _requests(timeline)
    changes = [sizes[event] if event >= 0 else -sizes[-event] for event in signed_events(timeline)]
    live = list(accumulate(changes))
    out_of_memory = None
    if capacity_bytes is not None and max(live, default=0) > capacity_bytes:
        tick = next(tick for tick, total in enumerate(live) if total > capacity_bytes)
        before = live[tick] - changes[tick]
        out_of_memory = OutOfMemory(tick, changes[tick], before, before)
        live[tick:] = [before] * (len(live) - tick)
    curve, peak = tuple(live), max(live, default=0)
    return Replay(curve, curve, peak, peak, peak, num_segments=0, out_of_memory=out_of_memory)


def signed_events(timeline: Timeline) -> list[int]:
    """One number per tick: n for the allocation of block n, -n for its free (blocks count from 1), 0 for nothing.

    The events of `Timeline.events` in their order, without a tuple for each.
    """
    order = [0] * timeline.num_ticks
    for number, block in enumerate(timeline.blocks, 1):
        order[block.start] = number
        end = block.end
        if end is not None:
            order[end] = -number
    return order


def _requests(timeline: Timeline) -> list[int]:
    """What each block asks for, by its number in `signed_events`."""
    return [0, *(block.size_bytes for block in timeline.blocks)]


def _replayed(
    events: list[int],
    requests: list[int],
    sizes: list[int],
    allocator: Any,
    source: Any,
    pools: list[StreamPools] | None = None,
    optional: Container[int] = (),
) -> Replay:
    """Runs the events; `allocator` counts what is allocated, `source` what is reserved.

    Where blocks are on several streams, `pools` has those of each block. Without `optional` blocks it goes on.
    """
    malloc, free = allocator.malloc, allocator.free
    held: list[Any] = [None] * len(sizes)
    allocated: list[int] = []
    reserved: list[int] = []
    requested = requested_peak = num_left_out = 0
    out_of_memory = None
    for tick, event in enumerate(events):
        if event > 0:
            size = sizes[event]
            if size:
                block = malloc(size) if pools is None else malloc(size, pools[event])
                if block is not None:
                    held[event] = block
                    requested += requests[event]
                    if requested > requested_peak:
                        requested_peak = requested
                elif event in optional:
                    num_left_out += 1
                else:
                    out_of_memory = OutOfMemory(tick, requests[event], allocator.allocated, source.reserved)
                    break
        elif event:
            block = held[-event]
            if block is not None:
                free(block)
                requested -= requests[-event]
        allocated.append(allocator.allocated)
        reserved.append(source.reserved)
    num_left = len(events) - len(allocated)
    allocated += [allocator.allocated] * num_left
    reserved += [source.reserved] * num_left
    return Replay(
        allocated=tuple(allocated),
        reserved=tuple(reserved),
        allocated_peak_bytes=max(allocated, default=0),
        reserved_peak_bytes=max(reserved, default=0),
        requested_peak_bytes=requested_peak,
        num_segments=source.num_segments,
        num_retries=getattr(allocator, "num_retries", 0),
        out_of_memory=out_of_memory,
        num_left_out=num_left_out,
    )
