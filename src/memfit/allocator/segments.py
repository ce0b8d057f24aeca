"""Where the pools get memory from: segments as `cudaMalloc` gives them, or expandable ones.

By default segments are taken whole and returned whole. Here the device hands out rising addresses and never the same
one twice; a real driver may reuse them, which can only matter between two free blocks of exactly the same size.

Of expandable pools (`expandable_segments:True`) each has one segment of practically endless address space. Memory is
mapped into it in pages of 2 MiB (small pool) or 20 MiB (large pool), only as far as a request needs, and the pages that
are wholly free are unmapped when the device is full. Upstream reserves address space for 9/8 of the device's memory and
opens a further segment when that is used up; here the address space never ends.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import final

from memfit.allocator.pool import ADDRESS_BITS, IN_USE, UNMAPPED, Pool, PoolBlock
from memfit.allocator.rounding import LARGE_SEGMENT_BYTES, NO_LIMIT, segment_size

# Of expandable segments: a multiple of both page sizes, far beyond any device, and below the limit of addresses.
ADDRESS_SPACE_BYTES = LARGE_SEGMENT_BYTES << 30


@final
class Segments:
    """What the pools take memory from and return it to, within a capacity.

    Blocks of plain segments from `max_split_bytes` on are oversize. Above the garbage threshold of reserved bytes, old
    plain segments are returned before a new one is taken; None: never. With `fraction_set` the capacity is also the
    process's memory fraction, which is checked before any page is mapped.
    """

    def __init__(
        self,
        capacity_bytes: int,
        max_split_bytes: int = NO_LIMIT,
        garbage_threshold_bytes: int | None = None,
        *,
        fraction_set: bool = False,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._max_split_bytes, self._garbage_threshold_bytes = max_split_bytes, garbage_threshold_bytes
        self._fraction_set = fraction_set
        self._address = 0
        self.reserved = 0
        self.num_segments = 0
        # Calls that took memory from the device, and that returned some: cudaMalloc and cudaFree, or pages mapped.
        self.num_taken = self.num_returned = 0
        # Segments that can't be split, held now and taken since the beginning.
        self.num_oversize = self.num_oversize_taken = 0
        self.watch: Callable[[str, Pool, int, int], None] | None = None
        """Hears of each segment: PyTorch's name for what happened, the pool, address, bytes."""
        self.place: Callable[[Pool, int], int] | None = None
        """Says where the driver puts a new segment of so many bytes, or the address space of an expandable one."""

    def take(self, pool: Pool, size_bytes: int) -> PoolBlock | None:
        """A block of new memory that holds `size_bytes`, in no list yet; None when the device is full."""
        return self._take_pages(pool, size_bytes) if pool.is_expandable else self._take_segment(pool, size_bytes)

    def release_cached(self, pool: Pool) -> None:
        """Return every segment of the pool that is free as a whole, or every page (`release_blocks`)."""
        if not pool.is_expandable:
            for block in _whole_segments(pool):
                self._release(block)
            return
        for block in pool.free_blocks():
            self._unmap(block)
            if block.prev is None and block.next is None:
                pool.unmapped.remove(block)
                self.num_segments -= 1

    def adopt(self, pool: Pool, address: int, size_bytes: int, used: Sequence[tuple[int, int]]) -> list[PoolBlock]:
        """A segment that is there already, with ranges (address, bytes) of it in use; returns the blocks of those.

        Of an expandable one: pages that are mapped; those that come first are where the segment begins.
        """
        if not pool.is_expandable:
            self._address = max(self._address, address + size_bytes)
            return _carve(self._add(pool, address, size_bytes), used)
        space = pool.unmapped[-1] if pool.unmapped else self._open(pool, address)
        if address > space.address:
            space = space.split(address - space.address, UNMAPPED)
        else:
            pool.unmapped.remove(space)
        _insert_unmapped(pool, space.split(size_bytes, UNMAPPED))
        space.state = IN_USE
        self._hold(pool, address, size_bytes, "segment_map")
        return _carve(space, used)

    def _take_segment(self, pool: Pool, size_bytes: int) -> PoolBlock | None:
        """A new segment (`alloc_block`)."""
        segment_bytes = segment_size(size_bytes)
        if self.reserved + segment_bytes > self.capacity_bytes:
            return None
        if self.place is None:
            address = self._address
            self._address += segment_bytes
        else:
            address = self.place(pool, segment_bytes)
        return self._add(pool, address, segment_bytes)

    def _add(self, pool: Pool, address: int, segment_bytes: int) -> PoolBlock:
        pool.num_segments += 1
        pool.num_segments_taken += 1
        self.num_segments += 1
        if segment_bytes >= self._max_split_bytes:
            self.num_oversize += 1
            self.num_oversize_taken += 1
        self._hold(pool, address, segment_bytes, "segment_alloc")
        return PoolBlock(pool, address, segment_bytes, IN_USE)

    def release_oversize(self, pool: Pool, size_bytes: int) -> bool:
        """Return enough oversize blocks for a request: the smallest sufficient one, or else the largest ones.

        True when enough were (`release_available_cached_blocks`).
        """
        max_split_bytes = self._max_split_bytes
        if max_split_bytes == NO_LIMIT or pool.is_expandable:
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

    def collect_garbage(self, larges: Sequence[Pool]) -> None:
        """Return old free segments of the large pools, when above the threshold (`garbage_collect_cached_blocks`).

        The age of a segment is the number of searches in the pools since it was freed. In each round all segments of
        at least the average age go, until the reserved bytes are down to the threshold or nothing is left.
        """
        threshold_bytes = self._garbage_threshold_bytes
        if threshold_bytes is None or self.reserved <= threshold_bytes:
            return
        blocks = [block for large in larges if not large.is_expandable for block in _whole_segments(large)]
        total_age = sum(block.pool.num_searches - block.born for block in blocks)
        while blocks and self.reserved > threshold_bytes:
            average_age = total_age / len(blocks)
            kept = []
            for block in blocks:
                age = block.pool.num_searches - block.born
                if age >= average_age:
                    total_age -= age
                    self._release(block)
                else:
                    kept.append(block)
            blocks = kept

    def _release(self, block: PoolBlock) -> None:
        pool = block.pool
        pool.remove(block)
        self.num_segments -= 1
        pool.num_segments -= 1
        if block.size >= self._max_split_bytes:
            self.num_oversize -= 1
        self._hold(pool, block.address, -block.size, "segment_free")

    def _take_pages(self, pool: Pool, size_bytes: int) -> PoolBlock | None:
        """Maps as many pages as the block needs (`try_allocate_expandable_block`).

        A failure may leave pages mapped that were mapped before the device was full, as upstream does.
        """
        if self._fraction_set and self.reserved + segment_size(size_bytes) > self.capacity_bytes:
            return None
        block = self._find_room(pool, size_bytes)
        if block.state == UNMAPPED and not self._map(block, min(block.size, size_bytes)):
            return None
        while block.size < size_bytes:
            following = block.next
            assert following is not None and following.state == UNMAPPED
            if not self._map(following, min(following.size, size_bytes - block.size)):
                return None
            block = following
        pool.remove(block)
        return block

    def _find_room(self, pool: Pool, size_bytes: int) -> PoolBlock:
        """First block, by address, of a run of free and unmapped blocks large enough (`find_expandable_block`)."""
        for unmapped in pool.unmapped:
            first = unmapped
            if first.prev is not None and first.prev.state != IN_USE:
                first = first.prev
            room_bytes, block = 0, first
            while room_bytes < size_bytes and block.state != IN_USE:
                room_bytes += block.size
                if block.next is None:
                    break
                block = block.next
            if room_bytes >= size_bytes:
                return first
        return self._open(pool, 0 if self.place is None else self.place(pool, 0))

    def _open(self, pool: Pool, address: int) -> PoolBlock:
        """Address space that begins there, with no memory behind it yet."""
        pool.origin = address
        segment = PoolBlock(pool, address, ADDRESS_SPACE_BYTES, UNMAPPED)
        pool.unmapped.append(segment)
        self.num_segments += 1
        return segment

    def _map(self, block: PoolBlock, size_bytes: int) -> bool:
        """Put pages behind the start of an unmapped block; False when the device is full (`map_block`)."""
        pool = block.pool
        mapped_bytes = -(-size_bytes // pool.page_bytes) * pool.page_bytes
        if self.reserved + mapped_bytes > self.capacity_bytes:
            return False
        self._hold(pool, block.address, mapped_bytes, "segment_map")
        pool.unmapped.remove(block)
        if mapped_bytes < block.size:
            _insert_unmapped(pool, block.split(mapped_bytes, UNMAPPED))
        pool.insert_merged(block)
        return True

    def _unmap(self, block: PoolBlock) -> None:
        """Take the pages away that lie wholly inside a free block (`unmap_block`)."""
        pool = block.pool
        end = block.address + block.size
        first = pool.origin - (pool.origin - block.address) // pool.page_bytes * pool.page_bytes
        last = pool.origin + (end - pool.origin) // pool.page_bytes * pool.page_bytes
        if first >= last:
            return
        pool.remove(block)
        if first > block.address:
            # The segment begins with a page, so that something lies before a block that doesn't.
            assert block.prev is not None
            before = PoolBlock(pool, block.address, first - block.address, IN_USE)
            before.link_after(block.prev)
            pool.insert(before)
        if end > last:
            pool.insert(block.split(last - block.address, IN_USE))
        block.address, block.size, block.state = first, last - first, UNMAPPED
        self._hold(pool, block.address, -block.size, "segment_unmap")
        for neighbour in (block.prev, block.next):
            if neighbour is not None and neighbour.state == UNMAPPED:
                pool.unmapped.remove(neighbour)
                block.absorb(neighbour)
        _insert_unmapped(pool, block)

    def _hold(self, pool: Pool, address: int, change_bytes: int, event: str) -> None:
        """Books what was taken from the device or returned to it."""
        self.reserved += change_bytes
        pool.reserved += change_bytes
        if change_bytes > 0:
            self.num_taken += 1
            pool.taken += change_bytes
        else:
            self.num_returned += 1
        if self.watch is not None:
            self.watch(event, pool, address, abs(change_bytes))


def choose_growing(pool: Pool, index: int) -> int:
    """The smallest as they could grow: a block in front of unmapped space is spared (`get_free_block`)."""
    keys, by_key = pool.keys, pool.by_key
    size_bytes = _size_when_grown(by_key[keys[index]])
    while index + 1 < len(keys):
        next_bytes = _size_when_grown(by_key[keys[index + 1]])
        if next_bytes >= size_bytes:
            break
        size_bytes = next_bytes
        index += 1
    return index


def _carve(block: PoolBlock, used: Sequence[tuple[int, int]]) -> list[PoolBlock]:
    """Cuts a block, in no list yet, at the ranges in use, whose blocks it returns; the rest of it becomes free."""
    pool, blocks = block.pool, []
    for address, size_bytes in sorted(used):
        if address > block.address:
            following = block.split(address - block.address, IN_USE)
            pool.insert(block)
            block = following
        blocks.append(block)
        if block.size > size_bytes:
            block = block.split(size_bytes, IN_USE)
        else:
            return blocks
    pool.insert(block)
    return blocks


def _whole_segments(pool: Pool) -> list[PoolBlock]:
    return [block for block in pool.free_blocks() if block.prev is None and block.next is None]


def _size_when_grown(block: PoolBlock) -> int:
    following = block.next
    if following is not None and following.state == UNMAPPED:
        return block.size + following.size
    return block.size


def _insert_unmapped(pool: Pool, block: PoolBlock) -> None:
    pool.unmapped.append(block)
    pool.unmapped.sort(key=lambda unmapped: unmapped.address)
