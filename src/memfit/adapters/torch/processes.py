"""Processes that the script starts: they are real, but the simulated device is not theirs.

Loader workers have nothing to do with the device and are left alone. Any other process is noted: what it puts on the
device is not in the report, and a forked or spawned one finds no device at all.
"""

import multiprocessing.process
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.utils.data import _utils

from memfit.adapters.torch.origin import HIDDEN_FOLDERS, INSTALLED_FOLDERS
from memfit.adapters.torch.replacement import Replacement

_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))
NOT_SIMULATED = "process-not-simulated"


class Processes:
    """Hears of processes that the script starts.

    Args:
        report: takes (code, text) of each.
    """

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self.num_started = 0

    def replacements(self) -> list[Replacement]:
        """Stands in front of the two ways in which Python starts processes."""
        plain_start = multiprocessing.process.BaseProcess.start
        plain_popen = subprocess.Popen.__init__
        processes = self

        def start(self: Any, /) -> None:
            if getattr(self, "_target", None) is not _utils.worker._worker_loop:
                processes._note(f"process {self.name!r}")
            plain_start(self)

        def popen(self: Any, /, *args: Any, **kwargs: Any) -> None:
            command = args[0] if args else kwargs.get("args")
            words = command if isinstance(command, str) else " ".join(map(str, command or ()))
            if "python" in words and _asked_by_user():
                processes._note(f"command {words[:80]!r}")
            plain_popen(self, *args, **kwargs)

        return [
            Replacement(multiprocessing.process.BaseProcess, "start", start),
            Replacement(subprocess.Popen, "__init__", popen),
        ]

    def _note(self, what: str) -> None:
        self.num_started += 1
        self._report(NOT_SIMULATED, f"{what} was started: what it does on the device is not simulated")


def _asked_by_user() -> bool:
    """Whether the user's own code, and not a library that asks for a version, starts the command."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_LIBRARIES):
            return False
        if not path.startswith((*HIDDEN_FOLDERS, *INSTALLED_FOLDERS, "<")):
            return True
        frame = frame.f_back
    return False
