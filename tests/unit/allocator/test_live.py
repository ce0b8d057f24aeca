"""The allocator of a running program: the answers of `replay`, one event at a time, and PyTorch's statistics."""

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.allocator import LiveAllocator, memory_of, replay
from memfit.allocator.live import Level, PoolStatistics
from memfit.allocator.pool import FREE, IN_USE, Pool, PoolBlock
from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import BadInput
from memfit.core.replay import AllocatorOptions
from memfit.core.timeline import Timeline
from memfit.core.units import MIB
from tests.unit.allocator.test_caching_properties import CAPACITIES, OPTIONS, timelines

PLAIN = AllocatorOptions()


class Run:
    """A timeline fed to a live allocator event by event, as far as it gets."""

    def __init__(self, timeline: Timeline, options: AllocatorOptions, capacity_bytes: int | None) -> None:
        self.memory = LiveAllocator(options, capacity_bytes)
        self.failed_at: int | None = None
        self._timeline = timeline

    def events(self) -> Iterator[int]:
        held = {}
        for tick, (index, is_allocation) in enumerate(self._timeline.events()):
            if is_allocation:
                held[index] = self.memory.malloc(self._timeline.blocks[index].size_bytes)
                if held[index] is None:
                    self.failed_at = tick
                    return
            else:
                self.memory.free(held.pop(index))
            yield tick


@given(timelines(), OPTIONS, CAPACITIES)
def test_events_one_by_one_give_what_a_replay_gives(timeline, options, capacity_bytes):
    expected = replay(timeline, options, capacity_bytes)
    run = Run(timeline, options, capacity_bytes)
    memory = run.memory

    for tick in run.events():
        assert memory.allocated_bytes == expected.allocated[tick]
        assert memory.reserved_bytes == expected.reserved[tick]

    failed = expected.out_of_memory
    assert run.failed_at == (None if failed is None else failed.tick)
    assert memory.num_failures == (0 if failed is None else 1)
    assert (memory.allocated_bytes, memory.reserved_bytes) == (
        (failed.allocated_bytes, failed.reserved_bytes)
        if failed is not None
        else (expected.allocated[-1:] or (0,)) + (expected.reserved[-1:] or (0,))
    )
    assert memory.stats()["allocated_bytes.all.peak"] == expected.allocated_peak_bytes
    assert memory.stats()["reserved_bytes.all.peak"] == expected.reserved_peak_bytes
    assert memory.num_segments == expected.num_segments
    assert memory.num_retries == expected.num_retries


class Observed:
    """Statistics the slow way: every quantity anew from the segments after each event."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.peaks: dict[str, int] = {}
        self.rises: dict[str, int] = {}

    def look(self, memory: LiveAllocator) -> None:
        now = dict.fromkeys(
            (f"{name}.{pool}" for name in COUNTED for pool in ("all", "small_pool", "large_pool")),
            0,
        )
        for blocks in memory.segments():
            # Segments of the small pool are 2 MiB, which no segment of the large pool is.
            small = sum(block.size for block in blocks) == 2 * MIB
            for block in blocks:
                found = {"reserved_bytes": block.size}
                if block.state != FREE:
                    found |= {
                        "allocation": 1,
                        "allocated_bytes": block.size,
                        "requested_bytes": block.requested,
                    }
                elif len(blocks) > 1:
                    found |= {"inactive_split": 1, "inactive_split_bytes": block.size}
                for name, value in found.items():
                    now[f"{name}.all"] += value
                    now[f"{name}.{'small_pool' if small else 'large_pool'}"] += value
            now["segment.all"] += 1
            now[f"segment.{'small_pool' if small else 'large_pool'}"] += 1
        for name, value in now.items():
            self.peaks[name] = max(value, self.peaks.get(name, 0))
            self.rises[name] = self.rises.get(name, 0) + max(0, value - self.now.get(name, 0))
        self.now = now


COUNTED = (
    "allocation",
    "allocated_bytes",
    "requested_bytes",
    "segment",
    "reserved_bytes",
    "inactive_split",
    "inactive_split_bytes",
)


@given(timelines(), st.sampled_from([0, 4]))
def test_statistics_are_those_of_the_blocks(timeline, divisions):
    # GIVEN an endless device, on which each event is one rise or one fall
    run = Run(timeline, AllocatorOptions(roundup_power2_divisions=divisions), None)
    observed = Observed()
    observed.look(run.memory)

    # WHEN
    for _ in run.events():
        observed.look(run.memory)

    # THEN
    stats = run.memory.stats()
    for name, current in observed.now.items():
        assert stats[f"{name}.current"] == current, name
        assert stats[f"{name}.peak"] == observed.peaks[name], name
        assert stats[f"{name}.allocated"] == observed.rises[name], name
        assert stats[f"{name}.freed"] == observed.rises[name] - current, name


@given(timelines(), st.integers(2, 200).map(lambda size: size * MIB))
def test_statistics_stay_true_on_a_full_device(timeline, capacity_bytes):
    run = Run(timeline, PLAIN, capacity_bytes)
    observed = Observed()

    for _ in run.events():
        observed.look(run.memory)
        stats = run.memory.stats()
        assert {name: stats[f"{name}.current"] for name in observed.now} == observed.now
        assert stats["num_device_alloc"] == stats["segment.all.allocated"]
        assert stats["num_device_free"] == stats["segment.all.freed"]


@given(timelines(), CAPACITIES)
def test_expandable_segments_have_no_inactive_splits_and_no_segments(timeline, capacity_bytes):
    # PyTorch leaves both out: pages are returned one by one.
    run = Run(timeline, AllocatorOptions(expandable_segments=True), capacity_bytes)
    for _ in run.events():
        pass

    stats = run.memory.stats()

    assert stats["inactive_split_bytes.all.peak"] == stats["inactive_split.all.allocated"] == 0
    assert stats["segment.all.peak"] == 0
    assert stats["reserved_bytes.all.current"] == run.memory.reserved_bytes
    assert sum(block.size for blocks in run.memory.segments() for block in blocks) == run.memory.reserved_bytes


def test_every_statistic_of_pytorch_is_there():
    names = ["allocation", "segment", "active", "inactive_split"]
    names += [f"{name}_bytes" for name in ("allocated", "reserved", "active", "inactive_split", "requested")]
    metrics = ("current", "peak", "allocated", "freed")
    expected = {
        f"{name}.{pool}.{metric}"
        for name in names
        for pool in ("all", "small_pool", "large_pool")
        for metric in metrics
    }
    expected |= {f"{name}.{metric}" for name in ("oversize_allocations", "oversize_segments") for metric in metrics}
    expected |= {f"num_{name}" for name in ("alloc_retries", "ooms", "sync_all_streams", "device_alloc", "device_free")}

    assert set(LiveAllocator(PLAIN, None).stats()) == expected | {"max_split_size"}


def test_peaks_and_sums_begin_anew():
    # GIVEN 30 MiB once held, 2 MiB held now
    memory = LiveAllocator(PLAIN, None)
    kept, dropped = memory.malloc(2 * MIB), memory.malloc(28 * MIB)
    assert kept is not None
    assert dropped is not None
    memory.free(dropped)

    # WHEN
    memory.reset_peaks()
    memory.reset_counts()

    # THEN
    stats = memory.stats()
    assert memory.stats()["allocated_bytes.all.peak"] == 2 * MIB
    assert memory.stats()["reserved_bytes.all.peak"] == 48 * MIB
    assert {name: stats[f"allocated_bytes.all.{name}"] for name in ("current", "peak", "allocated", "freed")} == {
        "current": 2 * MIB,
        "peak": 2 * MIB,
        "allocated": 0,
        "freed": 0,
    }
    assert stats["num_device_alloc"] == 0
    memory.free(kept)
    assert memory.stats()["active_bytes.all.freed"] == 2 * MIB


def test_the_cache_is_returned_where_it_can_be():
    # GIVEN segments of 20 (half used) and 30 MiB (free)
    memory = LiveAllocator(PLAIN, None)
    memory.malloc(2 * MIB)
    memory.free(memory.malloc(30 * MIB))
    assert memory.reserved_bytes == 50 * MIB

    memory.empty_cache()

    stats = memory.stats()
    assert memory.reserved_bytes == 20 * MIB
    assert memory.num_segments == 1
    assert (stats["reserved_bytes.all.freed"], stats["num_device_free"], stats["num_sync_all_streams"]) == (
        30 * MIB,
        1,
        1,
    )


def test_a_full_device_is_counted_and_recovers():
    memory = LiveAllocator(PLAIN, 40 * MIB)
    held = memory.malloc(30 * MIB)

    assert memory.malloc(30 * MIB) is None
    memory.free(held)
    assert memory.malloc(40 * MIB) is not None

    # The first attempt released the cache in vain, the second to make room.
    stats = memory.stats()
    assert (memory.num_failures, memory.num_retries) == (1, 2)
    assert (stats["num_ooms"], stats["num_alloc_retries"], stats["num_sync_all_streams"]) == (1, 2, 2)


def test_oversize_blocks_are_counted():
    memory = LiveAllocator(AllocatorOptions(max_split_size_bytes=32 * MIB), 100 * MIB)
    small, large = memory.malloc(20 * MIB), memory.malloc(33 * MIB)
    memory.free(large)
    memory.empty_cache()
    memory.free(small)

    stats = memory.stats()

    assert stats["max_split_size"] == 32 * MIB
    # 33 MiB take a segment of 34, which can't be split.
    assert [stats[f"oversize_allocations.{name}"] for name in ("current", "peak", "allocated", "freed")] == [0, 1, 1, 1]
    assert [stats[f"oversize_segments.{name}"] for name in ("current", "peak", "allocated", "freed")] == [0, 1, 1, 1]


def test_without_a_limit_the_split_size_is_minus_one():
    assert LiveAllocator(PLAIN, None).stats()["max_split_size"] == -1


def test_a_process_may_allow_itself_less():
    memory = LiveAllocator(PLAIN, 100 * MIB)

    memory.limit(40 * MIB)
    assert memory.limit_bytes == 40 * MIB
    assert memory.malloc(41 * MIB) is None
    memory.limit(None)

    assert memory.malloc(41 * MIB) is not None
    assert memory.malloc(61 * MIB) is None


def test_a_limit_above_the_capacity_changes_nothing():
    memory = LiveAllocator(PLAIN, 40 * MIB)

    memory.limit(80 * MIB)

    assert memory.malloc(41 * MIB) is None


def test_settings_can_change_until_the_first_allocation():
    memory = LiveAllocator(PLAIN, None)

    assert memory.configure(AllocatorOptions(expandable_segments=True))
    memory.free(memory.malloc(30 * MIB))

    # Two pages of 20 MiB instead of a segment of 30.
    assert memory.reserved_bytes == 40 * MIB
    assert not memory.configure(PLAIN)
    assert memory.options.expandable_segments


def test_bad_settings_are_refused():
    with pytest.raises(BadInput, match="at least 20 MiB"):
        LiveAllocator(AllocatorOptions(max_split_size_bytes=MIB), None)


def test_what_an_error_names_is_the_segment():
    memory = LiveAllocator(AllocatorOptions(roundup_power2_divisions=2), None)

    assert [memory.device_request_bytes(size) // MIB for size in (1, 3 * MIB, 17 * MIB)] == [2, 20, 24]


def test_nothing_is_a_block_that_takes_nothing():
    memory = LiveAllocator(PLAIN, 0)

    block = memory.malloc(0)

    assert block is not None
    assert (block.size, memory.allocated_bytes, memory.reserved_bytes) == (0, 0, 0)
    memory.free(block)
    assert memory.stats()["allocation.all.allocated"] == 0


class Holder:
    """Something only the garbage collector can drop."""

    def __init__(self) -> None:
        self.itself = self


@contextmanager
def eager_garbage_collection() -> Iterator[None]:
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def test_blocks_may_be_freed_in_the_middle_of_an_allocation():
    # GIVEN blocks whose holders are cyclic garbage, so that collections inside malloc free them
    memory = LiveAllocator(PLAIN, None)
    references: dict[int, weakref.ref[Holder]] = {}
    inside = 0

    def allocate(number: int) -> None:
        block = memory.malloc(512 * (1 + number % 7))
        holder = Holder()

        def free(reference: object) -> None:
            nonlocal inside
            frame = sys._getframe()
            while frame := frame.f_back:
                inside += frame.f_code.co_name == "malloc"
            memory.free(block)

        references[number] = weakref.ref(holder, free)

    # WHEN
    with eager_garbage_collection():
        for number in range(2_000):
            allocate(number)
    gc.collect()

    # THEN it happened, and every block came back
    assert inside
    assert memory.allocated_bytes == 0
    assert memory.stats()["allocation.all.freed"] == 2_000
    memory.empty_cache()
    assert memory.reserved_bytes == 0


def test_threads_share_the_device():
    memory = LiveAllocator(PLAIN, None)

    def work() -> None:
        held = []
        for number in range(300):
            held.append(memory.malloc(1000 * (1 + number % 50)))
            if number % 3 == 0:
                memory.free(held.pop(number % len(held)))
        for block in held:
            memory.free(block)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)

    assert memory.allocated_bytes == 0
    assert memory.stats()["allocation.all.allocated"] == 1_200
    memory.empty_cache()
    assert memory.reserved_bytes == 0


# The memory of a device of the catalogue.

DEVICE = Device("x", "X", Kind.CUDA, 1000 * MIB, 900 * MIB, Origin.MEASURED, context_bytes=100 * MIB)


@pytest.fixture
def no_settings(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)


@pytest.mark.parametrize(
    ("changes", "capacity_bytes"),
    [
        ({}, 800 * MIB),
        ({"context_bytes": None}, 900 * MIB),
        ({"usable_bytes": None}, None),
        # A device that the context alone fills still has an end.
        ({"usable_bytes": 50 * MIB}, 1),
    ],
    ids=str,
)
def test_what_the_context_leaves_can_be_allocated(changes, capacity_bytes, no_settings):
    memory, _ = memory_of(replace(DEVICE, **changes))

    assert memory.capacity_bytes == capacity_bytes


def test_the_last_byte_can_be_had_and_no_more(no_settings):
    memory, _ = memory_of(DEVICE)

    assert memory.malloc(800 * MIB) is not None
    assert memory.malloc(1) is None


def test_a_memory_without_an_end(no_settings):
    memory, _ = memory_of(DEVICE, unlimited=True)

    assert memory.capacity_bytes is None
    assert memory.malloc(5000 * MIB) is not None


def reserved_for(memory, size_bytes):
    memory.malloc(size_bytes)
    return memory.reserved_bytes


def test_the_settings_of_the_environment_count(monkeypatch, no_settings):
    # GIVEN segments that grow by pages of 20 MiB, where others are rounded up to 2 MiB
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

    assert reserved_for(memory_of(DEVICE)[0], 25 * MIB) == 40 * MIB
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert reserved_for(memory_of(DEVICE)[0], 25 * MIB) == 26 * MIB


def test_settings_made_by_the_program_count_until_the_first_allocation(monkeypatch, no_settings):
    memory, configure = memory_of(DEVICE)
    said = []

    # WHEN the program sets the allocator before it allocates
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    configure(said.append)
    assert reserved_for(memory, 25 * MIB) == 40 * MIB

    # THEN it is too late afterwards: the segment goes on growing
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    configure(said.append)
    assert reserved_for(memory, 25 * MIB) == 60 * MIB
    assert said == []


def test_settings_that_are_not_simulated_are_told_of(monkeypatch, no_settings):
    _, configure = memory_of(DEVICE)
    said = []
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    configure(said.append)

    assert len(said) == 1
    assert "backend:cudaMallocAsync" in said[0]


def test_settings_that_make_no_sense_are_refused(monkeypatch, no_settings):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:many")

    with pytest.raises(BadInput, match="max_split_size_mb"):
        memory_of(DEVICE)


# Counters.


def values(level):
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

    level.peak = level.current
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
    block = PoolBlock(Pool(), 0, 512, IN_USE)
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


def test_statistics_count_the_pools_of_all_streams() -> None:
    # GIVEN 12 MiB in use on the default stream, and 3 of 20 on another, of which 17 are a free part
    memory = LiveAllocator(AllocatorOptions(), None)
    memory.malloc(12 * MIB)
    block = memory.malloc(3 * MIB, stream=7)
    assert block is not None
    stats = memory.stats()
    assert stats["reserved_bytes.large_pool.current"] == memory.reserved_bytes == 32 * MIB
    assert stats["inactive_split_bytes.all.current"] == 17 * MIB
    assert len(memory.segments()) == 2

    # WHEN
    memory.free(block)

    # THEN nothing but a whole segment is free, and it goes
    assert memory.stats()["inactive_split_bytes.all.current"] == 0
    memory.empty_cache()
    assert memory.reserved_bytes == 12 * MIB
