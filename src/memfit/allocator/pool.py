"""Blocks of device memory and the pools of free ones.

A segment is a chain of neighbouring blocks. Free blocks also stand in the list of their pool, sorted by size and then
by address, so that best fit is one bisection. The sort key is a single integer, the size above the address: comparing
integers is what makes a replay fast in Python.
"""

from bisect import bisect_left, insort
from typing import final

# Addresses stay below this power of two, so that a key orders by size first and by address second.
ADDRESS_BITS = 56

# The last: address space of an expandable segment without memory behind it.
IN_USE, FREE, UNMAPPED = 0, 1, 2


@final
class PoolBlock:
    """A range of addresses, linked to its neighbours in the same segment."""

    __slots__ = ("address", "born", "key", "next", "pool", "prev", "requested", "size", "state")

    def __init__(self, pool: "Pool", address: int, size: int, state: int) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.state = state
        self.prev: PoolBlock | None = None
        self.next: PoolBlock | None = None
        self.key = 0
        # What the program asked for, before rounding; kept by who hands the block out.
        self.requested = 0
        # Searches that the pool had seen when the block was last put into it (gc_count_base).
        self.born = 0

    def link_after(self, before: "PoolBlock") -> None:
        """Become the next neighbour of `before`."""
        self.prev = before
        self.next = before.next
        if before.next is not None:
            before.next.prev = self
        before.next = self

    def split(self, size: int, state: int) -> "PoolBlock":
        """Shrinks to `size`; returns what is left as the next neighbour."""
        rest = PoolBlock(self.pool, self.address + size, self.size - size, state)
        rest.link_after(self)
        self.size = size
        return rest

    def absorb(self, neighbour: "PoolBlock") -> None:
        """Grow over a neighbour, which is dropped from the chain."""
        if neighbour is self.prev:
            self.address = neighbour.address
            self.prev = neighbour.prev
            if self.prev is not None:
                self.prev.next = self
        else:
            self.next = neighbour.next
            if self.next is not None:
                self.next.prev = self
        self.size += neighbour.size


@final
class Pool:
    """The free blocks of one stream for one class of sizes (`BlockPool`), with the page of its expandable segment.

    A block is split where at least the remainder is left, unless the request is too large to be split off.
    """

    def __init__(
        self,
        page_bytes: int = 0,
        split_remainder_bytes: int = 0,
        split_below_bytes: int = 0,
        stream: int = 0,
        *,
        is_expandable: bool = False,
    ) -> None:
        self.stream = stream
        # Whether its memory is one segment that grows by pages.
        self.is_expandable = is_expandable
        self.page_bytes = page_bytes
        self.split_remainder_bytes = split_remainder_bytes
        self.split_below_bytes = split_below_bytes
        self.keys: list[int] = []
        self.by_key: dict[int, PoolBlock] = {}
        self.unmapped: list[PoolBlock] = []
        # Searches of all streams in the pools of this size, counted where garbage is collected by age.
        self.num_searches = 0
        # Where the pages of its expandable segment begin.
        self.origin = 0
        # Bytes and segments held from the device now, and taken from it since the beginning.
        self.reserved = self.taken = 0
        self.num_segments = self.num_segments_taken = 0

    def insert(self, block: PoolBlock) -> None:
        """Add a block as free."""
        block.state = FREE
        block.born = self.num_searches
        block.key = key = block.size << ADDRESS_BITS | block.address
        self.by_key[key] = block
        insort(self.keys, key)

    def remove(self, block: PoolBlock) -> None:
        """Take a free block out; its state is left for the caller to set."""
        key = block.key
        del self.by_key[key]
        del self.keys[bisect_left(self.keys, key)]

    def free_blocks(self) -> list[PoolBlock]:
        """Free blocks, smallest first."""
        return [self.by_key[key] for key in self.keys]

    def insert_merged(self, block: PoolBlock) -> None:
        """Add a block as free after joining it with its free neighbours (`free_block`, `try_merge_blocks`).

        `remove` and `absorb` for both neighbours, then `insert`, written out because every free comes here.
        """
        keys, by_key = self.keys, self.by_key
        size = block.size
        before = block.prev
        if before is not None and before.state == FREE:
            key = before.key
            del by_key[key], keys[bisect_left(keys, key)]
            size += before.size
            block.address = before.address
            block.prev = before = before.prev
            if before is not None:
                before.next = block
        after = block.next
        if after is not None and after.state == FREE:
            key = after.key
            del by_key[key], keys[bisect_left(keys, key)]
            size += after.size
            block.next = after = after.next
            if after is not None:
                after.prev = block
        block.size = size
        block.state = FREE
        block.born = self.num_searches
        block.key = key = size << ADDRESS_BITS | block.address
        by_key[key] = block
        insort(keys, key)
