import os
import subprocess
import sys
import time

import pytest

from memfit.core.supervised import Sample
from memfit.core.units import GIB, MIB
from memfit.processes import process_tree as processes
from memfit.processes import watch
from memfit.processes.cgroups import ControlGroups, Room
from memfit.processes.limits import Ceiling, FollowingLimit
from memfit.processes.process_tree import MemoryUse
from memfit.processes.watch import History, Watch, is_shared_memory_full

pytestmark = pytest.mark.skipif(not processes.IS_LINUX, reason="/proc is Linux's")

GROWS = """
import subprocess, sys
held = bytearray(50_000_000)
worker = subprocess.Popen([sys.executable, "-c", "held = bytearray(90_000_000); print(flush=True); input()"], stdin=-1)
print("ready", flush=True)
input()
worker.communicate(b"\\n")
"""


class FixedGroups(ControlGroups):
    def __init__(self):
        self.free_bytes = GIB

    def room(self):
        return Room(self.free_bytes, 4 * GIB, 3 * GIB, "container")

    def used_bytes(self):
        return 123


@pytest.fixture
def grown():
    process = subprocess.Popen([sys.executable, "-c", GROWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    lines = {process.stdout.readline().strip(), process.stdout.readline().strip()}
    assert b"ready" in lines
    yield process
    process.communicate(b"\n")


def make(pid, history, groups=None):
    limit = FollowingLimit(pid, Ceiling(None, None, ""), None)
    return Watch(pid, groups or FixedGroups(), limit, history, time.monotonic())


def test_what_is_seen(grown):
    history = History()
    groups = FixedGroups()
    watching = make(grown.pid, history, groups)
    watching.sample()
    groups.free_bytes = 5 * MIB
    watching.sample()

    seen = watching.seen
    assert seen.last.pid == grown.pid
    assert 47 * MIB < seen.last.held_bytes < 85 * MIB
    # The process that holds most is the worker.
    assert seen.peak.pid != grown.pid
    assert 85 * MIB < seen.peak.held_bytes < 130 * MIB
    assert set(seen.by_pid) == {grown.pid, seen.peak.pid}
    assert seen.least_free_bytes == 5 * MIB
    assert seen.data_bytes >= 47 * MIB
    sample = tuple(history)[-1]
    assert (sample.script_bytes, sample.group_bytes) == (seen.last.held_bytes, 123)
    assert sample.others_bytes == seen.peak.held_bytes


def test_it_watches_while_the_block_lasts(grown):
    history = History()
    with make(grown.pid, history) as watching:
        while len(tuple(history)) < 3:
            time.sleep(0.01)
    num_samples = len(tuple(history))

    time.sleep(0.3)

    assert len(tuple(history)) == num_samples
    assert watching.seen.last is not None


def test_a_process_that_is_gone_leaves_what_was_seen():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    watching = make(process.pid, History())

    watching.sample()

    assert watching.seen.peak is None
    assert watching.seen.data_limit_bytes is None


def test_only_so_many_processes_are_remembered(grown, monkeypatch):
    monkeypatch.setattr(watch, "_MAX_REMEMBERED", 1)
    watching = make(grown.pid, History())
    for _ in range(3):
        watching.sample()

    assert len(watching.seen.by_pid) <= 3


def test_shared_memory_that_is_full(monkeypatch):
    assert not is_shared_memory_full("/no/such/place")
    found = os.statvfs("/")
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([*found[:2], 1000, 1, 1, *found[5:10]]))
    assert is_shared_memory_full()


def test_what_the_script_takes_between_two_samples_is_not_free_any_more(grown, monkeypatch):
    # GIVEN a limit of the container that is looked at more often than the container
    limit = FollowingLimit(grown.pid, Ceiling(GIB, 4 * GIB, "container"), None)
    watching = Watch(grown.pid, FixedGroups(), limit, History(), time.monotonic())
    told = []
    monkeypatch.setattr(limit, "follow", lambda held, room, seconds: told.append(held.used_bytes + room.free_bytes))
    monkeypatch.setattr(processes, "held_by", lambda pid: MemoryUse(100 * MIB, 100 * MIB))
    watching.sample()
    monkeypatch.setattr(processes, "held_by", lambda pid: MemoryUse(400 * MIB, 400 * MIB))
    watching._follow_quickly()

    assert set(told) == {GIB + 100 * MIB}


def test_few_samples_are_all_kept():
    history = History(max_samples=10)
    samples = [Sample(index, index) for index in range(10)]
    for sample in samples:
        history.add(sample)

    assert list(tuple(history)) == samples


def test_many_samples_are_thinned_and_no_peak_is_lost():
    history = History(max_samples=16)
    for index in range(10_000):
        history.add(Sample(index, 999_999 if index == 7777 else 1, index % 7, None if index < 5000 else index))

    found = tuple(history)
    assert len(found) <= 16
    assert max(sample.script_bytes for sample in found) == 999_999
    assert max(sample.others_bytes for sample in found) == 6
    assert found[-1].group_bytes == 9999
    assert [sample.seconds for sample in found] == sorted(sample.seconds for sample in found)
    # The peak is still about where it was.
    at = next(index for index, sample in enumerate(found) if sample.script_bytes == 999_999)
    assert found[at].seconds <= 7777
