"""The rules of the caching allocator, one by one. Comments give the arithmetic, in MiB."""

import doctest
from collections.abc import Callable
from pathlib import Path

import pytest

from memfit.allocator import replay
from memfit.allocator.caching import CachingAllocator
from memfit.core.errors import BadInput
from memfit.core.replay import AllocatorOptions, OutOfMemory, Replay
from memfit.core.timeline import Block, Category, Phase, Timeline
from memfit.core.units import KIB, MIB

Script = Callable[..., Timeline]


def mib(sizes: tuple[int, ...]) -> list[float]:
    return [size / MIB for size in sizes]


def test_a_small_request_takes_a_segment_of_2_mib(script: Script) -> None:
    # 1 byte is a block of 512; the segment is 2 MiB.
    result = replay(script(("a", 1)))

    assert result.allocated == (512,)
    assert result.reserved == (2 * MIB,)
    assert result.requested_peak_bytes == 1
    assert result.num_segments == 1


def test_small_requests_share_a_segment_until_it_is_full(script: Script) -> None:
    # 3 * 700 KiB = 2100 KiB > 2048 KiB: the third needs a second segment; 600 KiB fit behind the first two.
    result = replay(script(("a", 700 * KIB), ("b", 700 * KIB), ("c", 700 * KIB), ("d", 600 * KIB)))

    assert mib(result.reserved) == [2, 2, 4, 4]
    assert result.allocated[-1] == 2700 * KIB


def test_one_mib_is_small_and_a_byte_more_is_large(script: Script) -> None:
    assert mib(replay(script(("a", MIB))).reserved) == [2]
    assert mib(replay(script(("a", MIB + 1))).reserved) == [20]


def test_the_pools_do_not_share(script: Script) -> None:
    # The free segment of 20 MiB isn't used for a small request.
    assert mib(replay(script(("a", 2 * MIB), "a", ("b", 1))).reserved) == [20, 20, 22]


def test_medium_requests_share_segments_of_20_mib(script: Script) -> None:
    # 9 + 9 = 18; 3 more don't fit in the remaining 2.
    assert mib(replay(script(("a", 9 * MIB), ("b", 9 * MIB), ("c", 3 * MIB))).reserved) == [20, 20, 40]


def test_large_requests_get_their_own_segment(script: Script) -> None:
    # 10 is exact; 10 MiB + 1 byte is rounded up to 12.
    assert mib(replay(script(("a", 10 * MIB), ("b", 10 * MIB + 1))).reserved) == [10, 22]


def test_a_remainder_of_1_mib_is_not_split_off_in_the_large_pool(script: Script) -> None:
    # 11 MiB get a segment of 12; 1 remains, which is not more than 1: the block counts with 12.
    result = replay(script(("a", 11 * MIB)))
    assert mib(result.allocated) == [12]

    # 512 bytes less: more than 1 remains and is split off.
    result = replay(script(("a", 11 * MIB - 512)))
    assert result.allocated == (11 * MIB - 512,)


def test_a_remainder_of_512_bytes_is_split_off_in_the_small_pool(script: Script) -> None:
    # 1024 KiB + 1023.5 KiB leave 512 bytes, which the third request gets.
    result = replay(script(("a", MIB), ("b", MIB - 512), ("c", 1)))

    assert result.allocated[-1] == 2 * MIB
    assert mib(result.reserved) == [2, 2, 2]


def test_the_smallest_sufficient_block_is_used(script: Script) -> None:
    # Free: 30 and 14. 13 goes into 14 (whole: 1 remains), not into 30; then 29 fits into 30.
    timeline = script(("a", 30 * MIB), ("b", 14 * MIB), "a", "b", ("c", 13 * MIB), ("d", 29 * MIB))

    result = replay(timeline)

    assert mib(result.reserved)[-1] == 44
    assert mib(result.allocated)[-2:] == [14, 44]


def test_of_equal_blocks_the_one_at_the_lower_address_is_used(script: Script) -> None:
    # Two segments of 20 hold 9 + 9 each, and both start with a free 9 once c and a are freed. e takes the one in the
    # first segment. When d is freed the second segment is free as a whole, and holds f of 20.
    timeline = script(
        ("a", 9 * MIB), ("b", 9 * MIB), ("c", 9 * MIB), ("d", 9 * MIB), "c", "a", ("e", 9 * MIB), "d", ("f", 20 * MIB)
    )

    result = replay(timeline, capacity_bytes=40 * MIB)

    assert mib(result.reserved) == [20, 20, 40, 40, 40, 40, 40, 40, 40]
    assert mib(result.allocated)[-1] == 38
    assert result.num_retries == 0


def test_freed_neighbours_are_joined(script: Script) -> None:
    # 6 + 6 + 6 in 20, 2 remain. Freed in any order they join to 20, which 20 - 1 needs.
    timeline = script(("a", 6 * MIB), ("b", 6 * MIB), ("c", 6 * MIB), "a", "c", "b", ("d", 19 * MIB))

    assert mib(replay(timeline).reserved)[-1] == 20


def test_a_block_between_used_neighbours_does_not_join(script: Script) -> None:
    # a and c are free, 6 each, c joined with the remainder to 8; 10 fit in neither.
    timeline = script(("a", 6 * MIB), ("b", 6 * MIB), ("c", 6 * MIB), "a", "c", ("d", 10 * MIB))

    assert mib(replay(timeline).reserved)[-1] == 30


def test_freed_memory_stays_reserved(script: Script) -> None:
    result = replay(script(("a", 30 * MIB), "a"))

    assert mib(result.allocated) == [30, 0]
    assert mib(result.reserved) == [30, 30]
    assert result.num_segments == 1


def test_oversize_blocks_are_neither_split_nor_given_to_smaller_requests(script: Script) -> None:
    # max_split 32: a free block of 40 isn't used for 30 (a new 30), but for 34, whole, as 40 < 34 + 20.
    timeline = script(("a", 40 * MIB), "a", ("b", 30 * MIB), ("c", 34 * MIB))

    result = replay(timeline, AllocatorOptions(max_split_size_bytes=32 * MIB))

    assert mib(result.reserved) == [40, 40, 70, 70]
    assert mib(result.allocated) == [40, 0, 30, 70]


def test_a_request_of_max_split_size_is_oversize(script: Script) -> None:
    # 32 is not below 32: it may have the free block of 40, whole.
    result = replay(script(("a", 40 * MIB), "a", ("b", 32 * MIB)), AllocatorOptions(max_split_size_bytes=32 * MIB))

    assert mib(result.reserved) == [40, 40, 40]
    assert mib(result.allocated) == [40, 0, 40]


def test_max_split_size_counts_in_whole_mib(script: Script) -> None:
    # 33 MiB - 1 is 32 MiB: 32 is oversize and the block of 40 isn't split.
    options = AllocatorOptions(max_split_size_bytes=33 * MIB - 1)

    assert mib(replay(script(("a", 40 * MIB), "a", ("b", 32 * MIB)), options).allocated) == [40, 0, 40]


def test_an_oversize_block_20_mib_larger_is_refused(script: Script) -> None:
    options = AllocatorOptions(max_split_size_bytes=32 * MIB)

    # 54 >= 34 + 20 is refused; 52 < 54 is taken.
    assert mib(replay(script(("a", 54 * MIB), "a", ("b", 34 * MIB)), options).reserved) == [54, 54, 88]
    assert mib(replay(script(("a", 52 * MIB), "a", ("b", 34 * MIB)), options).reserved) == [52, 52, 52]


def test_without_max_split_size_any_block_is_split(script: Script) -> None:
    result = replay(script(("a", 54 * MIB), "a", ("b", 34 * MIB)))

    assert mib(result.reserved) == [54, 54, 54]
    assert mib(result.allocated) == [54, 0, 34]


def test_power_of_two_divisions_change_the_block(script: Script) -> None:
    # 34 lies between 32 and 64; a quarter of 32 is 8: 40.
    result = replay(script(("a", 34 * MIB), ("b", 0)), AllocatorOptions(roundup_power2_divisions=4))

    assert mib(result.allocated) == [40, 40]
    assert result.requested_peak_bytes == 34 * MIB


def test_zero_bytes_take_nothing(script: Script) -> None:
    result = replay(script(("a", 0), ("b", 1), "a", "b"), capacity_bytes=2 * MIB)

    assert result.allocated == (0, 512, 512, 0)
    assert result.reserved == (0, 2 * MIB, 2 * MIB, 2 * MIB)


def test_out_of_memory_ends_the_replay(script: Script) -> None:
    # 30 + 20 > 40 at tick 3; the free segment of s (2) is released by the attempt: 30 are left, and stay.
    timeline = script(("a", 30 * MIB), ("s", 1), "s", ("b", 20 * MIB), "a", ("c", MIB))

    result = replay(timeline, capacity_bytes=40 * MIB)

    assert result.out_of_memory == OutOfMemory(3, 20 * MIB, 30 * MIB, 30 * MIB)
    assert mib(result.reserved) == [30, 32, 32, 30, 30, 30]
    assert result.allocated == (30 * MIB, 30 * MIB + 512, *[30 * MIB] * 4)
    assert result.requested_peak_bytes == 30 * MIB + 1
    assert result.num_retries == 1


def test_an_empty_timeline_needs_nothing() -> None:
    assert replay(Timeline((), 0)) == Replay((), (), 0, 0, 0, 0)


def test_a_tick_without_event_repeats_the_last_values() -> None:
    block = Block(1, 1, 3, Category.TEMPORARY, Phase.FORWARD)

    assert replay(Timeline((block,), 5)).allocated == (0, 512, 512, 0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            AllocatorOptions(max_split_size_bytes=MIB),
            "max_split_size_bytes must be at least 20 MiB .* 1048576 was given",
        ),
        (AllocatorOptions(roundup_power2_divisions=3), "roundup_power2_divisions must be a power of two.* 3 was given"),
        (AllocatorOptions(roundup_power2_divisions=-2), "must be a power of two.* -2 was given"),
    ],
)
def test_settings_that_pytorch_refuses_are_refused(options: AllocatorOptions, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        replay(Timeline((), 0), options)


def test_the_worked_example_of_the_documentation_holds() -> None:
    page = Path(__file__).parents[3] / "docs" / "concepts" / "allocator.md"

    results = doctest.testfile(str(page), module_relative=False)

    assert results.attempted > 0
    assert results.failed == 0


def test_a_release_waits_for_other_streams_and_spares_private_pools_in_use() -> None:
    # GIVEN 12 MiB that another stream still uses, and 12 that a graph's pool has cached
    allocator = CachingAllocator(AllocatorOptions(), None)
    graph = allocator.pools_of(0, (0, 1))
    used, cached = allocator.malloc(12 * MIB), allocator.malloc(12 * MIB, graph)
    assert used is not None and cached is not None
    allocator.free_later(used)
    allocator.free(cached)
    assert allocator.is_waiting(used) and not allocator.large.keys

    # WHEN
    allocator.release_cached()

    # THEN
    assert not allocator.is_waiting(used)
    assert allocator.source.reserved == 12 * MIB
    allocator.end_private((0, 1))
    allocator.release_cached()
    assert allocator.source.reserved == 0
