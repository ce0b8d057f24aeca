"""The allocator of TensorFlow and JAX on GPUs, replayed without one: best fit with coalescing.

Memory comes from the device in regions, each a run of chunks. A request is rounded up to 256 bytes and gets the
smallest free chunk that suffices, looked for from its bin upwards (bins are powers of two from 256 bytes); what the
chunk has over is split off if it is at least as large as the request or 128 MiB. A freed chunk joins free neighbours
of its region. Where nothing suffices a new region is asked for: twice the last one, at least what the request needs,
or all of the device at once. Regions are not given back. The rules are those of `tsl/framework/bfc_allocator.cc`.
"""

from bisect import bisect_left, insort
from typing import final

from memfit.allocator.ticks import signed_events
from memfit.core.replay import OutOfMemory, Replay
from memfit.core.timeline import Timeline
from memfit.core.units import MIB

_ROUND_BYTES = 256
_FIRST_REGION_BYTES = 2 * MIB
# A chunk may be larger than what is asked for by less than this, or by less than the request itself.
_MOST_UNUSED_BYTES = 128 * MIB


@final
class Chunk:
    """A part of a region."""

    __slots__ = ("address", "free", "next", "previous", "size")

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.size = size
        self.free = True
        self.previous: Chunk | None = None
        self.next: Chunk | None = None


@final
class BestFitAllocator:
    """The allocator of one device (`BFCAllocator`).

    Args:
        capacity_bytes: what the device can give; None: no limit.
        growth: regions are taken as they are needed; otherwise the whole capacity is one.
    """

    def __init__(self, capacity_bytes: int | None = None, *, growth: bool = True) -> None:
        self._capacity = None if capacity_bytes is None else capacity_bytes // _ROUND_BYTES * _ROUND_BYTES
        self._region_bytes = _FIRST_REGION_BYTES
        if not growth and self._capacity is not None:
            self._region_bytes = self._capacity
        # (size, address) of each free chunk: within a bin the order is this one too, so that one list serves all.
        self._keys: list[tuple[int, int]] = []
        self._by_address: dict[int, Chunk] = {}
        self._next_address = _ROUND_BYTES
        self.allocated = 0
        self.reserved = 0
        self.num_regions = 0

    def malloc(self, size_bytes: int) -> Chunk | None:
        """A chunk of at least so many bytes; None when out of memory."""
        rounded = -(-size_bytes // _ROUND_BYTES) * _ROUND_BYTES
        chunk = self._find(rounded)
        if chunk is None and self._extend(rounded):
            chunk = self._find(rounded)
        return chunk

    def free(self, chunk: Chunk) -> None:
        """Gives a chunk of `malloc` back; it joins its free neighbours."""
        self.allocated -= chunk.size
        chunk.free = True
        after, before = chunk.next, chunk.previous
        if after is not None and after.free:
            self._take_out(after)
            _join(chunk, after)
        if before is not None and before.free:
            self._take_out(before)
            _join(before, chunk)
            chunk = before
        self._put_in(chunk)

    def chunks(self) -> list[Chunk]:
        """All free chunks, smallest first."""
        return [self._by_address[address] for _, address in self._keys]

    def _find(self, rounded: int) -> Chunk | None:
        place = bisect_left(self._keys, (rounded, 0))
        if place == len(self._keys):
            return None
        chunk = self._by_address[self._keys[place][1]]
        self._take_out(chunk)
        if chunk.size >= 2 * rounded or chunk.size - rounded >= _MOST_UNUSED_BYTES:
            rest = Chunk(chunk.address + rounded, chunk.size - rounded)
            rest.previous, rest.next = chunk, chunk.next
            if chunk.next is not None:
                chunk.next.previous = rest
            chunk.next, chunk.size = rest, rounded
            self._put_in(rest)
        chunk.free = False
        self.allocated += chunk.size
        return chunk

    def _extend(self, rounded: int) -> bool:
        """Takes a region from the device that is large enough; whether there was one."""
        left = None if self._capacity is None else self._capacity - self.reserved
        if left is not None and rounded > left:
            return False
        enough = self._region_bytes >= rounded
        while self._region_bytes < rounded:
            self._region_bytes *= 2
        size = self._region_bytes if left is None else min(self._region_bytes, left)
        chunk = Chunk(self._next_address, size)
        # A gap keeps regions from joining.
        self._next_address += size + _ROUND_BYTES
        self.reserved += size
        self.num_regions += 1
        if enough:
            self._region_bytes *= 2
        self._put_in(chunk)
        return True

    def _put_in(self, chunk: Chunk) -> None:
        insort(self._keys, (chunk.size, chunk.address))
        self._by_address[chunk.address] = chunk

    def _take_out(self, chunk: Chunk) -> None:
        del self._keys[bisect_left(self._keys, (chunk.size, chunk.address))]
        del self._by_address[chunk.address]


def _join(first: Chunk, second: Chunk) -> None:
    first.size += second.size
    first.next = second.next
    if second.next is not None:
        second.next.previous = first


def replay_best_fit(timeline: Timeline, capacity_bytes: int | None = None, growth: bool = True) -> Replay:
    """Memory over time as the allocator hands it out.

    The first allocation that doesn't fit ends the replay: that tick and all later ones show the state in which the
    allocator raised its error. Blocks of 0 bytes take nothing.

    Args:
        timeline: what the program asks for.
        capacity_bytes: what the device can give; None: no limit.
        growth: whether regions are taken as they are needed (TensorFlow's `allow_growth`, JAX without preallocation).
    """
    allocator = BestFitAllocator(capacity_bytes, growth=growth)
    requests = [0]
    requests += [block.size_bytes for block in timeline.blocks]
    held: list[Chunk | None] = [None] * len(requests)
    allocated: list[int] = []
    reserved: list[int] = []
    requested = requested_peak = 0
    out_of_memory = None
    for tick, event in enumerate(signed_events(timeline)):
        if event > 0 and requests[event]:
            chunk = allocator.malloc(requests[event])
            if chunk is None:
                out_of_memory = OutOfMemory(tick, requests[event], allocator.allocated, allocator.reserved)
                break
            held[event] = chunk
            requested += requests[event]
            requested_peak = max(requested_peak, requested)
        elif event < 0:
            chunk = held[-event]
            if chunk is not None:
                allocator.free(chunk)
                requested -= requests[-event]
        allocated.append(allocator.allocated)
        reserved.append(allocator.reserved)
    num_left = timeline.num_ticks - len(allocated)
    allocated += [allocator.allocated] * num_left
    reserved += [allocator.reserved] * num_left
    return Replay(
        allocated=tuple(allocated),
        reserved=tuple(reserved),
        allocated_peak_bytes=max(allocated, default=0),
        reserved_peak_bytes=max(reserved, default=0),
        requested_peak_bytes=requested_peak,
        num_segments=allocator.num_regions,
        out_of_memory=out_of_memory,
    )
