import os
import signal
import sys
import threading
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


def test_another_command_can_be_started(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import sys; sys.exit(3)")
    with started(RunRequest(), tmp_path, command=[sys.executable, str(program)]) as running:
        assert running.wait() == 3


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGINT"])
def test_signals_reach_the_script(tmp_path, name):
    # GIVEN a script that tells which signal it gets
    ready = tmp_path / "ready"
    text = (
        "import signal, sys, time\n"
        f"signal.signal(signal.{name}, lambda number, frame: sys.exit(40 + number))\n"
        f"open({str(ready)!r}, 'w').close()\n"
        "time.sleep(60)"
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
