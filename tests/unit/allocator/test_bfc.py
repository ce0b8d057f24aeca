"""The allocator of TensorFlow and JAX: rounding, splitting, joining, regions."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.allocator import replay_best_fit
from memfit.allocator.bfc import BestFitAllocator
from memfit.core.timeline import Block, Category, Phase, Timeline
from memfit.core.units import MIB


def timeline(*blocks):
    """Blocks given as (bytes, start, end)."""
    made = tuple(Block(size, start, end, Category.TEMPORARY, Phase.FORWARD) for size, start, end in blocks)
    return Timeline(made, max(max(b.start, b.end or 0) for b in made) + 1)


@pytest.mark.parametrize(("asked", "given_bytes"), [(1, 256), (256, 256), (257, 512), (1000, 1024)])
def test_sizes_are_rounded_to_256_bytes(asked, given_bytes):
    assert replay_best_fit(timeline((asked, 0, None))).allocated_peak_bytes == given_bytes


def test_regions_begin_with_2_mib_and_double():
    answer = replay_best_fit(timeline((2 * MIB, 0, None), (MIB, 1, None), (8 * MIB, 2, None)))
    # The third doesn't fit into what the second left, nor into the next size in turn.
    assert answer.reserved == (2 * MIB, 6 * MIB, 14 * MIB)
    assert answer.num_segments == 3


def test_a_region_is_large_enough_for_its_request():
    assert replay_best_fit(timeline((5 * MIB, 0, None))).reserved_peak_bytes == 8 * MIB


def test_without_growth_one_region_is_all_of_the_device():
    answer = replay_best_fit(timeline((MIB, 0, None)), 100 * MIB, growth=False)
    assert answer.reserved_peak_bytes == 100 * MIB
    assert answer.num_segments == 1


def test_a_chunk_less_than_twice_the_request_is_not_split():
    allocator = BestFitAllocator()
    chunk = allocator.malloc(MIB + 256)
    assert chunk is not None and chunk.size == 2 * MIB
    assert allocator.allocated == 2 * MIB


def test_a_chunk_twice_the_request_is_split():
    allocator = BestFitAllocator()
    chunk = allocator.malloc(MIB)
    assert chunk is not None and chunk.size == MIB
    assert [free.size for free in allocator.pool.free_blocks()] == [MIB]


def test_more_than_128_mib_are_never_left_unused():
    allocator = BestFitAllocator(1000 * MIB, growth=False)
    chunk = allocator.malloc(600 * MIB)
    assert chunk is not None and chunk.size == 600 * MIB


def test_the_smallest_sufficient_chunk_is_taken():
    allocator = BestFitAllocator(64 * MIB, growth=False)
    first, gap, second, _ = (allocator.malloc(size * MIB) for size in (4, 1, 3, 1))
    assert gap is not None
    allocator.free(first)
    allocator.free(second)
    chunk = allocator.malloc(3 * MIB)
    assert chunk is not None and chunk.address == second.address


def test_out_of_memory_tells_the_state():
    answer = replay_best_fit(timeline((6 * MIB, 0, None), (6 * MIB, 1, None), (1, 2, None)), 10 * MIB)
    failure = answer.out_of_memory
    assert failure is not None
    assert (failure.tick, failure.requested_bytes) == (1, 6 * MIB)
    assert answer.allocated == (answer.allocated[0],) * 3


def test_nothing_is_taken_for_nothing():
    assert replay_best_fit(timeline((0, 0, 1))).reserved_peak_bytes == 0


OPERATIONS = st.lists(st.tuples(st.booleans(), st.integers(1, 9 * MIB), st.integers(0, 30)), max_size=60)


@settings(max_examples=60, deadline=None)
@given(OPERATIONS, st.sampled_from([None, 40 * MIB]), st.booleans())
def test_chunks_never_overlap_and_join_completely(operations, capacity, growth):
    allocator = BestFitAllocator(capacity, growth=growth)
    held = []
    for is_free, size, which in operations:
        if is_free and held:
            allocator.free(held.pop(which % len(held)))
        else:
            chunk = allocator.malloc(size)
            if chunk is not None:
                assert chunk.size >= size
                held.append(chunk)
        free = allocator.pool.free_blocks()
        spans = sorted((c.address, c.address + c.size) for c in [*held, *free])
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        # Two free neighbours would have been joined.
        assert not {c.address + c.size for c in free} & {c.address for c in free}
        assert sum(c.size for c in held) == allocator.allocated
        assert allocator.allocated + sum(c.size for c in free) == allocator.reserved
        assert capacity is None or allocator.reserved <= capacity
    for chunk in held:
        allocator.free(chunk)
    assert allocator.allocated == 0
    assert len(allocator.pool.free_blocks()) == allocator.num_segments
