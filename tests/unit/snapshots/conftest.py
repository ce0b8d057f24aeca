"""A device that records its history, and writes snapshots as PyTorch does."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memfit.allocator.caching import NO_POOL_ID, CachingAllocator, PoolId
from memfit.allocator.pool import UNMAPPED, Pool, PoolBlock
from memfit.allocator.rounding import LARGE_SEGMENT_BYTES, round_size
from memfit.core.replay import AllocatorOptions
from memfit.core.units import MIB
from memfit.snapshots.reader import MemorySnapshot, read_snapshot

# Addresses of a device are high; those of expandable segments begin at multiples of 2 MiB, not of their pages.
BASE = 0x7F00_0000_0000 + 2 * MIB


class RecordedDevice:
    """A caching allocator with a history of what is done with it, on any stream and in any private pool."""

    def __init__(self, options: AllocatorOptions | None = None, capacity_bytes: int | None = None) -> None:
        self.options = options or AllocatorOptions()
        self.allocator = CachingAllocator(self.options, None)
        if capacity_bytes is not None:
            self.allocator.source.capacity_bytes = capacity_bytes
        self.allocator.source.watch = self._note_segment
        self.allocator.source.place = self._place
        self.events: list[dict[str, Any]] = []
        self.waiting: dict[PoolBlock, PoolId] = {}
        # Where each block was allocated: a free one may have grown over its neighbours.
        self._addresses: dict[PoolBlock, int] = {}
        self.live: dict[PoolBlock, PoolId] = {}
        self.segment_pools: dict[Pool, PoolId] = {}
        self.has_pool_ids = True
        self._next_address = BASE
        self._is_down = False

    def malloc(self, size_bytes: int, stream: int = 0, pool_id: PoolId = NO_POOL_ID) -> PoolBlock | None:
        """Asks for memory; an "oom" is recorded where there is none."""
        pools = self.allocator.pools_of(stream, pool_id)
        for pool in pools:
            self.segment_pools[pool] = pool_id
        block = self.allocator.malloc(round_size(size_bytes), pools)
        self._note_completed()
        if block is None:
            self._note("oom", None, round_size(size_bytes), stream, pool_id)
            return None
        block.requested = size_bytes
        self.live[block] = pool_id
        self._addresses[block] = block.address
        self._note("alloc", block.address, size_bytes, stream, pool_id)
        return block

    def free(self, block: PoolBlock, *, is_used_elsewhere: bool = False) -> None:
        """Frees a block; one that is used elsewhere is completed later."""
        pool_id = self.live.pop(block)
        self._note("free_requested", block.address, block.requested, block.pool.stream, pool_id)
        if is_used_elsewhere:
            self.waiting[block] = pool_id
            self.allocator.free_later(block)
        else:
            self._note("free_completed", block.address, block.requested, block.pool.stream, pool_id)
            self.allocator.free(block)

    def complete(self, block: PoolBlock) -> None:
        """The other stream is done with it."""
        pool_id = self.waiting.pop(block)
        self._note("free_completed", block.address, block.requested, block.pool.stream, pool_id)
        self.allocator.complete(block)

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache()`."""
        self.allocator.release_cached()
        self._note_completed()

    def content(self, first: int = 0, device: int = 0) -> dict[str, Any]:
        """The snapshot, with the events from `first` on."""
        traces: list[list[dict[str, Any]]] = [[] for _ in range(device)]
        return {
            "segments": [self._segment(head, device) for head in self._heads()],
            "device_traces": [*traces, self.events[first:]],
            "allocator_settings": {
                "max_split_size": self.options.max_split_size_bytes or -1,
                "expandable_segments": self.options.expandable_segments,
            },
        }

    def _heads(self) -> list[PoolBlock]:
        free = [block for pools in self.allocator.all_pools() for pool in pools for block in pool.by_key.values()]
        blocks = [*self.live, *self.waiting, *free]
        heads = [block for block in blocks if block.prev is None or block.prev.state == UNMAPPED]
        return sorted(heads, key=lambda block: block.address)

    def _segment(self, head: PoolBlock, device: int) -> dict[str, Any]:
        rows, block = [], head
        while True:
            state = "active_allocated" if block in self.live else "inactive"
            state = "active_pending_free" if block in self.waiting else state
            rows.append(
                {"address": block.address, "size": block.size, "requested_size": block.requested, "state": state}
            )
            if block.next is None or block.next.state == UNMAPPED:
                break
            block = block.next
        return {
            "device": device,
            "address": head.address,
            "total_size": sum(row["size"] for row in rows),
            "stream": head.pool.stream,
            "segment_type": "large" if head.pool.page_bytes == LARGE_SEGMENT_BYTES else "small",
            "segment_pool_id": self.segment_pools[head.pool],
            "is_expandable": self.options.expandable_segments,
            "blocks": rows,
        }

    def _place(self, pool: Pool, size_bytes: int) -> int:
        # Not in rising order: a driver may put a new segment below an old one.
        self._is_down = not self._is_down
        self._next_address += (size_bytes or 1 << 40) + 2 * MIB
        return self._next_address - size_bytes - (1 << 45 if self._is_down else 0)

    def _note_segment(self, action: str, pool: Pool, address: int, size_bytes: int) -> None:
        self._note_completed()
        self._note(action, address, size_bytes, pool.stream, self.segment_pools[pool])

    def _note_completed(self) -> None:
        for block in [block for block in self.waiting if not self.allocator.is_waiting(block)]:
            pool_id = self.waiting.pop(block)
            self._note("free_completed", self._addresses[block], block.requested, block.pool.stream, pool_id)

    def _note(self, action: str, address: int | None, size_bytes: int, stream: int, pool_id: PoolId) -> None:
        event = {"action": action, "size": size_bytes, "stream": stream, "frames": [], "time_us": len(self.events)}
        event["device_free" if address is None else "addr"] = 0 if address is None else address
        if self.has_pool_ids:
            event["pool_id"] = pool_id
        self.events.append(event)


@pytest.fixture
def recorded() -> type[RecordedDevice]:
    """Makes devices that record what is done with them."""
    return RecordedDevice


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[dict[str, Any]], MemorySnapshot]:
    """Writes the content of a snapshot to a file and reads it."""

    def save(content: dict[str, Any]) -> MemorySnapshot:
        path = tmp_path / "snapshot.pickle"
        path.write_bytes(pickle.dumps(content))
        return read_snapshot(path)

    return save
