import resource
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.core.units import GIB, MIB
from memfit.processes import limits
from memfit.processes.cgroups import Room
from memfit.processes.limits import Ceiling, FollowingLimit, ceiling, margin
from memfit.processes.process_tree import MemoryUse


def room(free_bytes, limit_bytes=4 * GIB, of="container"):
    return Room(free_bytes, limit_bytes, limit_bytes - free_bytes, of)


def test_what_others_use_and_a_margin_are_left_out():
    assert ceiling(room(3 * GIB), None) == Ceiling(3 * GIB - margin(4 * GIB), 4 * GIB, "container")


def test_the_margin_grows_with_the_limit():
    assert margin(100 * MIB) == 32 * MIB
    assert margin(100 * GIB) == 2 * GIB


def test_a_budget_that_fits_is_the_limit():
    assert ceiling(room(3 * GIB), GIB) == Ceiling(GIB, GIB, "budget")
    assert ceiling(None, GIB) == Ceiling(GIB, GIB, "budget")


def test_a_budget_above_what_there_is_gives_way():
    assert ceiling(room(3 * GIB), 8 * GIB).limit_of == "container"


def test_where_nothing_is_known_nothing_is_limited():
    assert ceiling(None, None) == Ceiling(None, None, "")


def test_a_full_container_gives_nothing():
    assert ceiling(room(MIB), None).data_bytes == 0


def following(start=2 * GIB, budget=None):
    return FollowingLimit(0, Ceiling(start, 4 * GIB, "container"), budget)


def test_processes_that_come_lower_the_limit():
    limit = following()
    held = MemoryUse(GIB, GIB)

    assert limit.wanted(held, room(2 * GIB)) == 3 * GIB - margin(4 * GIB)
    assert limit.wanted(held, room(GIB)) == 2 * GIB - margin(4 * GIB)


@pytest.fixture
def process():
    """A process that waits and may have two GiB."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as waiting:
        resource.prlimit(waiting.pid, resource.RLIMIT_DATA, (2 * GIB, resource.RLIM_INFINITY))
        yield waiting.pid
        waiting.kill()


def limit_of(pid):
    return resource.prlimit(pid, resource.RLIMIT_DATA)[0]


def test_a_process_of_the_script_keeps_the_limit_that_it_began_with(process):
    # GIVEN a process that the script has started when it had two GiB
    parent = following()
    child = parent.of_child(process)

    # WHEN little is left THEN the script's own process is refused more, and that one isn't
    held = MemoryUse(GIB, GIB)
    assert parent.wanted(held, room(GIB // 2)) < 2 * GIB
    assert child.wanted(held, room(GIB // 2)) == 2 * GIB


def test_a_process_keeps_what_it_has():
    # GIVEN a container with nothing left
    assert following().wanted(MemoryUse(GIB, 3 * GIB), room(0)) == 3 * GIB


def test_a_budget_is_never_exceeded():
    assert following(budget=GIB).wanted(MemoryUse(100, 100), room(4 * GIB)) == GIB


def test_a_limit_that_was_there_before_is_never_exceeded(monkeypatch):
    monkeypatch.setattr(limits, "own_limits", lambda: (5 * MIB, None))

    assert following().wanted(MemoryUse(100, 100), room(4 * GIB)) == 5 * MIB


def test_memory_that_stays_unused_counts_as_free_in_the_end():
    # GIVEN a process with a GiB of stacks that it never uses
    limit, held = following(), MemoryUse(GIB, 2 * GIB)
    first = limit.wanted(held, room(2 * GIB), 0.0)
    for tick in range(1, 20):
        last = limit.wanted(held, room(2 * GIB), 0.2 * tick)

    # THEN it is counted as used at first, and not later
    assert first == 3 * GIB - margin(4 * GIB)
    assert last == first + GIB


def test_memory_that_was_just_mapped_is_about_to_be_used():
    limit = following()
    for tick in range(20):
        limit.wanted(MemoryUse(GIB, GIB), room(2 * GIB), 0.2 * tick)

    assert limit.wanted(MemoryUse(GIB, 2 * GIB), room(2 * GIB), 4.0) == 3 * GIB - margin(4 * GIB)


def settled(limit, held, free_bytes=3 * GIB):
    """What the limit is to be when nothing has changed for a while."""
    return [limit.wanted(held, room(free_bytes), 0.2 * tick) for tick in range(20)][-1]


def test_a_budget_counts_what_is_used_and_not_what_is_reserved():
    # GIVEN an allocator that has reserved a GiB ahead, as that of pyarrow does
    assert settled(following(budget=GIB), MemoryUse(100 * MIB, 100 * MIB + GIB)) == 2 * GIB
    # What has been swapped out is in use.
    assert settled(following(budget=GIB), MemoryUse(0, GIB, swapped_bytes=GIB)) == GIB
    # What every process has mapped ahead changes nothing.
    assert settled(following(budget=GIB), MemoryUse(100 * MIB, 131 * MIB)) == GIB


def test_where_nothing_is_known_of_the_machine_a_budget_is_followed():
    limit = following(budget=GIB)
    limit.wanted(MemoryUse(0, GIB), None, 0.0)

    assert limit.wanted(MemoryUse(0, GIB), None, 3.0) == 2 * GIB


def test_what_was_reserved_and_is_used_now_counts():
    limit = following(budget=GIB)
    settled(limit, MemoryUse(0, GIB))

    assert limit.wanted(MemoryUse(GIB // 2, GIB), room(3 * GIB), 4.0) == GIB + GIB // 2


def test_a_process_that_may_reserve_gets_a_limit_when_it_holds_much():
    limit = FollowingLimit(0, Ceiling(GIB, GIB, "budget"), GIB, reserves=True)

    assert limit.wanted(MemoryUse(400 * MIB, 40 * GIB), room(3 * GIB)) > 100 * GIB
    assert limit.wanted(MemoryUse(600 * MIB, 600 * MIB + 40 * GIB), room(3 * GIB)) == 41 * GIB


def test_only_what_was_left_out_can_exceed_a_budget():
    over = MemoryUse(GIB + 2 * margin(GIB), 3 * GIB)
    limit = FollowingLimit(0, Ceiling(GIB, GIB, "budget"), GIB)
    assert not limit.is_exceeded_by(over)

    limit.data_bytes = 2 * GIB
    assert limit.is_exceeded_by(over)
    assert not limit.is_exceeded_by(MemoryUse(GIB, 3 * GIB))


def test_a_process_that_may_reserve_does_not_fill_the_machine():
    limit = FollowingLimit(0, Ceiling(GIB, GIB, "machine"), None, reserves=True)

    assert limit.is_exceeded_by(MemoryUse(GIB, GIB), room(MIB))
    assert not limit.is_exceeded_by(MemoryUse(GIB, GIB), room(GIB))
    assert not following().is_exceeded_by(MemoryUse(GIB, GIB), room(MIB))


@pytest.mark.parametrize(
    ("held", "refuses"), [((10, 999), True), ((990, 999), False), ((10, 700), False)], ids=["full", "used", "free"]
)
def test_a_limit_that_refuses_what_is_only_reserved(held, refuses):
    limit = FollowingLimit(0, Ceiling(1000 * MIB, None, ""), None)

    assert limit.refuses_reservations(MemoryUse(*(size * MIB for size in held))) is refuses


def test_a_process_that_has_lifted_its_limit_keeps_it(process):
    limit = FollowingLimit(process, Ceiling(2 * GIB, 4 * GIB, "container"), None)
    limit.follow(MemoryUse(1, 1), room(GIB))
    told = limit_of(process)
    assert told < GIB

    resource.prlimit(process, resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    limit.follow(MemoryUse(1, 1), room(2 * GIB))
    assert limit_of(process) == resource.RLIM_INFINITY

    resource.prlimit(process, resource.RLIMIT_DATA, (told, resource.RLIM_INFINITY))
    limit.follow(MemoryUse(1, 1), room(3 * GIB))
    assert limit_of(process) == told


def test_following_tells_the_kernel_only_of_changes(process):
    limit = FollowingLimit(process, Ceiling(2 * GIB, 4 * GIB, "container"), None)
    held = MemoryUse(100 * MIB, 100 * MIB)
    exact = 2 * GIB + margin(4 * GIB) - 100 * MIB

    limit.follow(held, room(exact))
    limit.follow(held, room(exact - MIB))
    assert limit_of(process) == 2 * GIB

    limit.follow(held, room(exact - GIB))
    limit.follow(held, None)
    assert limit_of(process) == limit.data_bytes == GIB


def test_a_system_that_refuses_is_asked_once(process, monkeypatch):
    asked = []
    monkeypatch.setattr(limits, "set_data_limit", lambda size, pid: asked.append(size) or False)
    limit = FollowingLimit(process, Ceiling(2 * GIB, 4 * GIB, "container"), None)

    limit.follow(MemoryUse(1, 1), room(GIB))
    limit.follow(MemoryUse(1, 1), room(GIB // 2))

    assert len(asked) == 1
    assert limit.data_bytes == 2 * GIB


def test_without_a_limit_there_is_none_to_follow():
    limit = FollowingLimit(0, Ceiling(None, None, ""), None)
    limit.follow(MemoryUse(1, 1), room(GIB))

    assert limit.data_bytes is None


PROGRAM = """
import sys
from memfit.core.own_memory import limits
from memfit.processes.limits import set_data_limit

assert set_data_limit(int(sys.argv[1]))
print(limits()[0])
try:
    bytearray(400_000_000)
    print("allocated")
except MemoryError:
    print("refused")
set_data_limit(None)
len(bytearray(400_000_000))
set_data_limit(int(sys.argv[1]) * 2)
print(limits()[0])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts mappings on Linux only")
def test_a_real_limit_refuses_and_can_be_lifted():
    done = subprocess.run([sys.executable, "-c", PROGRAM, "300000000"], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["300000000", "refused", "600000000"]


def test_a_tighter_limit_of_the_users_stays(monkeypatch):
    calls = []
    monkeypatch.setattr(resource, "prlimit", lambda pid, which, *pair: (1000, 5000) if not pair else calls.extend(pair))

    assert limits.set_data_limit(3000)
    assert calls == [(1000, 5000)]


def test_another_process_can_be_limited():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert limits.set_data_limit(123 * MIB, process.pid)
        found = resource.prlimit(process.pid, resource.RLIMIT_DATA)
        process.communicate(b"\n")

    assert found[0] == 123 * MIB
    assert not limits.set_data_limit(123 * MIB, process.pid)


def test_a_budget_is_followed_more_often_than_a_container():
    assert FollowingLimit(0, Ceiling(GIB, GIB, "budget"), GIB).is_urgent
    assert not following().is_urgent
    assert FollowingLimit(0, Ceiling(GIB, GIB, "container"), None, reserves=True).is_urgent


@pytest.mark.parametrize(
    ("visible", "files", "found"),
    [(None, ["nvidia0"], True), (None, ["nvidiactl"], False), ("", ["nvidia0"], False), ("0", ["kfd"], True)],
)
def test_devices(monkeypatch, tmp_path, visible, files, found):
    monkeypatch.setattr(limits.env, "visible_cuda_devices", lambda: visible)
    for name in files:
        Path(tmp_path, name).touch()

    assert limits.has_devices(tmp_path) is found
