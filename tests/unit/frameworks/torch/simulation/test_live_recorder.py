import gc
import sys
import threading

import pytest
import torch

from memfit.allocator import LiveAllocator
from memfit.core.replay import AllocatorOptions, OutOfMemory
from memfit.core.timeline import Category
from memfit.core.units import MIB
from memfit.frameworks.torch.simulation import live_recorder
from memfit.frameworks.torch.simulation.live_recorder import LiveRecorder

SEGMENT = 20 * MIB


class Full(Exception):
    """What the tests' recorder raises when its device is full."""


def make(capacity_bytes=None, memory=None):
    memory = memory or LiveAllocator(AllocatorOptions(), capacity_bytes)
    return LiveRecorder(lambda: ("module", "file.py:1"), memory, lambda size, op: Full(size, op)), memory


def empty(count):
    return torch.empty(count, dtype=torch.uint8, device="meta")


def add(recorder, count, category=None):
    tensor = empty(count)
    recorder.add(tensor, "made", category)
    return tensor


def test_a_block_is_asked_of_the_device_and_given_back():
    recorder, memory = make()
    tensor = add(recorder, 1000)
    assert memory.allocated_bytes == 1024
    view = tensor[:1]
    del tensor
    assert memory.allocated_bytes == 1024
    del view

    assert memory.allocated_bytes == 0
    assert recorder.num_ticks == 2


def test_levels_are_those_after_each_event():
    recorder, _ = make()
    first = add(recorder, 1000)
    second = add(recorder, 3 * MIB)
    del first
    del second

    seen = recorder.replay(None)
    timeline = recorder.timeline()
    assert seen.allocated == (1024, 1024 + 3 * MIB, 3 * MIB, 0)
    assert seen.reserved == (2 * MIB, 22 * MIB, 22 * MIB, 22 * MIB)
    assert timeline.num_ticks == len(seen.allocated) == recorder.num_ticks == 4
    assert timeline.curve() == [1000, 1000 + 3 * MIB, 3 * MIB, 0]


def test_the_replay_has_the_peaks_and_the_failure():
    recorder, _ = make()
    kept = add(recorder, 1000)
    del kept
    failure = OutOfMemory(2, 10, 20, 30)

    seen = recorder.replay(failure)

    assert (seen.allocated_peak_bytes, seen.reserved_peak_bytes) == (1024, 2 * MIB)
    # Unrounded.
    assert seen.requested_peak_bytes == 1000
    assert (seen.num_segments, seen.num_retries, seen.out_of_memory) == (1, 0, failure)


def test_nothing_asked_is_nothing_held():
    seen = make()[0].replay(None)

    assert (seen.allocated, seen.allocated_peak_bytes, seen.reserved_peak_bytes) == ((), 0, 0)


def test_a_full_device_refuses_and_nothing_is_recorded():
    # GIVEN a device with room for one segment, and a block in it
    recorder, memory = make(SEGMENT)
    kept = add(recorder, 14 * MIB)

    # WHEN more is asked for
    with pytest.raises(Full) as caught:
        add(recorder, 10 * MIB)

    # THEN the error has size and operator, and all is as before
    assert caught.value.args == (10 * MIB, "made")
    assert recorder.num_blocks == recorder.num_ticks == 1
    assert memory.allocated_bytes == 14 * MIB

    # WHEN the first block is gone, the device has room again
    del kept
    assert isinstance(add(recorder, 10 * MIB), torch.Tensor)
    assert recorder.timeline().num_ticks == recorder.num_ticks == 4


def test_a_refused_tensor_is_not_taken_for_a_block_when_it_goes():
    recorder, memory = make(SEGMENT)
    kept = add(recorder, 14 * MIB)
    refused = empty(10 * MIB)
    with pytest.raises(Full):
        recorder.add(refused, "made")
    assert not recorder.known(refused)
    del refused

    assert recorder.num_ticks == 1
    assert recorder.known(kept)
    assert memory.allocated_bytes == 14 * MIB


def test_transient_blocks_are_given_back_at_once():
    recorder, memory = make()
    recorder.add_inside([MIB, 0, 2 * MIB], "inside", Category.WORKSPACE)

    assert memory.allocated_bytes == 0
    assert recorder.replay(None).allocated == (MIB, 3 * MIB, MIB, 0)


def test_a_convolution_does_without_its_workspace_when_there_is_no_room():
    recorder, memory = make(SEGMENT)
    recorder.add_inside([MIB, 30 * MIB], "aten.convolution", Category.WORKSPACE)

    assert recorder.dropped_workspace
    assert memory.allocated_bytes == 0
    assert [block.size_bytes for block in recorder.timeline().blocks] == [MIB]


def test_any_other_workspace_is_needed():
    recorder, memory = make(SEGMENT)

    with pytest.raises(Full) as caught:
        recorder.add_inside([MIB, 30 * MIB], "aten.sort", Category.WORKSPACE)

    # What had been started is given back.
    assert caught.value.args == (30 * MIB, "aten.sort")
    assert not recorder.dropped_workspace
    assert memory.allocated_bytes == 0


def test_a_permanent_block_is_never_given_back():
    recorder, memory = make()
    recorder.add_permanent(MIB, "workspace", Category.WORKSPACE)
    gc.collect()

    assert memory.allocated_bytes == MIB


def test_live_bytes_by_category_largest_first():
    recorder, _ = make()
    kept = [add(recorder, 10), add(recorder, 300, Category.PARAMETER), add(recorder, 20, Category.BATCH)]
    kept.append(add(recorder, 30))
    gone = add(recorder, 1000)
    del gone

    assert list(recorder.live_bytes().items()) == [("parameter", 300), ("temporary", 40), ("input batch", 20)]


def test_a_resized_storage_takes_other_memory():
    recorder, memory = make()
    tensor = add(recorder, 1000)
    tensor.untyped_storage().resize_(0)
    recorder.resized(tensor.untyped_storage(), "resize_")
    assert memory.allocated_bytes == 0
    tensor.untyped_storage().resize_(2000)
    recorder.resized(tensor.untyped_storage(), "resize_")

    assert memory.allocated_bytes == 2048


class Interrupted:
    """A device in whose middle of an allocation something happens."""

    def __init__(self, happens, capacity_bytes=None):
        self.inner = LiveAllocator(AllocatorOptions(), capacity_bytes)
        self.happens = happens

    def malloc(self, size_bytes, stream=0):
        self.happens()
        return self.inner.malloc(size_bytes, stream)

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.mark.parametrize("in_cycle", [False, True], ids=["reference", "cycle"])
def test_a_tensor_may_go_in_the_middle_of_an_allocation(in_cycle):
    # GIVEN a tensor whose last holder goes while memory is being asked for
    held = {}

    def happens():
        held.clear()
        gc.collect()

    recorder, memory = make(memory=Interrupted(happens))
    going = add(recorder, 5000)
    held["tensor"] = [going]
    if in_cycle:
        held["tensor"].append(held["tensor"])
    del going

    # WHEN another is allocated
    kept = add(recorder, 1000)

    # THEN both have their ticks, the allocation's own first, and only the one that is held counts
    assert kept.numel() == 1000
    assert memory.allocated_bytes == 1024
    assert [(b.size_bytes, b.start, b.end) for b in recorder.timeline().blocks] == [(5000, 0, 2), (1000, 1, None)]
    assert len(recorder.replay(None).allocated) == recorder.timeline().num_ticks == 3


def test_a_tensor_may_go_in_the_middle_of_a_refusal():
    held = {}
    recorder, memory = make(memory=Interrupted(held.clear, 2 * MIB))
    held["tensor"] = add(recorder, 5000)

    with pytest.raises(Full):
        add(recorder, 30 * MIB)

    assert memory.allocated_bytes == 0
    assert recorder.timeline().num_ticks == recorder.num_ticks == 2


def test_many_threads_at_once_lose_nothing():
    recorder, memory = make()

    def work():
        for size in range(1, 200):
            tensor = add(recorder, size * 100)
            recorder.classify(tensor, Category.BATCH, "")
            del tensor

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = add(recorder, 100)
    del last

    assert memory.allocated_bytes == 0
    assert recorder.replay(None).allocated[-1] == 0
    assert recorder.timeline().num_ticks == recorder.num_ticks == 2 * (4 * 199 + 1)


@pytest.fixture
def busy_threads():
    """Threads take turns so often that they meet each other in the middle of anything."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_tensors_of_another_thread_may_come_and_go_while_blocks_are_classified(busy_threads):
    # GIVEN a thread that moves batches to the device, as loaders that prefetch do
    recorder, _ = make()
    kept = [add(recorder, 100) for _ in range(2000)]
    ended = threading.Event()

    def work():
        while not ended.is_set():
            add(recorder, 10)

    thread = threading.Thread(target=work)
    thread.start()

    # WHEN the live blocks are classified meanwhile
    try:
        for _ in range(300):
            recorder.classify_live(0, Category.ACTIVATION)
            recorder.live_bytes()
    finally:
        ended.set()
        thread.join()

    # THEN nothing is in the way
    assert {recorder.categories[index] for index in range(len(kept))} == {Category.ACTIVATION}


def test_what_is_freed_after_the_end_is_not_recorded():
    recorder, _ = make()
    tensor = add(recorder, 1000)
    recorder.stop()
    del tensor

    assert recorder.num_ticks == 1


@pytest.fixture
def few(monkeypatch):
    """A timeline is long from 20 blocks on, of which the last 4 ticks are recent."""
    monkeypatch.setattr(live_recorder, "_MANY_BLOCKS", 20)
    monkeypatch.setattr(live_recorder, "_RECENT_TICKS", 4)


def test_a_short_timeline_is_left_as_it_is(few):
    recorder, _ = make()
    for _ in range(19):
        add(recorder, 1000)

    assert recorder.tidy() is None
    assert recorder.num_blocks == 19


def test_of_a_long_timeline_what_matters_is_kept(few):
    # GIVEN a block that stays, a peak, and many blocks that came and went before and after it
    recorder, memory = make()
    kept = add(recorder, 1000)
    for _ in range(10):
        add(recorder, 2000)
    high = [add(recorder, 5000), add(recorder, 6000)]
    del high
    for _ in range(10):
        add(recorder, 3000)
    before = recorder.replay(None)

    # WHEN it is tidied
    tidied = recorder.tidy()

    # THEN live blocks, those of the peak and recent ones are left, with the levels of their ticks
    timeline, after = recorder.timeline(), recorder.replay(None)
    assert [block.size_bytes for block in timeline.blocks] == [1000, 5000, 6000, 3000, 3000]
    assert timeline.num_ticks == recorder.num_ticks == len(after.allocated) == 9
    assert after.allocated == tuple(before.allocated[tick] for tick in tidied.ticks)
    assert after.reserved == tuple(before.reserved[tick] for tick in tidied.ticks)
    assert max(timeline.curve()) == 1000 + 5000 + 6000
    assert after.allocated_peak_bytes == before.allocated_peak_bytes == memory.stats()["allocated_bytes.all.peak"]
    # Old numbers can be found again.
    assert [tidied.block(index) for index in (0, 5, 11, 12, 99)] == [0, 1, 1, 2, 5]
    assert tidied.tick(tidied.ticks[3]) == 3

    # AND what was live can still be freed
    del kept
    assert memory.allocated_bytes == 0
    assert recorder.timeline().blocks[0].end == 9


def test_it_is_tidied_again_only_after_as_many_new_blocks(few):
    recorder, _ = make()
    kept = [add(recorder, 1000) for _ in range(30)]
    assert recorder.tidy() is not None
    assert recorder.num_blocks == len(kept) == 30

    for _ in range(19):
        add(recorder, 1000)
    assert recorder.tidy() is None
    add(recorder, 1000)
    assert recorder.tidy() is not None
    assert recorder.num_blocks < 40
