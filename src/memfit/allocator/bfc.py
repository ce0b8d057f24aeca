"""The allocator of TensorFlow and JAX on GPUs, without one: best fit with coalescing.

Memory comes from the device in regions, each a chain of blocks. A request is rounded up to 256 bytes and gets the
smallest free block that suffices; what the block has over is split off if it is at least as large as the request or
128 MiB. A freed block joins free neighbours of its region. Where nothing suffices a new region is asked for: twice the
last one, at least what the request needs, or all of the device at once. Regions are not given back. The rules are those
of `tsl/framework/bfc_allocator.cc`; its bins, powers of two, only make the search faster.
"""

from bisect import bisect_left
from typing import final

from memfit.allocator.pool import ADDRESS_BITS, FREE, IN_USE, Pool, PoolBlock
from memfit.core.units import MIB

_ROUND_BYTES = 256
_FIRST_REGION_BYTES = 2 * MIB
# A block may be larger than what is asked for by less than this, or by less than the request itself.
_MOST_UNUSED_BYTES = 128 * MIB


@final
class BestFitAllocator:
    """The allocator of one device (`BFCAllocator`); without `growth` the whole capacity is one region."""

    def __init__(self, capacity_bytes: int | None = None, *, growth: bool = True) -> None:
        self._capacity = None if capacity_bytes is None else capacity_bytes // _ROUND_BYTES * _ROUND_BYTES
        self._region_bytes = _FIRST_REGION_BYTES if growth or self._capacity is None else self._capacity
        self.pool = Pool()
        self._next_address = 0
        self.allocated = self.reserved = self.num_segments = 0

    def malloc(self, size_bytes: int) -> PoolBlock | None:
        """A block of at least so many bytes; None when out of memory."""
        size = -(-size_bytes // _ROUND_BYTES) * _ROUND_BYTES
        pool = self.pool
        index = bisect_left(pool.keys, size << ADDRESS_BITS)
        if index == len(pool.keys):
            if not self._extend(size):
                return None
            index = bisect_left(pool.keys, size << ADDRESS_BITS)
        block = pool.by_key[pool.keys[index]]
        pool.remove(block)
        if block.size >= 2 * size or block.size - size >= _MOST_UNUSED_BYTES:
            pool.insert(block.split(size, FREE))
        block.state = IN_USE
        self.allocated += block.size
        return block

    def free(self, block: PoolBlock) -> None:
        """Gives a block of `malloc` back; it joins its free neighbours."""
        self.allocated -= block.size
        self.pool.insert_merged(block)

    def _extend(self, size: int) -> bool:
        """Takes a region from the device that is large enough; False where there is none."""
        left = None if self._capacity is None else self._capacity - self.reserved
        if left is not None and size > left:
            return False
        enough = self._region_bytes >= size
        while self._region_bytes < size:
            self._region_bytes *= 2
        region_bytes = self._region_bytes if left is None else min(self._region_bytes, left)
        self.pool.insert(PoolBlock(self.pool, self._next_address, region_bytes, FREE))
        # A gap, so that regions can be told apart by their addresses.
        self._next_address += region_bytes + _ROUND_BYTES
        self.reserved += region_bytes
        self.num_segments += 1
        if enough:
            self._region_bytes *= 2
        return True
