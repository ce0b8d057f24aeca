"""Each in a process of its own, because handlers of signals are the process's."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.core import interrupts as _interrupts

SOURCES = str(Path(__file__).parents[3] / "src")


def run(*words):
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, timeout=120)
    return done.returncode, done.stderr


# Stands for an import that takes long: the first module that a verb needs is interrupted.
INTERRUPTED = """
import os, runpy, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "memfit.core.reporters":
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass
sys.meta_path.insert(0, Finder())
sys.orig_argv = {orig!r}
sys.argv = {argv!r}
import memfit
memfit.compare
"""


@pytest.mark.parametrize(
    ("orig", "argv", "said"),
    [
        (["python", "/bin/memfit", "devices"], ["/bin/memfit", "devices"], "memfit: interrupted\n"),
        (["python", "-m", "memfit", "devices"], ["-m", "devices"], "memfit: interrupted\n"),
        (["python", "-m", "memfit.api.dryrun_child", "request"], ["-m", "request"], ""),
    ],
    ids=["command", "module", "child"],
)
def test_imports_that_are_interrupted_show_no_traceback(orig, argv, said):
    assert run("-c", INTERRUPTED.format(orig=orig, argv=argv)) == (130, said)


def test_a_program_that_uses_memfit_keeps_its_own_ways():
    code, shown = run("-c", INTERRUPTED.format(orig=["python", "train.py"], argv=["train.py"]))

    assert code == -signal.SIGINT
    assert "KeyboardInterrupt" in shown


# A process of its own, because a signal goes to any thread that doesn't block it.
WAITING = """
import os, signal, subprocess, sys
from memfit.core import interrupts as _interrupts
seen = []
signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
with _interrupts.waiting():
    os.kill(os.getpid(), signal.SIGINT)
    while_waiting = list(seen)
    code = "import signal; print(signal.pthread_sigmask(0, []))"
    inherited = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
print(while_waiting, seen, "SIGINT" in inherited, file=sys.stderr)
"""


def test_an_interruption_waits_for_the_process_that_is_being_started():
    assert run("-c", WAITING) == (0, "[] [2] True\n")


def test_it_can_be_raised_again(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "memfit"])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _interrupts.end_at_once()
        quiet = signal.getsignal(signal.SIGINT)
        _interrupts.raise_again()
        assert quiet is not signal.default_int_handler is signal.getsignal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
