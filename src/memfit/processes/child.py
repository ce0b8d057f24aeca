"""One start of the script: its process, what is passed on to it, and how it ended.

A supervisor that is ended by SIGKILL can end nobody. So the script's process has a parent of its own, the keeper,
which the kernel tells of the supervisor's death, and which is given every process of the script whose parent is gone.
When the script ends, the keeper ends what it left behind and tells how it ended, through a pipe.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from memfit.core import env
from memfit.core.run_events import RunRequest
from memfit.processes import process_tree as processes

_PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_ENDING = {"SIGINT", "SIGTERM", "SIGHUP"}
_IMPATIENT = 3
GRACE_SECONDS = 5.0  # how long processes that the script left behind may take to end when they are told to
# What the terminal or the supervisor sends is for the script, and not for its keeper.
_OF_SCRIPT = ("SIGQUIT", *_PASSED_ON)


class Child:
    """A script's process: the script itself, or its keeper, which tells of it through the descriptor `report`."""

    def __init__(self, process: "subprocess.Popen[bytes]", report: int | None, group: int | None = None) -> None:
        self._process = process
        self._report = os.fdopen(os.open(os.devnull, os.O_RDONLY) if report is None else report, encoding="ascii")
        self._has_keeper = report is not None
        self.group = group
        self.lost_keeper = False
        line = self._report.readline()
        self.pid = int(line.split()[1]) if line.startswith("pid ") else process.pid

    def wait(self) -> int:
        """Waits until the script and all it started have ended; its exit code, negative for a signal."""
        return_code = self._process.wait()
        line = self._report.readline()
        if line.startswith("status "):
            return os.waitstatus_to_exitcode(int(line.split()[1]))
        # Somebody has killed the keeper, and the kernel with it the script, but not what that had started.
        self.lost_keeper = self._has_keeper
        return return_code

    def close(self) -> None:
        """Ends whatever is still there."""
        if self._process.poll() is None:
            processes.send_to(self.pid, processes.KILL)
            self._process.wait()
        self._report.close()


@contextlib.contextmanager
def started(request: RunRequest, folder: Path, *, stdout_to_stderr: bool = False) -> Iterator[Child]:
    """Starts the script, with its request and events in `folder`; when the block is left, nothing of it is left."""
    path = folder / "request.json"
    path.write_text(json.dumps(request.to_json()), encoding="utf-8")
    # What we have printed so far comes before what the script prints.
    sys.stdout.flush()
    sys.stderr.flush()
    has_keeper = hasattr(os, "fork")
    ours, theirs = os.pipe() if has_keeper else (None, None)
    # Whoever has the terminal's attention gets its keys: a script in a group of its own could not read from it.
    options: dict[str, Any] = {"pass_fds": (theirs,)} if has_keeper else {}
    if has_keeper and not processes.is_terminal(0):
        options["process_group"] = 0
    arguments = [*processes.SUPERVISED, str(path), *([] if theirs is None else [str(theirs)])]
    try:
        process = subprocess.Popen(
            arguments, stdout=2 if stdout_to_stderr else None, env=env.with_run_request(str(path)), **options
        )
    finally:
        if theirs is not None:
            os.close(theirs)
    child = Child(process, ours, process.pid if "process_group" in options else None)
    try:
        yield child
    finally:
        child.close()


@dataclass(slots=True)
class Signals:
    """The signals that were passed on."""

    names: set[str] = field(default_factory=set)  # of all of them
    pid: int | None = None  # the process that gets them; None while there is none
    group: int | None = None  # those that get an interruption, as from a terminal; None where that sends it itself
    _num_interrupts: int = 0

    @property
    def ask_to_end(self) -> bool:
        """Whether any of them asks a program to end: then it isn't started again."""
        return bool(self.names & _ENDING)

    def become(self, child: Child | None) -> None:
        """From now on the child gets the signals; those that ask to end also if they came before it was there."""
        self.pid, self.group = (None, None) if child is None else (child.pid, child.group)
        if child is not None:
            for name in sorted(self.names & _ENDING):
                self._send(getattr(signal, name))

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Passes a signal on."""
        name = signal.Signals(number).name
        self.names.add(name)
        if self.pid is None:
            return
        if name == "SIGINT":
            self._num_interrupts += 1
            if self._num_interrupts >= _IMPATIENT:
                number = processes.KILL
        self._send(number)

    def _send(self, number: int) -> None:
        if self.pid is None:
            return
        if number == signal.SIGINT and self.group is not None:
            processes.send_to(self.group, number, group=True)
        elif number != signal.SIGINT or not processes.is_terminal(0):
            # Else the terminal has sent it to the script as well.
            processes.send_to(self.pid, number)


@contextlib.contextmanager
def passing_on_signals() -> Iterator[Signals]:
    """Signals that we get are the script's, while the block lasts; only where this is the main thread."""
    signals = Signals()
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for name in _PASSED_ON:
            number = getattr(signal, name, None)
            # One that is ignored here, as with nohup, is ignored by the script as well.
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, signals.handle)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def divide(report: int | None) -> None:
    """Goes on in a new process, which is to become the script; this one stays behind as its keeper.

    The keeper writes the script's process and status to `report`. Where there is no `fork`, there is no keeper.
    """
    if not hasattr(os, "fork"):
        return
    supervisor, keeper = os.getppid(), os.getpid()
    processes.adopt_orphans()
    # Signals wait until it is clear which of the two processes they are for.
    numbers = {getattr(signal, name) for name in _OF_SCRIPT}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    pid = os.fork()
    if pid:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    if pid:
        _keep(pid, supervisor, report)
    if report is not None:
        os.close(report)
    processes.adopt_orphans(False)
    processes.die_with_parent(signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(1)


def _end_everything(number: int, frame: FrameType | None) -> None:
    # It comes again with each further thread of the supervisor that ends, and must not interrupt what it began.
    signal.signal(number, signal.SIG_IGN)
    processes.end_descendants(os.getpid(), 0.0)
    os._exit(1)


def _keep(script: int, supervisor: int, report: int | None) -> None:
    """Waits for the script, ends what it left, tells, and ends."""
    if processes.IS_LINUX:
        # A signal that nobody else sends.
        death = signal.SIGRTMIN + 3
        signal.signal(death, _end_everything)
        processes.die_with_parent(death)
        if os.getppid() != supervisor:
            _end_everything(death, None)

    def tell(line: str) -> None:
        if report is not None:
            with contextlib.suppress(OSError):
                os.write(report, f"{line}\n".encode())

    tell(f"pid {script}")
    status = 0
    with contextlib.suppress(ChildProcessError):
        pid = 0
        while pid != script:
            # Others are somebody else's children, which were given to us when that one ended.
            pid, status = os.waitpid(-1, 0)
    tell(f"status {status}")
    processes.end_descendants(os.getpid(), GRACE_SECONDS)
    os._exit(0)
