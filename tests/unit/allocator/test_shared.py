import os
import subprocess
import sys

import pytest

from memfit.allocator import LiveAllocator
from memfit.allocator.shared import SharedDevice, can_share, read_shares
from memfit.core.replay import AllocatorOptions
from memfit.core.units import MIB

CONTEXT = 10 * MIB
USABLE = 100 * MIB


@pytest.fixture
def device(tmp_path):
    return str(tmp_path / "device")


def process(device, name="", usable=USABLE, **options):
    """What stands for a process: an allocator of its own that shares the device."""
    memory = LiveAllocator(AllocatorOptions(**options), None if usable is None else usable - CONTEXT)
    shared = SharedDevice(device, usable, CONTEXT, name)
    memory.share(shared)
    return memory, shared


def test_this_system_can():
    assert can_share()


@pytest.mark.parametrize("expandable", [False, True])
def test_what_one_holds_another_can_not_have(device, expandable):
    first, _ = process(device, expandable_segments=expandable)
    second, _ = process(device, expandable_segments=expandable)

    block = first.malloc(60 * MIB)
    assert second.malloc(40 * MIB) is None
    assert second.malloc(20 * MIB) is not None
    assert (first.others_bytes, second.others_bytes) == (20 * MIB + CONTEXT, 60 * MIB + CONTEXT)

    # What is cached is still the process's; what is returned to the device is not.
    first.free(block)
    assert second.malloc(40 * MIB) is None
    first.empty_cache()
    assert second.malloc(40 * MIB) is not None


def test_the_peak_is_what_all_held_at_once(device):
    first, _ = process(device, "parent")
    second, _ = process(device, "child")
    block = first.malloc(40 * MIB)
    first.free(block)
    first.empty_cache()
    second.malloc(30 * MIB)
    peak, shares = read_shares(device)

    # The first keeps its CUDA context.
    assert peak == CONTEXT + 40 * MIB
    second.malloc(20 * MIB)
    peak, shares = read_shares(device)
    assert peak == 2 * CONTEXT + 50 * MIB
    assert [(s.name, s.at_peak_bytes, s.peak_bytes) for s in shares] == [
        ("parent", CONTEXT, CONTEXT + 40 * MIB),
        ("child", CONTEXT + 50 * MIB, CONTEXT + 50 * MIB),
    ]


def test_a_process_that_uses_nothing_has_no_context(device):
    first, _ = process(device)
    process(device)

    assert first.others_bytes == 0


def test_one_that_has_ended_holds_nothing(device):
    first, _ = process(device)
    second, shared = process(device)
    second.malloc(60 * MIB)
    shared.end()

    assert first.malloc(80 * MIB) is not None


def test_one_that_was_killed_holds_nothing(device):
    code = f"""
import os
from memfit.allocator import LiveAllocator
from memfit.allocator.shared import SharedDevice
from memfit.core.replay import AllocatorOptions
memory = LiveAllocator(AllocatorOptions(), {USABLE})
memory.share(SharedDevice({device!r}, {USABLE}, {CONTEXT}))
assert memory.malloc({60 * MIB}) is not None
os.kill(os.getpid(), 9)
"""
    memory, _ = process(device)
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9

    assert read_shares(device)[0] == 60 * MIB + CONTEXT
    assert memory.malloc(80 * MIB) is not None
    assert memory.others_bytes == 0


def test_without_a_limit_all_is_counted(device):
    first, _ = process(device, usable=None)
    second, _ = process(device, usable=None)
    assert first.malloc(80 * MIB) is not None
    assert second.malloc(80 * MIB) is not None

    assert read_shares(device)[0] == 160 * MIB + 2 * CONTEXT


def test_settings_and_limits_of_a_process_hold_beside_others(device):
    memory, _ = process(device)
    assert memory.configure(AllocatorOptions(expandable_segments=True))
    memory.limit(30 * MIB)

    assert memory.malloc(40 * MIB) is None
    memory.share(None)
    memory.limit(None)
    assert memory.malloc(40 * MIB) is not None
    assert read_shares(device)[0] == 0


def test_who_is_to_come_and_who_is_at_work(device):
    _, script = process(device)
    script.expect(2)
    assert script.others()[:2] == (2, 0)
    _, child = process(device)
    assert (script.others()[:2], script.have_taken_steps()) == ((1, 1), False)

    before = script.others()[2]
    child.note(1, 10, has_ended=False)
    assert (script.others()[2] > before, script.have_taken_steps()) == (True, False)
    child.note(3, 20, has_ended=True)
    assert (script.others()[:2], script.have_taken_steps()) == ((1, 0), True)
    script.expect(-1)
    assert script.others()[:2] == (0, 0)


def test_processes_that_all_failed_before_a_step_are_not_waited_for(device):
    _, script = process(device, "script")
    _, first = process(device)
    first.note(0, 5, has_ended=True)
    first.end()
    assert script.have_taken_steps()

    # Others may still do the work.
    _, second = process(device)
    assert not script.have_taken_steps()
    second.end()
    script.expect(1)
    assert not script.have_taken_steps()


def test_processes_that_ended_well_may_be_followed_by_anything(device):
    _, script = process(device, "script")
    _, child = process(device)
    child.note(0, 5, has_ended=False)
    child.end()

    assert not script.have_taken_steps()


def test_a_process_that_was_forked_off_has_a_row_of_its_own(device):
    _, script = process(device, "script")
    script.again("child").note(1, 1, has_ended=True)

    assert [(s.name, s.pid, s.num_steps) for s in read_shares(device)[1]] == [
        ("script", os.getpid(), 0),
        ("child", os.getpid(), 1),
    ]


def test_more_processes_than_rows(device, monkeypatch):
    made = [process(device, str(number))[1] for number in range(260)]

    made[-1].note(1, 1, has_ended=False)
    assert len(read_shares(device)[1]) == 256


def test_no_file_and_one_that_is_cut(tmp_path):
    assert read_shares(str(tmp_path / "none")) == (0, [])
    (tmp_path / "cut").write_bytes(b"12")
    assert read_shares(str(tmp_path / "cut")) == (0, [])
