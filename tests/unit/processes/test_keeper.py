"""The keeper is a fork of its process, so each test has one in a program of its own."""

import os
import signal
import subprocess
import sys
import time

import pytest

from memfit.processes import keeper
from memfit.processes import process_tree as processes

pytestmark = pytest.mark.skipif(not processes.IS_LINUX, reason="the kernel's help is Linux's")

PROGRAM = """
import os, signal, subprocess, sys, time
from memfit.processes import keeper

keeper.GRACE_SECONDS = 0.2
keeper.divide(int(sys.argv[1]))
{script}
"""


def begin(script, **options):
    """A program that divides and goes on with `script`; and our end of the pipe on which its keeper tells."""
    ours, theirs = os.pipe()
    command = [sys.executable, "-c", PROGRAM.format(script=script), str(theirs)]
    process = subprocess.Popen(command, pass_fds=(theirs,), **options)
    os.close(theirs)
    return process, open(ours, encoding="ascii")


def until_gone(pid):
    while processes.held_by(pid) is not None:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("script", "code"),
    [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGUSR1)", -signal.SIGUSR1), ("print(end='')", 0)],
)
def test_the_keeper_tells_how_the_script_ended(script, code):
    process, told = begin(script)
    with told:
        lines = told.read().split("\n")

    assert process.wait(timeout=60) == 0
    assert int(lines[0].removeprefix("pid ")) != process.pid
    assert os.waitstatus_to_exitcode(int(lines[1].removeprefix("status "))) == code


LEAVES = """
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(left.pid, flush=True)
"""


def test_what_the_script_leaves_behind_is_ended():
    process, told = begin(LEAVES, stdout=subprocess.PIPE)
    with told:
        left = int(process.communicate(timeout=60)[0])

    assert processes.held_by(left) is None


def test_signals_are_left_to_the_script():
    # GIVEN a script and its keeper in one group, as in a terminal
    script = "signal.signal(signal.SIGINT, lambda *a: sys.exit(5)); print('ready', flush=True); time.sleep(60)"
    process, told = begin(script, stdout=subprocess.PIPE, process_group=0)
    process.stdout.readline()

    # WHEN the group is interrupted
    os.killpg(process.pid, signal.SIGINT)

    # THEN the script has its say, and the keeper tells
    with told:
        assert told.read().endswith(f"status {5 << 8}\n")
    assert process.wait(timeout=60) == 0
    process.stdout.close()


SUPERVISOR = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""


def test_nothing_outlives_a_supervisor_that_is_killed():
    # GIVEN a supervisor, a keeper, a script, and a process of the script that has left its group
    script = "print(' ', os.getpid(), os.getppid(), flush=True)" + LEAVES + "time.sleep(60)"
    program = PROGRAM.format(script=script).replace("int(sys.argv[1])", "os.dup(1)")
    command = [sys.executable, "-c", SUPERVISOR, program]
    supervisor = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    told = [supervisor.stdout.readline().split() for _ in range(3)]
    pids = {int(word) for words in told for word in words if word.isdigit()}
    assert len(pids) == 3 and all(processes.held_by(pid) for pid in pids)

    # WHEN it is killed
    supervisor.kill()
    supervisor.communicate(timeout=60)

    # THEN the others end too
    for pid in pids:
        until_gone(pid)


def test_where_there_is_no_fork_there_is_no_keeper(monkeypatch):
    monkeypatch.delattr(os, "fork")

    keeper.divide(None)
