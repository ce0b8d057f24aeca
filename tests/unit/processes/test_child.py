import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from memfit.core.run_events import RunRequest
from memfit.processes import child
from memfit.processes import process_tree as processes
from memfit.processes.child import Signals, passing_on_signals, started

pytestmark = pytest.mark.skipif(not processes.IS_LINUX, reason="keepers are Linux's")


def run(tmp_path, text, *arguments, **options):
    script = tmp_path / "script.py"
    script.write_text(text)
    with started(RunRequest(script=str(script), arguments=arguments), tmp_path, **options) as running:
        return running, running.wait()


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("pass", 0),
        ("import sys; sys.exit(int(sys.argv[1]))", 6),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("import os; os._exit(9)", 9),
        ("raise ValueError", 1),
    ],
)
def test_how_a_script_ended(tmp_path, text, status, capfd):
    running, found = run(tmp_path, text, "6")

    assert found == status
    assert not running.lost_keeper


def test_output_passes_through(tmp_path, capfd):
    print("before")
    run(tmp_path, "import sys; print('out'); print('err', file=sys.stderr)")
    run(tmp_path, "print('quiet')", stdout_to_stderr=True)

    written = capfd.readouterr()
    assert written.out == "before\nout\n"
    assert written.err == "err\nquiet\n"


def test_leaving_the_block_ends_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(60)")
    with started(RunRequest(script=str(script)), tmp_path) as running:
        pid = running.pid
        assert processes.held_by(pid) is not None

    assert processes.held_by(pid) is None


def test_a_keeper_that_is_killed_is_noticed(tmp_path):
    text = "import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)"
    running, status = run(tmp_path, text)

    assert status == -signal.SIGKILL
    assert running.lost_keeper


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGINT"])
def test_signals_reach_the_script(tmp_path, name):
    # GIVEN a script that tells which signal it gets
    ready = tmp_path / "ready"
    text = (
        "import signal, sys, time\n"
        f"signal.signal(signal.{name}, lambda number, frame: sys.exit(40 + number))\n"
        f"open({str(ready)!r}, 'w').close()\n"
        # Short: a signal that comes between the call and the sleep doesn't interrupt it.
        "for _ in range(600): time.sleep(0.1)"
    )
    script = tmp_path / "script.py"
    script.write_text(text)
    number = getattr(signal, name)
    with passing_on_signals() as signals, started(RunRequest(script=str(script)), tmp_path) as running:
        signals.become(running)
        while not ready.exists():
            pass

        # WHEN we get it
        os.kill(os.getpid(), number)

        # THEN it is the script's
        assert running.wait() == 40 + number
    assert signals.names == {name}
    assert signals.ask_to_end is (name not in ("SIGUSR1", "SIGUSR2"))


def test_handlers_are_put_back():
    before = {name: signal.getsignal(getattr(signal, name)) for name in child._PASSED_ON}
    with passing_on_signals():
        assert signal.getsignal(signal.SIGTERM) != before["SIGTERM"]

    assert {name: signal.getsignal(getattr(signal, name)) for name in child._PASSED_ON} == before


def test_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with passing_on_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_has_no_signals():
    found = []

    def enter():
        with passing_on_signals() as signals:
            found.append(signals.ask_to_end)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()

    assert found == [False]


def test_a_signal_that_comes_too_early_is_kept_for_the_script(monkeypatch):
    sent = []
    monkeypatch.setattr(processes, "send_to", lambda pid, number, group=False: sent.append((pid, number)))
    signals = Signals()
    signals.handle(signal.SIGTERM, None)
    signals.handle(signal.SIGUSR1, None)

    signals.become(SimpleNamespace(pid=77, group=None))

    assert sent == [(77, signal.SIGTERM)]


def test_the_third_interruption_kills(monkeypatch):
    sent = []
    monkeypatch.setattr(processes, "send_to", lambda pid, number, group=False: sent.append(number))
    monkeypatch.setattr(processes, "is_terminal", lambda descriptor: True)
    signals = Signals(pid=77)
    for _ in range(3):
        signals.handle(signal.SIGINT, None)

    # The terminal has sent the first two to the script itself.
    assert sent == [signal.SIGKILL]


def test_the_request_is_beside_the_events(tmp_path):
    text = "import os; from memfit.core.run_events import note; note('step', step=1)"
    run(tmp_path, text)

    assert {"request.json", "events.jsonl", "script.py"} == {path.name for path in Path(tmp_path).iterdir()}


# The keeper is a fork of its process, so each test has one in a program of its own.

PROGRAM = """
import os, signal, subprocess, sys, time
from memfit.processes import child

child.GRACE_SECONDS = 0.2
child.divide(int(sys.argv[1]))
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

    child.divide(None)
