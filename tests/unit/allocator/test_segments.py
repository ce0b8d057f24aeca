"""Segments: what is taken, what is returned, and in which order when the device is full; pages of expandable ones."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from memfit.allocator import replay
from memfit.allocator.pool import Pool
from memfit.allocator.rounding import NO_LIMIT
from memfit.allocator.segments import Segments
from memfit.core.replay import AllocatorOptions, OutOfMemory
from memfit.core.timeline import Timeline
from memfit.core.units import MIB

Script = Callable[..., Timeline]
EXPANDABLE = AllocatorOptions(expandable_segments=True)


def mib(sizes: tuple[int, ...]) -> list[float]:
    return [size / MIB for size in sizes]


def test_segments_get_rising_addresses_within_the_capacity() -> None:
    segments = Segments(30 * MIB, NO_LIMIT, None)
    pool = Pool(20 * MIB, MIB + 1, NO_LIMIT)

    first, second, third = (segments.take(pool, 12 * MIB) for _ in range(3))

    assert first is not None
    assert second is not None
    assert (first.address, second.address) == (0, 12 * MIB)
    assert third is None
    assert (segments.reserved, segments.num_segments) == (24 * MIB, 2)


def test_whole_free_segments_are_released_when_the_device_is_full(script: Script) -> None:
    # GIVEN segments of 30 (a), 2 (s) and 20 MiB (b, of which 18 are free): 52 of 60 MiB
    # WHEN 40 MiB are asked for, 52 + 40 > 60, the free segment of a (30) and of s (2) go, the split one (20) stays
    timeline = script(("a", 30 * MIB), ("s", 1024), ("b", 2 * MIB), "a", "s", ("c", 40 * MIB))

    result = replay(timeline, capacity_bytes=60 * MIB)

    # THEN 20 + 40 = 60 fits after one retry
    assert mib(result.reserved) == [30, 32, 52, 52, 52, 60]
    assert result.num_retries == 1
    assert result.out_of_memory is None
    assert result.num_segments == 2


def test_split_segments_cannot_be_released(script: Script) -> None:
    # GIVEN a segment of 20 MiB of which 2 are in use; 20 + 41 > 60, and nothing can be released
    timeline = script(("b", 2 * MIB), ("c", 41 * MIB), "b")

    result = replay(timeline, capacity_bytes=60 * MIB)

    assert result.out_of_memory is not None
    assert result.out_of_memory.tick == 1
    assert mib(result.reserved) == [20, 20, 20]
    assert mib(result.allocated) == [2, 2, 2]


def test_one_sufficient_oversize_block_is_released_before_the_whole_cache(script: Script) -> None:
    # GIVEN max_split 32 MiB, free segments of 12 (a), 40 (b) and 70 (c): 122 of 130 MiB
    # WHEN 34 MiB are asked for: 40 < 34 + 20, so b itself is handed out, whole
    # WHEN then 36 MiB are asked for: c has 70 >= 36 + 20 and is refused; 122 + 36 > 130; c is the smallest free
    # block of at least 36 and goes: 122 - 70 + 36 = 88. The free 12 MiB of a stay cached, and no retry is counted.
    timeline = script(
        ("a", 12 * MIB), ("b", 40 * MIB), ("c", 70 * MIB), "a", "b", "c", ("d", 34 * MIB), ("e", 36 * MIB)
    )

    result = replay(timeline, AllocatorOptions(max_split_size_bytes=32 * MIB), capacity_bytes=130 * MIB)

    assert mib(result.reserved) == [12, 52, 122, 122, 122, 122, 122, 88]
    assert mib(result.allocated) == [12, 52, 122, 110, 70, 0, 40, 76]
    assert result.num_retries == 0


def test_several_oversize_blocks_are_released_from_the_largest_down(script: Script) -> None:
    # GIVEN max_split 32 MiB and free segments of 34, 36 and 40 MiB: 110 of 110 MiB
    # WHEN 60 MiB are asked for: no block is as large; 40 and 36 go, 76 >= 60; 110 - 76 + 60 = 94
    timeline = script(("a", 34 * MIB), ("b", 36 * MIB), ("c", 40 * MIB), "a", "b", "c", ("d", 60 * MIB))

    result = replay(timeline, AllocatorOptions(max_split_size_bytes=32 * MIB), capacity_bytes=110 * MIB)

    assert mib(result.reserved)[-1] == 94
    assert result.num_segments == 2
    assert result.num_retries == 0


def test_without_enough_oversize_blocks_the_whole_cache_goes(script: Script) -> None:
    # GIVEN max_split 32 MiB and free segments of 30 and 34 MiB: 64 of 70 MiB
    # WHEN 60 MiB are asked for: the oversize 34 go, not enough; then the 30 as well: 60
    timeline = script(("a", 30 * MIB), ("b", 34 * MIB), "a", "b", ("c", 60 * MIB))

    result = replay(timeline, AllocatorOptions(max_split_size_bytes=32 * MIB), capacity_bytes=70 * MIB)

    assert mib(result.reserved) == [30, 64, 64, 64, 60]
    assert result.num_retries == 1


def test_garbage_collection_returns_segments_of_average_age_and_more(script: Script) -> None:
    # GIVEN a threshold of 0.5 * 200 = 100 MiB; a, b and c take 40, 42 and 44: 126.
    # Searches in the large pool so far: 3. Then a is freed (born 3), and d asks for 2 MiB: search 4 takes a's segment
    # and splits it, so that it can't be collected. b is freed (born 4). e of 60 MiB: search 5, found nowhere.
    # 126 > 100, the only whole free segment is b of age 1, the average is 1: b goes. 126 - 42 + 60 = 144.
    timeline = script(("a", 40 * MIB), ("b", 42 * MIB), ("c", 44 * MIB), "a", ("d", 2 * MIB), "b", ("e", 60 * MIB))

    result = replay(timeline, AllocatorOptions(garbage_collection_threshold=0.5), capacity_bytes=200 * MIB)

    assert mib(result.reserved) == [40, 82, 126, 126, 126, 126, 144]
    assert result.num_retries == 0


def test_garbage_collection_keeps_the_young_once_below_the_threshold(script: Script) -> None:
    # GIVEN a threshold of 0.5 * 200 = 100 MiB, and segments of 40 (a), 42 (b) and 44 MiB (c): 126
    # a is freed after 3 searches. Search 4, d of 50 MiB, is above the threshold: of the free segments a (age 1) is
    # the only one and goes: 126 - 40 + 50 = 136.
    # b is freed (born 4), search 5 for s2 of 46 MiB: b has age 1 and goes: 136 - 42 + 46 = 140.
    # d (50, born 5) is freed, then a search 6 for 50 MiB reuses it; c (44, born 6) and f (50, born 6) are freed.
    # Search 7 for 52 MiB: c and f have age 1 each, the average is 1: both go at once, 140 - 94 + 52 = 98.
    timeline = script(
        ("a", 40 * MIB), ("b", 42 * MIB), ("c", 44 * MIB), "a", ("d", 50 * MIB), "b", ("e", 46 * MIB),
        "d", ("f", 50 * MIB), "c", "f", ("g", 52 * MIB),
    )  # fmt: skip

    result = replay(timeline, AllocatorOptions(garbage_collection_threshold=0.5), capacity_bytes=200 * MIB)

    assert mib(result.reserved) == [40, 82, 126, 126, 136, 136, 140, 140, 140, 140, 140, 98]


def test_garbage_collection_takes_older_segments_first(script: Script) -> None:
    # GIVEN a threshold of 0.5 * 200 = 100 MiB and segments of 60 (a), 42 (b)
    # and 20 MiB (s, of which 18 are free): 122 after three searches. Free a (born 3), search 4 for 17 MiB finds s's
    # remaining 18 MiB (the smallest that fits), free b (born 4), search 5 for 70 MiB finds nothing.
    # Ages: a 2, b 1; average 1.5: only a goes, 122 - 60 = 62 <= 100 ends it. 62 + 70 = 132.
    timeline = script(("a", 60 * MIB), ("b", 42 * MIB), ("s", 2 * MIB), "a", ("t", 17 * MIB), "b", ("c", 70 * MIB))

    result = replay(timeline, AllocatorOptions(garbage_collection_threshold=0.5), capacity_bytes=200 * MIB)

    assert mib(result.reserved) == [60, 102, 122, 122, 122, 122, 132]


def test_garbage_collection_goes_on_with_the_rest_while_above_the_threshold(script: Script) -> None:
    # GIVEN the same with a threshold of 0.1 * 200 = 20 MiB: a of age 2 goes in the first round, 62 > 20; in the second
    # b of age 1 is the average of what is left, and goes: 20. 20 + 70 = 90.
    timeline = script(("a", 60 * MIB), ("b", 42 * MIB), ("s", 2 * MIB), "a", ("t", 17 * MIB), "b", ("c", 70 * MIB))

    result = replay(timeline, AllocatorOptions(garbage_collection_threshold=0.1), capacity_bytes=200 * MIB)

    assert mib(result.reserved) == [60, 102, 122, 122, 122, 122, 90]


def test_garbage_collection_needs_a_capacity(script: Script) -> None:
    timeline = script(("a", 40 * MIB), "a", ("b", 60 * MIB))

    result = replay(timeline, AllocatorOptions(garbage_collection_threshold=0.1))

    assert mib(result.reserved) == [40, 40, 100]


def test_garbage_collection_waits_for_the_threshold(script: Script) -> None:
    # 40 reserved is not above 0.4 * 100
    timeline = script(("a", 40 * MIB), "a", ("b", 60 * MIB))

    result = replay(timeline, AllocatorOptions(garbage_collection_threshold=0.4), capacity_bytes=100 * MIB)

    assert mib(result.reserved) == [40, 40, 100]


# Expandable segments.


def test_only_the_pages_that_are_needed_are_mapped(script: Script) -> None:
    # small: 1 MiB + 1 MiB fill a page of 2 MiB, the third needs another.
    # large: 30 MiB need two pages of 20 (10 remain); 12 MiB more need 2 beyond those, one page.
    timeline = script(("a", MIB), ("b", MIB), ("c", MIB), ("d", 30 * MIB), ("e", 12 * MIB))

    result = replay(timeline, EXPANDABLE)

    assert mib(result.reserved) == [2, 2, 4, 44, 64]
    assert mib(result.allocated) == [1, 2, 3, 33, 45]
    assert result.num_segments == 2


def test_blocks_are_split_to_the_last_512_bytes_in_the_large_pool(script: Script) -> None:
    # A block of 20 MiB - 512 leaves 512 bytes; by default anything up to 1 MiB would stay with it.
    timeline = script(("a", 20 * MIB - 512))

    assert replay(timeline, EXPANDABLE).allocated == (20 * MIB - 512,)
    assert replay(timeline).allocated == (20 * MIB,)


def test_freed_memory_grows_instead_of_a_new_segment(script: Script) -> None:
    # By default 40 MiB don't fit in the free segment of 30, and 40 more are taken; here 30 are extended to 40.
    timeline = script(("a", 30 * MIB), "a", ("b", 40 * MIB))

    assert mib(replay(timeline, EXPANDABLE).reserved) == [40, 40, 40]
    assert mib(replay(timeline).reserved) == [30, 30, 70]


def test_a_block_that_can_grow_is_spared(script: Script) -> None:
    # GIVEN a 30, b 30, c 20: four pages, full. a is freed: a hole of 30 MiB. d of 5 MiB goes there (25 remain).
    # c is freed: 20 MiB at the end, which can grow.
    # WHEN e of 20 MiB comes, the block of 20 fits exactly, but counts as endless: the hole of 25 is used.
    # THEN f of 40 extends the 20 at the end by one page; had e gone there, 40 would have needed two.
    timeline = script(
        ("a", 30 * MIB), ("b", 30 * MIB), ("c", 20 * MIB), "a", ("d", 5 * MIB), "c", ("e", 20 * MIB), ("f", 40 * MIB)
    )

    result = replay(timeline, EXPANDABLE)

    assert mib(result.reserved) == [40, 60, 80, 80, 80, 80, 80, 100]


def test_of_equal_holes_the_one_at_the_lower_address_is_used(script: Script) -> None:
    # GIVEN a, b, c and d at 0-10, 10-20, 20-30 and 30-40 MiB; a and c are freed: two holes of 10.
    # WHEN e of 8 goes to 0-8, and b is freed, 8-30 is free: 22.
    # THEN f of 21 fits there. Had e gone to 20-28, the largest hole would be 20.
    timeline = script(
        ("a", 10 * MIB),
        ("b", 10 * MIB),
        ("c", 10 * MIB),
        ("d", 10 * MIB),
        "a",
        "c",
        ("e", 8 * MIB),
        "b",
        ("f", 21 * MIB),
    )

    assert replay(timeline, EXPANDABLE).reserved_peak_bytes == 40 * MIB


def test_a_request_may_span_a_free_block_unmapped_pages_and_another_free_block(script: Script) -> None:
    # GIVEN a, b, c and x at 0-10, 10-50, 50-60 and 60-80 MiB; b is freed. d of 45 MiB needs three pages at the end:
    # 80 + 60 > 120. The page 20-40 goes, 60 + 60 = 120, and d is at 80-125. x is freed.
    # WHEN e of 35 MiB comes: free are 10-20, 40-50, 60-80 and 125-140. The lowest room is 10-50, with one page to map:
    # 120 + 20 > 120. The retry unmaps 60-80, and 20-40 is mapped.
    timeline = script(
        ("a", 10 * MIB), ("b", 40 * MIB), ("c", 10 * MIB), ("x", 20 * MIB), "b", ("d", 45 * MIB), "x", ("e", 35 * MIB)
    )

    result = replay(timeline, EXPANDABLE, capacity_bytes=120 * MIB)

    assert mib(result.reserved) == [20, 60, 60, 80, 80, 120, 120, 120]
    assert mib(result.allocated)[-1] == 10 + 10 + 45 + 35
    assert result.num_retries == 2
    assert result.out_of_memory is None


def test_wholly_free_pages_are_unmapped_when_the_device_is_full(script: Script) -> None:
    # GIVEN a at 0-30, b at 30-40 MiB in two pages, c at 40-60. a is freed: page 0-20 is wholly free, 20-30 isn't a
    # page. The capacity is 60 MiB.
    # WHEN d of 35 MiB comes: no free block is as large. The room is at the end: 35 MiB need two pages, 60 + 40 > 60.
    # Page 0-20 is unmapped: 40. Now the lowest room that suffices is still the end (0-30 is smaller): 40 + 40 > 60.
    # It is out of memory.
    timeline = script(("a", 30 * MIB), ("b", 10 * MIB), ("c", 20 * MIB), "a", ("d", 35 * MIB))

    result = replay(timeline, EXPANDABLE, capacity_bytes=60 * MIB)

    assert mib(result.reserved) == [40, 40, 60, 60, 40]
    assert result.out_of_memory is not None
    assert result.num_retries == 1

    # WHEN it has 80 MiB instead, one page more can be mapped after the unmapping: 40 + 40 = 80
    result = replay(timeline, EXPANDABLE, capacity_bytes=80 * MIB)

    assert mib(result.reserved) == [40, 40, 60, 60, 80]
    assert result.out_of_memory is None


def test_unmapped_pages_are_filled_from_the_lowest_address(script: Script) -> None:
    # GIVEN, with 90 MiB of capacity, the retry of above at d: 0-20 unmapped, 20-30 free, 30-60 in use (b, c),
    # 60-95 in use (d), 95-100 free; 80 MiB are mapped.
    # WHEN c (40-60) is freed and e of 25 MiB comes: free are 20-30, 40-60 and 95-100, all too small. The lowest
    # unmapped run with the free block behind it, 0-30, has room: one page would do, but 80 + 20 > 90. The retry
    # unmaps 40-60: 60. Then 0-20 is mapped again, and e lies at 0-25, joined with 20-30.
    timeline = script(
        ("a", 30 * MIB), ("b", 10 * MIB), ("c", 20 * MIB), "a", ("d", 35 * MIB), "c", ("e", 25 * MIB), ("f", 5 * MIB)
    )

    result = replay(timeline, EXPANDABLE, capacity_bytes=90 * MIB)

    # THEN f of 5 MiB fits at 25-30, and no page is mapped for it.
    assert mib(result.reserved) == [40, 40, 60, 60, 80, 80, 80, 80]
    assert mib(result.allocated) == [30, 40, 60, 30, 65, 45, 70, 75]
    assert result.num_retries == 2
    assert result.out_of_memory is None


def test_a_free_block_is_unmapped_only_as_far_as_it_covers_pages(script: Script) -> None:
    # GIVEN a at 0-10, b at 10-50, c at 50-60 MiB, three pages; b is freed: of 10-50 only 20-40 is a whole page.
    # WHEN d of 45 MiB needs three pages at the end, 60 + 60 > 100: 20-40 goes, 40 + 60 = 100.
    # THEN 10-20 and 40-50 are still free and mapped: e and f of 10 MiB take them.
    timeline = script(
        ("a", 10 * MIB), ("b", 40 * MIB), ("c", 10 * MIB), "b", ("d", 45 * MIB), ("e", 10 * MIB), ("f", 10 * MIB)
    )

    result = replay(timeline, EXPANDABLE, capacity_bytes=100 * MIB)

    assert mib(result.reserved) == [20, 60, 60, 60, 100, 100, 100]
    assert result.num_retries == 1
    assert result.out_of_memory is None


def test_a_segment_that_is_wholly_free_is_given_up(script: Script) -> None:
    # GIVEN a small page of 2 MiB, freed, and 40 MiB in the large pool; the capacity is 41 MiB
    # WHEN 40 + 2 > 41: the small page goes, and its segment with it
    timeline = script(("a", 1024), "a", ("b", 40 * MIB), "b", ("c", 1024), ("d", 512))

    result = replay(timeline, EXPANDABLE, capacity_bytes=41 * MIB)

    # c then needs a small page: 40 + 2 > 41, so that all pages of the large pool go.
    assert mib(result.reserved) == [2, 2, 40, 40, 2, 2]
    assert result.num_retries == 2
    assert result.num_segments == 1


def test_a_free_block_at_the_end_cannot_grow_on_a_full_device(script: Script) -> None:
    # GIVEN 30 MiB in two pages, 10 free at the end; 25 MiB need 15 more, a page: 40 + 20 > 50. Nothing can be unmapped.
    timeline = script(("a", 30 * MIB), ("b", 25 * MIB))

    result = replay(timeline, EXPANDABLE, capacity_bytes=50 * MIB)

    assert mib(result.reserved) == [40, 40]
    assert result.out_of_memory == OutOfMemory(1, 25 * MIB, 30 * MIB, 40 * MIB)


def test_a_page_is_not_mapped_in_part(script: Script) -> None:
    # 30 MiB of capacity hold one page of 20, not two: 25 MiB don't fit, although 25 < 30.
    timeline = script(("a", 25 * MIB))

    assert replay(timeline, EXPANDABLE, capacity_bytes=30 * MIB).out_of_memory is not None
    assert replay(timeline, EXPANDABLE, capacity_bytes=40 * MIB).out_of_memory is None


def test_the_memory_fraction_is_checked_before_mapping(script: Script) -> None:
    # GIVEN 80 MiB mapped, of which 15 at the end are free; 30 MiB need one more page: 100 of 100
    timeline = script(("a", 65 * MIB), ("b", 30 * MIB))
    assert mib(replay(timeline, EXPANDABLE, 100 * MIB).reserved) == [80, 100]

    # WHEN a threshold is set, the fraction is too, and 80 + 30 > 100 is refused whatever the pages
    options = AllocatorOptions(expandable_segments=True, garbage_collection_threshold=0.9)
    result = replay(timeline, options, 100 * MIB)

    assert result.out_of_memory is not None


def test_max_split_size_refuses_large_free_blocks_here_too(script: Script) -> None:
    # GIVEN 60 MiB free at the end, with max_split 32: not for a request of 12 by best fit, but the room at
    # the end is the same block, which needs no further page.
    timeline = script(("a", 60 * MIB), "a", ("b", 12 * MIB))
    options = AllocatorOptions(expandable_segments=True, max_split_size_bytes=32 * MIB)

    assert mib(replay(timeline, options).reserved) == [60, 60, 60]
    assert mib(replay(timeline, options).allocated) == [60, 0, 12]


@given(st.lists(st.integers(0, 50 * MIB), max_size=30), st.booleans())
def test_without_holes_no_more_is_reserved_than_by_default(script: Script, sizes: list[int], freed: bool) -> None:
    # Freed in reverse order, or not at all, blocks leave no holes: what is mapped is the allocated peak rounded up to
    # pages in each pool. By default no less than the allocated bytes is reserved. With holes neither bounds the other.
    names = [str(index) for index in range(len(sizes))]
    steps: list[tuple[str, int] | str] = list(zip(names, sizes, strict=True))
    steps += reversed(names) if freed else []
    timeline = script(*steps)

    expandable, default = replay(timeline, EXPANDABLE), replay(timeline)

    assert expandable.reserved_peak_bytes <= default.reserved_peak_bytes + 20 * MIB
    assert expandable.reserved_peak_bytes < expandable.allocated_peak_bytes + 22 * MIB
