"""`memfit run` against the real thing: limits of control groups, kills by the kernel, signals, terminals."""

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from memfit.catalogue.host import memory_groups
from memfit.core.supervised import Cause, SupervisedRun
from memfit.core.units import MIB

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "memfit", "run"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="control groups and /proc are Linux's")


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        # Gone before it was opened, or before it was read.
        return False


@pytest.fixture
def group():
    """A control group of version 1 below our own, with a limit of 300 MiB; gives what puts a program into it."""
    levels = [levels[0] for is_unified, levels in memory_groups() if not is_unified]
    if not levels:
        pytest.skip("there is no memory controller of version 1 here")
    folder = levels[0] / f"memfit-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(300 * MIB))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    yield lambda: (folder / "cgroup.procs").write_text(str(os.getpid()))
    for _ in range(100):
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.05)


def run(folder, text, *options, preexec_fn=None):
    script = folder / "train.py"
    script.write_text(text)
    command = [*COMMAND, *options, "--json", str(script)]
    done = subprocess.run(
        command, env=ENVIRONMENT, cwd=folder, capture_output=True, text=True, timeout=120, preexec_fn=preexec_fn
    )
    assert done.stdout, done.stderr
    return done, SupervisedRun.from_json(done.stdout)


GROWS = """
import time
held = []
while len(held) < 60:
    held.append(bytearray(b"x") * 10_000_000)
    time.sleep(0.01)
"""


def test_without_us_the_kernel_kills(tmp_path, group):
    done = subprocess.run([sys.executable, "-c", GROWS], preexec_fn=group, timeout=60)

    assert done.returncode == -signal.SIGKILL


def test_under_the_limit_of_a_container_a_kill_becomes_an_exception(tmp_path, group):
    done, found = run(tmp_path, GROWS, preexec_fn=group)

    assert found.attempts[0].ending.cause is Cause.EXCEPTION
    assert (found.limit_of, found.limit_bytes) == ("container", 300 * MIB)
    assert 150 * MIB < found.peak.held_bytes < 300 * MIB
    assert "MemoryError" in done.stderr
    assert done.returncode == 3


SHARED = """
import mmap, time
shared = mmap.mmap(-1, 600_000_000)
for start in range(0, 600_000_000, 4096):
    shared[start] = 1
    if start % 40_960_000 == 0:
        time.sleep(0.05)
"""


def test_a_kill_all_the_same_is_noticed_and_explained(tmp_path, group):
    # GIVEN memory that no limit on data counts
    done, found = run(tmp_path, SHARED, preexec_fn=group)

    ending = found.attempts[0].ending
    assert (ending.cause, ending.signal) == (Cause.KILLED, "SIGKILL")
    assert ending.process.held_bytes > 150 * MIB
    assert "the kernel killed it: process" in done.stderr
    assert "the container's limit is 300.0 MiB" in done.stderr
    assert done.returncode == 3


WORKERS = """
import multiprocessing, sys, time

def grow():
    held = []
    for _ in range(20):
        held.append(bytearray(b"x") * 10_000_000)
        time.sleep(0.02)
    time.sleep(60)

if __name__ == "__main__":
    workers = [multiprocessing.Process(target=grow) for _ in range(2)]
    for worker in workers:
        worker.start()
    while all(worker.exitcode is None for worker in workers):
        time.sleep(0.02)
    codes = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.kill()
    sys.exit(any(codes))
"""


def test_a_worker_that_is_killed_is_named(tmp_path, group):
    done, found = run(tmp_path, WORKERS, preexec_fn=group)

    ending = found.attempts[0].ending
    assert (ending.cause, ending.exit_code) == (Cause.WORKER_KILLED, 1)
    assert ending.process.held_bytes > 50 * MIB
    assert done.returncode == 3


def test_other_processes_of_the_container_count(tmp_path, group):
    # GIVEN a neighbour in the same container that holds 150 MiB
    code = "held = bytearray(b'x') * 150_000_000; print(flush=True); input()"
    neighbour = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=group
    )
    neighbour.stdout.readline()

    _, found = run(tmp_path, GROWS, preexec_fn=group)

    assert found.attempts[0].ending.cause is Cause.EXCEPTION
    assert found.peak.held_bytes < 150 * MIB
    assert neighbour.poll() is None
    neighbour.communicate(b"\n")


FAMILY = """
import multiprocessing, os, subprocess, sys, time

if __name__ == "__main__":
    worker = multiprocessing.Process(target=time.sleep, args=(60,))
    worker.start()
    away = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    with open("ready.tmp", "w") as file:
        file.write(f"{os.getpid()} {os.getppid()} {worker.pid} {away.pid}")
    os.rename("ready.tmp", "ready")
    time.sleep(60)
"""


def begin(folder, **options):
    """A supervised script with processes of its own; and the numbers of all of them."""
    (folder / "train.py").write_text(FAMILY)
    process = subprocess.Popen([*COMMAND, "train.py"], env=ENVIRONMENT, cwd=folder, **options)
    while not (folder / "ready").exists():
        assert process.poll() is None
        time.sleep(0.02)
    pids = [int(pid) for pid in (folder / "ready").read_text().split()]
    assert all(map(is_running, pids))
    return process, pids


def until_gone(pids):
    # They sleep for a minute: less than that shows that somebody has ended them.
    deadline = time.monotonic() + 40
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "return_code"),
    [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)],
)
def test_nothing_outlives_it(tmp_path, number, return_code):
    process, pids = begin(tmp_path, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    process.send_signal(number)

    assert process.wait(timeout=60) == return_code
    until_gone(pids)


def test_ctrl_c_in_a_terminal(tmp_path):
    # GIVEN a terminal of its own
    ours, theirs = pty.openpty()

    def take_terminal():
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    process, pids = begin(tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal)
    os.close(theirs)

    # WHEN Ctrl-C is pressed in it
    os.write(ours, b"\x03")

    # THEN the script is interrupted once, and everybody ends
    text = b""
    with contextlib.suppress(OSError):  # Linux says EIO when the last holder of the other end is gone
        while chunk := os.read(ours, 4096):
            text += chunk
    os.close(ours)
    assert process.wait(timeout=60) == 130
    until_gone(pids)
    assert b"during handling" not in text.lower()


def test_a_script_reads_our_input(tmp_path):
    (tmp_path / "train.py").write_text("print('got', input())")

    done = subprocess.run(
        [*COMMAND, "train.py"], env=ENVIRONMENT, cwd=tmp_path, input="words\n", capture_output=True, text=True
    )

    assert done.stdout == "got words\n"
