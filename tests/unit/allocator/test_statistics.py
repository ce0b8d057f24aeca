from memfit.allocator.statistics import Level, PoolStatistics


def values(level: Level) -> dict[str, int]:
    return dict(level.items())


def test_a_level_keeps_its_peak_and_the_sums_of_rises_and_falls():
    level = Level()

    for value in (3, 10, 4, 6):
        level.move_to(value)

    # 3 + 7 + 2 up, 6 down
    assert values(level) == {"current": 6, "peak": 10, "allocated": 12, "freed": 6}


def test_resets_begin_at_the_current_value():
    level = Level()
    level.move_to(10)
    level.move_to(4)

    level.reset_peak()
    level.reset_total()
    level.move_to(5)
    level.move_to(1)

    assert values(level) == {"current": 1, "peak": 5, "allocated": 1, "freed": 4}


def test_rises_counted_elsewhere_are_taken_over():
    # GIVEN 20 taken and 5 returned, a reset, then 7 more taken and 2 returned
    level = Level()
    level.move_through(15, risen=20)
    assert values(level) == {"current": 15, "peak": 15, "allocated": 20, "freed": 5}

    level.reset_total()
    level.move_through(20, risen=27)

    assert values(level) == {"current": 20, "peak": 20, "allocated": 7, "freed": 2}


def test_the_sum_of_pools_keeps_its_own_peak():
    # GIVEN peaks of 5 and 8 at different times, 9 at most together
    small, large, both = PoolStatistics(), PoolStatistics(), PoolStatistics()
    small.allocated_bytes.move_to(5)
    small.allocated_bytes.move_to(1)
    large.allocated_bytes.move_to(8)
    both.allocated_bytes.peak = 9

    both.add(small, large)

    assert values(both.allocated_bytes) == {"current": 9, "peak": 9, "allocated": 13, "freed": 4}


def test_active_blocks_are_the_allocated_ones():
    levels = dict(PoolStatistics().levels())

    assert levels["active"] is levels["allocation"]
    assert levels["active_bytes"] is levels["allocated_bytes"]
