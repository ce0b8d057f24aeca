"""Segments of `cudaMalloc`: what is taken, what is returned, and in which order when the device is full."""

from collections.abc import Callable

from memfit.allocator import replay
from memfit.allocator.pool import Pool
from memfit.allocator.rounding import NO_LIMIT
from memfit.allocator.segments import Segments
from memfit.core.replay import AllocatorOptions
from memfit.core.timeline import Timeline
from memfit.core.units import MIB

Script = Callable[..., Timeline]


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
    assert segments.choose(pool, 3) == 3


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
