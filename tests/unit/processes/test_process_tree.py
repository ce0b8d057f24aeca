import importlib.util
import os
import signal
import subprocess
import sys
import time

import pytest

import memfit
from memfit.core.units import MIB
from memfit.processes import process_tree as processes

pytestmark = pytest.mark.skipif(not processes.IS_LINUX, reason="/proc and prctl are Linux's")

HOLDS = "import sys, time; held = bytearray(60_000_000); print('ready', flush=True); time.sleep(60)"
FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def start():
    """Starts programs that say a line, and ends them."""
    found = []

    def begin(code, *arguments):
        process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
        found.append(process)
        return process, process.stdout.readline().strip()

    yield begin
    for process in found:
        process.kill()
        process.communicate()


def test_what_a_process_holds(start):
    process, _ = start(HOLDS)

    held = processes.held_by(process.pid)

    assert 57 * MIB < held.anonymous_bytes < 120 * MIB
    assert held.data_bytes >= 57 * MIB
    assert held.held_bytes == held.anonymous_bytes + held.shared_bytes
    assert processes.name_of(process.pid).startswith("python")


def test_shared_memory_is_held_too():
    import mmap

    before = processes.held_by(os.getpid())
    with mmap.mmap(-1, 20_000_000) as shared:
        shared.write(b"x" * 20_000_000)
        after = processes.held_by(os.getpid())

    assert after.shared_bytes - before.shared_bytes > 19_000_000


def test_a_process_that_is_gone_holds_nothing(start):
    process, _ = start("print()")
    process.wait()

    assert processes.held_by(process.pid) is None
    assert processes.name_of(process.pid) == ""
    assert processes.descendants(process.pid) == []
    processes.send_to(process.pid, signal.SIGTERM)
    processes.send_to(process.pid, signal.SIGTERM, group=True)


def test_descendants(start):
    process, child = start(FAMILY)

    assert processes.descendants(process.pid) == [int(child)]
    assert {process.pid, int(child)} <= set(processes.descendants(os.getpid()))
    processes.kill_all([process.pid])
    process.wait()
    while os.path.exists(f"/proc/{child}") and processes.held_by(int(child)) is not None:
        time.sleep(0.01)


ENDS = """
import os, subprocess, sys
from memfit.processes import process_tree as processes

def begin(code):
    process = subprocess.Popen([sys.executable, "-c", code + "print(flush=True); time.sleep(60)"], stdout=-1)
    process.stdout.readline()
    return process

first = begin("import time;")
second = begin("import time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);")
processes.end_descendants(os.getpid(), 0.3)
print(processes.descendants(os.getpid()) == [])
"""


def test_descendants_are_ended_also_where_they_ignore_it():
    command = [sys.executable, "-W", "ignore", "-c", ENDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert done.stdout.strip() == "True", done.stderr


DIES = """
import os, signal, sys, time
from memfit.processes import process_tree as processes
pid = os.fork()
if not pid:
    processes.die_with_parent(signal.SIGKILL)
    print(os.getpid(), flush=True)
    time.sleep(60)
time.sleep(60)
"""


def test_a_child_can_die_with_its_parent(start):
    process, child = start(DIES)
    process.kill()
    process.wait()

    while processes.held_by(int(child)) is not None:
        time.sleep(0.01)


def test_a_system_without_prctl(monkeypatch):
    monkeypatch.setattr(processes, "IS_LINUX", False)

    assert not processes.adopt_orphans()
    held = processes.held_by(os.getpid())
    assert held.anonymous_bytes > MIB
    assert processes.held_by(2**22 + 1) is None
    assert processes.descendants(2**22 + 1) == []
    assert isinstance(processes.descendants(os.getpid()), list)


def test_a_closed_descriptor_is_no_terminal():
    assert not processes.is_terminal(987)


@pytest.mark.parametrize("program", ["DRYRUN", "SUPERVISED"])
def test_the_programs_are_there_once_memfit_is(program):
    assert memfit.__all__

    *_, option, module = getattr(processes, program)

    assert option == "-m"
    assert importlib.util.find_spec(module) is not None
