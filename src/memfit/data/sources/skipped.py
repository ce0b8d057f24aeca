"""Which samples were left out because they can't be read, counted over all processes that read them.

Workers find what can't be read, and the user asks the program. Workers may be forked or started anew, may be killed,
and belong to whichever loader made them, so nothing is sent: each marks what it left out in a small file that all of
them know, one byte a sample. It is mostly holes, and is removed with the object that made it.
"""

import contextlib
import os
import tempfile
import weakref

import numpy as np

from memfit.data.source import Array


class SkippedSamples:
    """Numbers of samples, each once; copies of it in other processes are the same set."""

    def __init__(self) -> None:
        self._path = ""
        # What couldn't be written down, such as on a full disk, is known to this process alone.
        self._own: set[int] = set()
        with contextlib.suppress(OSError):
            descriptor, self._path = tempfile.mkstemp(prefix="memfit-skipped-")
            os.close(descriptor)
            weakref.finalize(self, _remove, self._path, os.getpid())

    def add(self, sample: int) -> None:
        """Notes that a sample was left out."""
        try:
            with open(self._path, "r+b", buffering=0) as file:
                file.seek(sample)
                file.write(b"\1")
        except OSError:
            self._own.add(sample)

    def numbers(self) -> Array:
        """Those that were left out so far, by any process, ascending."""
        found: Array = np.empty(0, np.int64)
        with contextlib.suppress(OSError):
            found = np.flatnonzero(np.fromfile(self._path, np.uint8))
        return np.union1d(found, np.array(list(self._own), np.int64)) if self._own else found

    def __getstate__(self) -> tuple[str]:
        return (self._path,)

    def __setstate__(self, state: tuple[str]) -> None:
        (self._path,) = state
        self._own = set()


def _remove(path: str, process: int) -> None:
    # A forked process has the same object, and ends before the one that reads the count.
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            os.unlink(path)
