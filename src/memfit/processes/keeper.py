"""The process between the supervisor and the script, which lets nothing of the script outlive the supervisor.

A supervisor that is ended by SIGKILL can end nobody. So the script's process has a parent of its own, the keeper,
which the kernel tells of the supervisor's death, and which is given every process of the script whose parent is gone.
When the script ends, the keeper ends what it left behind and tells how it ended, through a pipe.
"""

import contextlib
import os
import signal
from types import FrameType

from memfit.processes import process_tree as processes

GRACE_SECONDS = 5.0  # how long processes that the script left behind may take to end when they are told to

# What the terminal or the supervisor sends is for the script.
_NOT_FOR_US = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


def divide(report: int | None) -> None:
    """Goes on in a new process, which is to become the script; this one stays behind as its keeper.

    Where there is no `fork`, the script gets no keeper.

    Args:
        report: where the keeper writes the script's process and status; None to tell nobody.
    """
    if not hasattr(os, "fork"):
        return
    supervisor, keeper = os.getppid(), os.getpid()
    processes.adopt_orphans()
    # Signals wait until it is clear which of the two processes they are for.
    numbers = {getattr(signal, name) for name in _NOT_FOR_US}
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
