import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from memfit.allocator.shared import ProcessShare
from memfit.core.dryrun import DryRun, Outcome, Request
from memfit.processes import launch
from memfit.processes import process_tree as processes
from memfit.processes.launch import run_child
from tests.unit.processes import fake_child
from tests.unit.reports.builders import RTX_3090

ROOT = Path(__file__).parents[3]


def request(*arguments, **changes):
    return Request("train.py", False, arguments, RTX_3090, **changes)


def test_the_child_gets_the_request_and_its_result_is_read(child, capfd):
    data = run_child(request("complete", "--lr", "1", count=2, steps=5, scan=7))

    run = DryRun.from_json(data)
    assert run.outcome is Outcome.COMPLETED
    assert run.arguments == ("complete", "--lr", "1")
    assert data["loader_ordinal"] == 4
    (asked,) = child()
    assert (asked["device"], asked["count"], asked["steps"], asked["scan"]) == ("rtx-3090", 2, 5, 7)
    assert not os.path.exists(os.path.dirname(asked["result_path"]))


PROGRAM = """
import json, os, pathlib, signal, sys
request = json.loads(pathlib.Path(sys.argv[1]).read_text())
layer = pathlib.Path(request["layers"][0], "layer")
layer.mkdir()
(layer / "model.pt").write_text("the script's")
pathlib.Path(request["layers"][0], "layers.json").write_text(json.dumps([[os.getcwd(), str(layer)]]))
print(*request["layers"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kept", [False, True])
def test_no_folder_of_a_run_is_left_however_it_ends(tmp_path, monkeypatch, capfd, kept):
    # GIVEN a script that is killed after it has written a file
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)
    folder = str(tmp_path / "kept") if kept else ""
    data = run_child(request(checkpoint_folder=folder), command=[sys.executable, "program.py"])

    # THEN the file is where it was to be kept, and nothing else is left
    place = str(tmp_path / "kept" / "model.pt") if kept else ""
    assert data["redirected"] == {str(tmp_path / "model.pt"): place}
    assert os.path.exists(tmp_path / "kept" / "model.pt") is kept
    assert not any(map(os.path.exists, capfd.readouterr().out.split()))


DIES_ON_THE_DEVICE = """
import os, pathlib, sys
from memfit.allocator.shared import SharedDevice
device = SharedDevice(str(pathlib.Path(sys.argv[1]).parent / "device"), None, 0)
device.hold(3 * 2**20)
device.note(2, 7, False)
os.abort()
"""


def test_a_crash_tells_what_the_device_has_seen(capfd):
    run = DryRun.from_json(run_child(request(), command=[sys.executable, "-c", DIES_ON_THE_DEVICE]))

    assert (run.outcome, run.num_steps) == (Outcome.CRASHED, 2)
    assert "ended by SIGABRT" in run.error
    assert run.error.endswith("; until then it took 2 steps and held 3.00 MiB at most (simulated)")


KILLED = """
import memfit.api, sys
from memfit.catalogue import find_device
from memfit.core.dryrun import Request
from memfit.processes.launch import run_child
run_child(Request("train.py", False, (), find_device("t4"), until_fit=True))
"""


@pytest.mark.skipif(not processes.IS_LINUX, reason="the kernel of Linux ends them")
def test_a_script_ends_with_a_memfit_that_was_killed(tmp_path):
    # GIVEN a dry run whose script waits
    Path(tmp_path, "train.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    started = subprocess.Popen([sys.executable, "-c", KILLED], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    script = int(started.stdout.readline())

    # WHEN memfit is killed
    started.kill()
    started.communicate()

    # THEN the script is gone
    while processes.held_by(script) is not None:
        time.sleep(0.01)


def test_output_passes_through(child, capfd):
    run_child(request())

    written = capfd.readouterr()
    assert (written.out, written.err) == ("script says hello\n", "script complains\n")


def test_output_can_leave_standard_output_alone(child, capfd):
    run_child(request(), stdout_to_stderr=True)

    written = capfd.readouterr()
    assert written.out == ""
    assert sorted(written.err.splitlines()) == ["script complains", "script says hello"]


def test_a_silent_child_says_and_reads_nothing(child, capfd):
    assert DryRun.from_json(run_child(request("reads"), silent=True)).outcome is Outcome.COMPLETED

    assert capfd.readouterr() == ("", "")


def test_what_we_wrote_comes_before_what_the_script_writes(child, capfd):
    print("before", end="")
    run_child(request())

    assert capfd.readouterr().out == "beforescript says hello\n"


def test_sets_have_the_same_order_every_time(child, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    run_child(request(), silent=True)
    monkeypatch.setenv("PYTHONHASHSEED", "12")
    run_child(request(), silent=True)

    assert [asked["hash_seed"] for asked in child()] == ["0", "12"]


@pytest.mark.parametrize(
    ("behaviour", "error", "exit_code"),
    [
        ("SIGKILL", "the process was ended by SIGKILL, probably because this machine ran out of memory", None),
        ("SIGSEGV", "the process was ended by SIGSEGV, probably by a compiled extension", None),
        ("SIGBUS", "the process was ended by SIGBUS, probably because shared memory (/dev/shm) is full", None),
        ("SIGUSR1", "the process was ended by SIGUSR1", None),
        ("exit", "the process ended with exit code 7 and left no result; what it printed last may say why", 7),
        ("garbage", "the process ended with exit code 1 and left no result; what it printed last may say why", 1),
    ],
)
def test_a_child_that_leaves_no_result_has_crashed(child, behaviour, error, exit_code):
    run = DryRun.from_json(run_child(request(behaviour, steps=2), silent=True))

    assert run.outcome is Outcome.CRASHED
    assert run.estimate is None
    assert run.error.startswith(error)
    assert (run.exit_code, run.num_steps, run.steps_wanted) == (exit_code, 0, 2)


def test_another_command_can_be_started(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import sys; sys.exit(3)")

    run = DryRun.from_json(run_child(request(), command=[sys.executable, str(program)]))

    assert (run.outcome, run.exit_code) == (Outcome.CRASHED, 3)


def test_it_can_be_called_from_any_thread(child):
    found = []
    thread = threading.Thread(target=lambda: found.append(run_child(request(), silent=True)))
    thread.start()
    thread.join()

    assert DryRun.from_json(found[0]).outcome is Outcome.COMPLETED


def test_the_handler_of_termination_is_put_back(child):
    def handler(number, frame):
        raise AssertionError

    before = signal.signal(signal.SIGTERM, handler)
    try:
        run_child(request(), silent=True)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def signal_when(ready, number):
    """Sends us a signal as soon as a file has content."""

    def wait_and_send():
        while not (ready.exists() and ready.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=wait_and_send)
    thread.start()
    return thread


@pytest.mark.parametrize("behaviour", ["waits", "ignores"])
def test_an_interruption_in_this_process_ends_the_child(child, tmp_path, monkeypatch, behaviour):
    ready = tmp_path / "ready"
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 20.0 if behaviour == "waits" else 0.1)
    sender = signal_when(ready, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as raised:
        run_child(request(behaviour, str(ready)), stdout_to_stderr=True)

    sender.join()
    assert not isinstance(raised.value, launch.Interrupted)
    assert not is_running(ready.read_text().split()[0])


def test_an_interrupted_child_that_left_a_result_has_told_it(child, tmp_path):
    ready = tmp_path / "ready"
    sender = signal_when(ready, signal.SIGINT)

    with pytest.raises(launch.Interrupted) as raised:
        run_child(request("tells", str(ready)), stdout_to_stderr=True)

    sender.join()
    assert raised.value.run.outcome is Outcome.INTERRUPTED
    assert raised.value.run.num_steps == 3


def test_termination_in_this_process_reaches_its_own_handler(child, tmp_path):
    ready, heard = tmp_path / "ready", []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    sender = signal_when(ready, signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_child(request("waits", str(ready)), stdout_to_stderr=True)
    finally:
        signal.signal(signal.SIGTERM, before)

    sender.join()
    assert heard == [signal.SIGTERM]
    assert not is_running(ready.read_text().split()[0])


PARENT = """
import sys

from memfit.core.dryrun import Request
from memfit.processes import launch
from memfit.processes import process_tree as processes
from tests.unit.reports.builders import RTX_3090

launch._GRACE_SECONDS = float(sys.argv[4])
request = Request("train.py", False, (sys.argv[2], sys.argv[3]), RTX_3090)
try:
    launch.run_child(request, command=[sys.executable, sys.argv[1]])
except KeyboardInterrupt:
    sys.exit(130)
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("behaviour", ["waits", "ignores"])
@pytest.mark.parametrize(
    ("number", "return_code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP)],
)
def test_a_signal_to_us_ends_the_script_and_what_it_started(tmp_path, behaviour, number, return_code):
    # GIVEN a parent whose child, with a process of its own, is waiting
    ready = tmp_path / "ready"
    grace = "20" if behaviour == "waits" else "0.2"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", PARENT, fake_child.__file__, behaviour, str(ready), grace]
    parent = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not (ready.exists() and ready.read_text()):
        assert parent.poll() is None
        time.sleep(0.02)
    pids = [int(pid) for pid in ready.read_text().split()]
    assert all(map(is_running, pids))

    # WHEN the parent gets the signal
    parent.send_signal(number)

    # THEN it ends as that signal wants, nobody is left, and no file is
    assert parent.wait(timeout=60) == return_code
    while any(map(is_running, pids)):
        time.sleep(0.02)
    assert [path.name for path in tmp_path.iterdir()] == ["ready"]


def in_terminal(behaviour, ready):
    """A parent with a terminal of its own; gives the process and our end of the terminal."""
    ours, theirs = pty.openpty()

    def take_terminal():
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", PARENT, fake_child.__file__, behaviour, str(ready), "20"]
    parent = subprocess.Popen(
        command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal
    )
    os.close(theirs)
    return parent, ours


def all_of(descriptor):
    text = b""
    with contextlib.suppress(OSError):  # Linux says EIO when the last holder of the other end is gone
        while chunk := os.read(descriptor, 4096):
            text += chunk
    os.close(descriptor)
    return text.decode()


def test_a_script_can_read_from_the_terminal(tmp_path):
    parent, terminal = in_terminal("reads", tmp_path / "ready")
    os.write(terminal, b"yes\n\x04")

    assert "script says hello to 'yes\\n'" in all_of(terminal)
    assert parent.wait(timeout=60) == 0


def test_ctrl_c_in_the_terminal_reaches_the_script_once(tmp_path):
    ready = tmp_path / "ready"
    parent, terminal = in_terminal("waits", ready)
    while not (ready.exists() and ready.read_text()):
        assert parent.poll() is None
        time.sleep(0.02)
    child, worker = ready.read_text().split()

    os.write(terminal, b"\x03")

    shown = all_of(terminal)
    assert parent.wait(timeout=60) == 130
    # The system takes a moment to end a process that was killed.
    deadline = time.monotonic() + 30
    while is_running(child) or is_running(worker):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    # One of the script, one of its worker; both write to the terminal at once, and may write into each other's words.
    assert 1 <= shown.count("KeyboardInterrupt") <= 2


def test_a_run_without_a_step_says_what_it_is_doing(monkeypatch, capfd):
    # GIVEN a process that takes longer than the first moment
    monkeypatch.setattr(launch, "_MOMENTS", (0.0, 0.05, 600.0))
    launch._run([sys.executable, "-c", "import time; time.sleep(2)", "x"], False, False, is_ours=False)

    assert "memfit: still importing PyTorch after 0 s\n" in capfd.readouterr().err
    launch._run([sys.executable, "-c", "import time; time.sleep(2)", "x"], False, False, is_ours=False, until_fit=True)
    assert "memfit: the script runs, no training step yet, after 0 s\n" in capfd.readouterr().err
    share = ProcessShare(1)
    assert launch.progress(0, [share]) == "the script runs, no optimizer step yet, nothing on the device yet,"
    assert "peak so far 1.00 MiB" in launch.progress(2**20, [share])
    assert launch.progress(2**20, [ProcessShare(1, num_steps=1)]) == ""
