import atexit
import multiprocessing
import os
import queue
import shlex
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from memfit.catalogue import find_device
from memfit.core.dryrun import DryRun, Outcome, Request
from memfit.core.patching import replaced
from memfit.frameworks.torch.script import processes as module
from memfit.frameworks.torch.script.processes import NOT_SIMULATED, ExitFunctions, Processes
from memfit.processes.launch import run_child


@pytest.fixture
def notes():
    return []


@pytest.fixture
def processes(notes):
    made = Processes(lambda code, text: notes.append((code, text)))
    with replaced(made.replacements()):
        yield made


def work():
    pass


def test_a_process_of_the_scripts_is_noted(processes, notes):
    process = multiprocessing.get_context("fork").Process(target=work, name="collector")
    process.start()
    process.join()

    assert process.exitcode == 0
    assert processes.num_started == 1
    ((code, text),) = notes
    assert (code, "'collector'" in text) == (NOT_SIMULATED, True)


def test_the_workers_of_a_loader_are_not(processes, notes):
    assert [batch.tolist() for batch in DataLoader(torch.arange(4), num_workers=2)] == [[0], [1], [2], [3]]
    assert (processes.num_started, notes) == (0, [])


@pytest.mark.parametrize(
    "command", [[sys.executable, "-c", "pass"], shlex.join([sys.executable, "-c", "pass"])], ids=["list", "shell"]
)
def test_a_python_of_the_scripts_is_noted(processes, notes, command):
    assert subprocess.run(command, shell=isinstance(command, str)).returncode == 0
    assert processes.num_started == 1
    assert notes[0][1].startswith("command ")


def test_other_commands_are_not(processes, notes):
    assert subprocess.run(["true"]).returncode == 0
    assert (processes.num_started, notes) == (0, [])


def test_what_a_library_starts_is_not():
    # GIVEN a function whose file lies where libraries are installed
    library = Path(sysconfig.get_path("purelib"), "some_library.py")
    names = {}
    exec(compile("import subprocess\ndef ask(command): subprocess.run(command, check=True)", library, "exec"), names)

    made = Processes(pytest.fail)
    with replaced(made.replacements()):
        names["ask"]([sys.executable, "-c", "pass"])

    assert made.num_started == 0


def test_a_script_that_waits_for_what_will_not_come_is_ended_and_one_that_sleeps_is_not(monkeypatch):
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.05)
    ended, done = [], []
    module.interrupt_when_idle(lambda: bool(done), lambda: ended.append(True))

    # GIVEN code of the user's own that takes its time; before that, this thread may wait in Python's own for the other
    done.append(True)
    time.sleep(0.5)
    assert not ended
    # WHEN it waits for somebody else
    with pytest.raises(KeyboardInterrupt):
        queue.Queue().get(timeout=60)
    assert ended


class Others:
    """A device on which others are at work."""

    def __init__(self, *states):
        self._states = list(states)

    def pids(self):
        return set()

    def others(self):
        return self._states.pop(0) if len(self._states) > 1 else self._states[0]


def test_a_process_waits_for_those_beside_it_while_they_get_on(monkeypatch):
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.0)
    others = Others((1, 0, 0), (0, 1, 1), (0, 1, 2), (0, 0, 3))
    module.wait_for_others(others)

    assert others.others() == (0, 0, 3)
    # One that never gets on is not waited for.
    monkeypatch.setattr(module, "_QUIET_SECONDS", 0.0)
    module.wait_for_others(Others((0, 1, 1)))


def test_processes_that_ended_are_not_to_come(monkeypatch):
    monkeypatch.setattr(module, "_START_SECONDS", 1e9)
    monkeypatch.setattr(module, "_MOST_SECONDS", 1e9)
    made = Processes(pytest.fail, are_simulated=True)
    with replaced(made.replacements()):
        process = multiprocessing.get_context("fork").Process(target=_wait)
        process.start()
        # This one never imports PyTorch, so that it never comes.
        subprocess.run([sys.executable, "-S", "-c", ""], check=True)

    assert (made.num_started, made.num_alive()) == (2, 1)
    process.kill()
    module.wait_for_others(Others((2, 0, 0)), made.num_alive)
    process.join()
    assert made.num_alive() == 0


@pytest.mark.parametrize("code", ["import time; time.sleep(600)", "while True: pass"])
def test_a_sibling_that_does_nothing_is_not_waited_for(monkeypatch, code):
    """One process of a script waits for another that the script has started, which never uses the device."""
    monkeypatch.setattr(module, "_QUIET_SECONDS", 0.3)
    monkeypatch.setattr(module, "_MOST_SECONDS", 1.5)
    monkeypatch.setattr(os, "getppid", os.getpid)
    sibling = subprocess.Popen([sys.executable, "-S", "-c", code])
    begun = time.monotonic()
    try:
        module.wait_for_others(Others((1, 0, 0)))
    finally:
        sibling.kill()
        sibling.wait()

    assert (time.monotonic() - begun > 1.5) == ("while" in code)


def test_processes_that_are_left_are_ended():
    made = Processes(pytest.fail, are_simulated=True)
    process = multiprocessing.get_context("fork").Process(target=_wait)
    process.start()
    made.finish()

    assert process.exitcode == -15


def _wait():
    import time

    time.sleep(600)


HOGWILD = """
import sys
import torch
import torch.multiprocessing as mp

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def train(rank, model, both):
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(50):
        if step == 2:
            # Before either is ended: a busy machine may run one long before the other.
            both.wait(60)
        optimizer.zero_grad()
        model(torch.randn(8, 1024).to(device)).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    mp.set_start_method(sys.argv[1])
    model = torch.nn.Linear(1024, 1024)
    if sys.argv[1] != "fork":
        model = model.to(device).share_memory()
    both = mp.Barrier(2)
    processes = [mp.Process(target=train, args=(rank, model, both)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_share_the_device(tmp_path, method):
    # GIVEN a script whose two processes train on one device
    (tmp_path / "train.py").write_text(HOGWILD)
    t4 = find_device("t4")
    data = run_child(Request(str(tmp_path / "train.py"), False, (method,), t4), silent=True)
    run = DryRun.from_json(data)

    # THEN both took their steps, and the peak is what all held at once; a model that is shared counts once
    assert (run.outcome, run.num_steps, run.error) == (Outcome.COMPLETED, 3, "")
    assert run.estimate.peak_bytes == sum(run.processes.values()) > 2 * t4.context_bytes
    assert len(run.processes) == (2 if method == "fork" else 3)
    first, second, *_ = sorted(run.processes.values(), reverse=True)
    assert first == second == run.estimate.reserved_peak_bytes + t4.context_bytes


POOL = """
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
import torch


def begin(barrier):
    global both
    both = barrier


def train(fold):
    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(50):
        if step == 2 and fold < 2:
            # Otherwise one process may have taken all tasks before the other has begun.
            both.wait(60)
        model(torch.randn(8, 1024).cuda()).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    with ProcessPoolExecutor(2, mp_context=context, initializer=begin, initargs=(context.Barrier(2),)) as pool:
        print(list(pool.map(train, range(4))))
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_pool_of_processes_shares_the_device(tmp_path, method):
    # GIVEN a pool, whose processes hand on what ends a task, and wait for the next one
    (tmp_path / "train.py").write_text(POOL)
    run = DryRun.from_json(
        run_child(Request(str(tmp_path / "train.py"), False, (method,), find_device("t4")), silent=True)
    )

    # THEN the first end doesn't keep the other from taking its steps
    assert (run.outcome, run.num_steps, run.error) == (Outcome.COMPLETED, 3, "")
    assert len(run.processes) == 2
    assert run.estimate.peak_bytes == sum(run.processes.values())


TWICE = """
import multiprocessing
import sys
import torch


def train():
    for task in range(2):
        parameter = torch.nn.Parameter(torch.ones(2, device="cuda"))
        optimizer = torch.optim.SGD([parameter])
        try:
            while True:
                parameter.sum().backward()
                optimizer.step()
        except BaseException:
            pass
    sys.exit(7)


process = multiprocessing.get_context("fork").Process(target=train)
process.start()
process.join()
sys.exit(process.exitcode)
"""


def test_a_process_that_goes_on_after_its_end_does_not_leave_in_the_scripts_place(tmp_path):
    # GIVEN a process that takes all the steps wanted once more, as one of a pool does for each task
    (tmp_path / "train.py").write_text(TWICE)
    run = DryRun.from_json(run_child(Request(str(tmp_path / "train.py"), False, (), find_device("t4")), silent=True))

    # THEN it ends by itself: a pool takes a process that is gone for a failure of all
    assert (run.exit_code, run.num_steps) == (7, 3)


# Functions registered for the end


def test_functions_run_once_and_the_last_first():
    functions, said = ExitFunctions(), []
    with replaced(functions.replacements()):
        atexit.register(said.append, "first")
        atexit.register(said.append, "second")
        functions.run()
        functions.run()

    assert said == ["second", "first"]


def test_a_function_can_be_taken_back():
    functions, said = ExitFunctions(), []

    def say():
        said.append("said")

    with replaced(functions.replacements()):
        assert atexit.register(say) is say
        atexit.unregister(say)
        functions.run()

    assert said == []


def test_a_function_that_fails_does_not_keep_the_others_from_running(capsys):
    functions, said = ExitFunctions(), []

    def fail():
        raise ValueError("in vain")

    def leave():
        raise SystemExit(1)

    with replaced(functions.replacements()):
        for function in (lambda: said.append("last"), fail, leave):
            atexit.register(function)
        functions.run()

    assert said == ["last"]
    assert "ValueError: in vain" in capsys.readouterr().err


def test_threads_of_the_script_come_first():
    functions, said, go_on = ExitFunctions(), [], threading.Event()

    def work():
        go_on.wait()
        said.append("thread")

    with replaced(functions.replacements()):
        threading.Thread(target=work).start()
        atexit.register(said.append, "function")
        go_on.set()
        functions.run()

    assert said == ["thread", "function"]
