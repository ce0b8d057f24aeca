"""How a budget of bytes is divided, and what that means for the order of the samples.

Shuffling without loading everything reads blocks in a random order and shuffles the samples of many blocks with each
other: a window. The more blocks a window has, the nearer its order comes to that of a full shuffle. Windows are read
in several lanes, which take turns with their batches, so that workers can each have lanes of their own and read no
block twice; but more lanes are smaller windows. The division follows from the data, the budget and the size of a batch
alone, never from the number of workers or ranks, and so does the order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.core.errors import BadInput
from memfit.core.units import KIB, MIB, format_size
from memfit.data.source import Field, Layout

# Each can be dealt out evenly to the numbers of workers that people use most.
_LANES = (24, 12, 8, 4, 2)
# Neighbours in a window of n blocks come from the same block once in n times; a full shuffle knows no blocks.
_ENOUGH_BLOCKS = 72
# Small windows have more and smaller blocks: there, the order counts for more than the speed.
_MANY_BLOCKS = 128
_SMALL_WINDOW_BYTES = 32 * MIB
# Chunks and row groups are as large as they are: many in a window cost nothing. Small ones are read together up to
# the second.
_NATURAL_BLOCKS = 160
_MERGED_BYTES = 256 * KIB
# Below the first, a read costs more than the bytes it brings; from the second on, scattered reads are as fast as one
# long one, and with the pages at both ends, two of them fit into a huge page.
_LEAST_BLOCK_BYTES = 64 * KIB
_MOST_BLOCK_BYTES = 960 * KIB
# In a window that is shuffled, each sample has a number that says where it lies.
_ROW_BYTES = 4
# Arrays in a window begin at multiples of this.
ALIGNMENT = 64
# The order of all blocks is held in memory.
_MOST_BLOCKS = 2**19
# Batches in the hands of the user, of workers and in queues, for which room is kept.
NUM_IN_FLIGHT = 16
# Reads at once, and those of them whose scratch memory is set aside: beyond that, it is little.
_MOST_READERS = 64
_NUM_COUNTED = 8


@dataclass(frozen=True, slots=True)
class Geometry:
    """The division of a budget, from which, with a seed and an epoch, the order follows."""

    num_samples: int
    batch_size: int  # samples that a lane gives at a time
    num_lanes: int  # sequences of windows that take turns
    window_samples: int  # at most
    block_samples: int  # where the source has no blocks of its own; 0 where it has
    num_merged: int = 1  # blocks of the source that are read as one, because they are small

    @property
    def num_windows_held(self) -> int:
        """Windows in memory at once: one a lane, and those that are read ahead."""
        return num_held(self.num_lanes)


def num_held(num_lanes: int) -> int:
    """Windows in memory at once: one a lane, and one for three lanes that is read ahead."""
    return num_lanes + -(-num_lanes // 3)


@dataclass(frozen=True, slots=True)
class SampleBytes:
    """Bytes of one sample on its way: in a window, and in a batch that is given out."""

    held_bytes: int
    given_bytes: int


def sizes_of(fields: Sequence[Field], given: Sequence[np.dtype[Any]]) -> SampleBytes:
    """Bytes of a sample; windows hold the narrower of the stored and the given type."""
    held = total = 0
    for field, dtype in zip(fields, given, strict=True):
        num = max(1, field.sample_bytes) // field.dtype.itemsize
        held += num * min(dtype.itemsize, field.dtype.itemsize)
        total += num * dtype.itemsize
    return SampleBytes(held, total)


def divide(
    num_samples: int, layout: Layout, sizes: SampleBytes, batch_size: int, memory_bytes: int, *, shuffle: bool
) -> Geometry:
    """The division of `memory_bytes`."""
    if layout.is_by_sample:
        # Each sample is as easily read as any other: one window with all of them, of which only the order is held.
        return Geometry(num_samples, batch_size, 1, num_samples, num_samples)

    def capped(count: int) -> int:
        return max(1, min(count, num_samples))

    usable = _usable_bytes(layout, sizes, batch_size, memory_bytes)
    held = sizes.held_bytes + (_ROW_BYTES if shuffle else 0)
    if not shuffle:
        window = capped(usable // 4 // held)
        return Geometry(num_samples, batch_size, 1, window, window)
    # Bytes of a window's samples, beside which it holds their order.
    num_lanes, window_bytes = 1, usable // num_held(1) // held * sizes.held_bytes
    edges = layout.edges
    natural = None
    block_bytes, enough = max(_MOST_BLOCK_BYTES, sizes.held_bytes, layout.read_bytes), _ENOUGH_BLOCKS
    if edges is not None and len(edges) >= 2:
        natural = int((edges[-1] - edges[0]) / (len(edges) - 1) * sizes.held_bytes)
        block_bytes, enough = max(_LEAST_BLOCK_BYTES, natural), _NATURAL_BLOCKS
    if num_samples * held <= usable // 2:
        window_bytes = num_samples * sizes.held_bytes
    else:
        for more in _LANES:
            less_bytes = usable // num_held(more) // held * sizes.held_bytes
            if less_bytes >= enough * block_bytes:
                num_lanes, window_bytes = more, less_bytes
                break
    window = capped(window_bytes // sizes.held_bytes)
    if natural is not None:
        num_merged = max(1, min(max(_MERGED_BYTES, layout.read_bytes), window_bytes // _MANY_BLOCKS) // max(1, natural))
        return Geometry(num_samples, batch_size, num_lanes, window, 0, num_merged)
    num_blocks = _MANY_BLOCKS if window_bytes < _SMALL_WINDOW_BYTES else _ENOUGH_BLOCKS
    block_bytes = min(window_bytes // num_blocks, max(_MOST_BLOCK_BYTES, layout.read_bytes))
    block = max(1, block_bytes // sizes.held_bytes, -(-num_samples // _MOST_BLOCKS))
    return Geometry(num_samples, batch_size, num_lanes, window, block)


def windows_bytes(geometry: Geometry, sizes: SampleBytes, *, shuffle: bool) -> int:
    """Bytes of all windows that are in memory at once, with the order of their samples."""
    held = sizes.held_bytes + (_ROW_BYTES if shuffle else 0)
    return geometry.num_windows_held * geometry.window_samples * held


def num_readers(layout: Layout, memory_bytes: int) -> int:
    """Reads that may be under way at once, all threads and workers together, in a quarter of the memory."""
    return min(max(memory_bytes // 4 // max(1, layout.scratch_bytes), 1), _MOST_READERS)


def in_flight_bytes(batch_bytes: int, memory_bytes: int) -> int:
    """The part of a budget that is kept for batches: in queues, in the hands of workers and of the user.

    Two of them always are: the one that the program uses, and the next one, which is put together meanwhile.
    """
    return min(NUM_IN_FLIGHT * batch_bytes, max(memory_bytes // 4, 2 * batch_bytes))


def _usable_bytes(layout: Layout, sizes: SampleBytes, batch_size: int, memory_bytes: int) -> int:
    batch_bytes = batch_size * sizes.given_bytes
    in_flight = in_flight_bytes(batch_bytes, memory_bytes)
    usable = memory_bytes - in_flight - layout.scratch_bytes * min(num_readers(layout, memory_bytes), _NUM_COUNTED)
    least = 2 * num_held(1) * sizes.held_bytes
    if batch_bytes > memory_bytes // 3:
        raise BadInput(
            f"memory={format_size(memory_bytes)} is too little for batches of {batch_size} samples, which take "
            f"{format_size(batch_bytes)} each ({format_size(sizes.given_bytes)} a sample). Give memory of at least "
            f"{format_size(4 * batch_bytes + layout.scratch_bytes)}, or a batch_size of at most "
            f"{max(1, memory_bytes // 4 // max(1, sizes.given_bytes))}."
        )
    if usable < least:
        raise BadInput(
            f"memory={format_size(memory_bytes)} is too little to read this data: one read takes "
            f"{format_size(layout.scratch_bytes)} beside the samples of {format_size(sizes.held_bytes)}. Give memory "
            f"of at least {format_size(layout.scratch_bytes + in_flight + least + sizes.held_bytes)}, or store the "
            "data in smaller blocks: `memfit data convert`."
        )
    return usable
