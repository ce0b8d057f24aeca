from memfit.allocator.pool import IN_USE, Block, Pool
from memfit.allocator.statistics import Level, PoolStatistics


def values(level: Level) -> dict[str, int]:
    return dict(level.items())


def test_a_level_keeps_its_peak_and_the_sums_of_rises_and_falls():
    level = Level()

    for change in (3, 7, -6, 2):
        level.add(change)

    # 3 + 7 + 2 up, 6 down
    assert values(level) == {"current": 6, "peak": 10, "allocated": 12, "freed": 6}


def test_resets_begin_at_the_current_value():
    level = Level()
    level.add(10)
    level.add(-6)

    level.reset_peak()
    level.reset_total()
    level.add(1)
    level.add(-4)

    assert values(level) == {"current": 1, "peak": 5, "allocated": 1, "freed": 4}


def test_rises_counted_elsewhere_are_taken_over():
    # GIVEN 20 taken and 5 returned, a reset, then 7 more taken and 2 returned
    level = Level()
    level.move_through(15, risen=20)
    assert values(level) == {"current": 15, "peak": 15, "allocated": 20, "freed": 5}

    level.reset_total()
    level.move_through(20, risen=27)

    assert values(level) == {"current": 20, "peak": 20, "allocated": 7, "freed": 2}


def test_a_block_counts_by_what_it_takes_and_by_what_was_asked_for():
    statistics = PoolStatistics()
    block = Block(Pool(), 0, 512, IN_USE)
    block.requested = 100

    statistics.count(block, 1)
    statistics.count(block, -1)

    assert values(statistics.allocation) == {"current": 0, "peak": 1, "allocated": 1, "freed": 1}
    assert values(statistics.allocated_bytes) == {"current": 0, "peak": 512, "allocated": 512, "freed": 512}
    assert values(statistics.requested_bytes) == {"current": 0, "peak": 100, "allocated": 100, "freed": 100}


def test_active_blocks_are_the_allocated_ones():
    levels = PoolStatistics().levels()

    assert levels["active"] is levels["allocation"]
    assert levels["active_bytes"] is levels["allocated_bytes"]
