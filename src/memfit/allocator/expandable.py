"""Expandable segments: address space first, memory behind it page by page.

With `expandable_segments:True` each pool has one segment of practically endless address space. Memory is mapped into it
in pages of 2 MiB (small pool) or 20 MiB (large pool), only as far as a request needs, and the pages that are wholly
free are unmapped when the device is full. Upstream reserves address space for 9/8 of the device's memory and opens a
further segment when that is used up; here the address space never ends.
"""

from typing import final

from memfit.allocator.pool import IN_USE, UNMAPPED, Block, Pool
from memfit.allocator.rounding import LARGE_SEGMENT_BYTES, segment_size
from memfit.allocator.segments import Source

# A multiple of both page sizes, far beyond any device, and below the limit of addresses in `pool`.
ADDRESS_SPACE_BYTES = LARGE_SEGMENT_BYTES << 30


@final
class ExpandableSegments(Source):
    """One growing segment per pool. Each part of it can be split, so that none is oversize.

    Args:
        capacity_bytes: what the device can give.
        fraction_set: the capacity is also the process's memory fraction, which is checked before any page is mapped.
    """

    def __init__(self, capacity_bytes: int, fraction_set: bool) -> None:
        super().__init__(capacity_bytes)
        self._fraction_set = fraction_set

    def choose(self, pool: Pool, index: int) -> int:
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

    def take(self, pool: Pool, size_bytes: int) -> Block | None:
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

    def release_cached(self, pool: Pool) -> None:
        """Unmap every page of the pool that is wholly free."""
        for block in pool.free_blocks():
            self._unmap(block)
            if block.prev is None and block.next is None:
                pool.unmapped.remove(block)
                self.num_segments -= 1

    def _find_room(self, pool: Pool, size_bytes: int) -> Block:
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
        segment = Block(pool, 0, ADDRESS_SPACE_BYTES, UNMAPPED)
        pool.unmapped.append(segment)
        self.num_segments += 1
        return segment

    def _map(self, block: Block, size_bytes: int) -> bool:
        """Put pages behind the start of an unmapped block; False when the device is full (`map_block`)."""
        pool = block.pool
        mapped_bytes = -(-size_bytes // pool.page_bytes) * pool.page_bytes
        if self.reserved + mapped_bytes > self.capacity_bytes:
            return False
        self.reserved += mapped_bytes
        self.num_taken += 1
        pool.reserved += mapped_bytes
        pool.taken += mapped_bytes
        pool.unmapped.remove(block)
        if mapped_bytes < block.size:
            _insert_unmapped(pool, block.split(mapped_bytes, UNMAPPED))
        pool.insert_merged(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Take the pages away that lie wholly inside a free block (`unmap_block`)."""
        pool = block.pool
        end = block.address + block.size
        first = -(-block.address // pool.page_bytes) * pool.page_bytes
        last = end // pool.page_bytes * pool.page_bytes
        if first >= last:
            return
        pool.remove(block)
        if first > block.address:
            # The segment begins with a page, so that something lies before a block that doesn't.
            assert block.prev is not None
            before = Block(pool, block.address, first - block.address, IN_USE)
            before.link_after(block.prev)
            pool.insert(before)
        if end > last:
            pool.insert(block.split(last - block.address, IN_USE))
        block.address, block.size, block.state = first, last - first, UNMAPPED
        self.reserved -= block.size
        self.num_returned += 1
        pool.reserved -= block.size
        for neighbour in (block.prev, block.next):
            if neighbour is not None and neighbour.state == UNMAPPED:
                pool.unmapped.remove(neighbour)
                block.absorb(neighbour)
        _insert_unmapped(pool, block)


def _size_when_grown(block: Block) -> int:
    following = block.next
    if following is not None and following.state == UNMAPPED:
        return block.size + following.size
    return block.size


def _insert_unmapped(pool: Pool, block: Block) -> None:
    pool.unmapped.append(block)
    pool.unmapped.sort(key=lambda unmapped: unmapped.address)
