"""The checkpoints of a `fit` of Keras: which folder is whose, and when one is due."""

import logging
import os
import time
from pathlib import Path
from typing import Any

from memfit.core import run_events
from memfit.guard.checkpoints import Checkpoint, Folder, is_time

_log = logging.getLogger("memfit")

_finished: dict[str, int] = {}
"""How many fits with each folder have ended in this process."""


class FitCheckpoints:
    """Checkpoints of one call of `fit`.

    A script may call `fit` several times with one folder, or know nothing of the folder that its supervisor names; the
    second and later calls of a process have folders of their own inside of it, in their order. A call that was broken
    off doesn't count: the same one goes on where it was.

    Args:
        path: the folder; None: there are no checkpoints.
        keep: how many stay.
        every: batches between two; None: by time.
        model: whose they are.
    """

    def __init__(self, path: str | os.PathLike[str] | None, keep: int, every: int | None, model: object = None) -> None:
        self._path = path
        self._folder = None if path is None else Folder(own_folder(path), keep, announce=_log.warning, owner=model)
        self._every = every
        self._last = time.monotonic()
        self._seconds, self._num_saved = 0.0, 0
        if self._folder is not None:
            self._folder.claim()

    @property
    def is_open(self) -> bool:
        """Whether there is a folder."""
        return self._folder is not None

    def latest(self) -> Checkpoint | None:
        """The newest that is whole."""
        return None if self._folder is None else self._folder.latest()

    def is_due(self, update: int) -> bool:
        """Whether it is time for one.

        Args:
            update: batches trained on so far.
        """
        if self._folder is None:
            return False
        if self._every is not None:
            return update % self._every == 0
        return is_time(time.monotonic() - self._last, self._seconds, self._num_saved)

    def wait_anew(self) -> None:
        """Nothing new has happened until now."""
        self._last = time.monotonic()

    def save(self, loop: Any, progress: dict[str, Any]) -> None:
        """Writes one; the last part of it goes on in the background."""
        if self._folder is None:
            return
        started = time.perf_counter()
        update = int(progress["update"])
        written = self._folder.write(update, lambda directory: loop.write(directory, progress), asynchronous=True)
        self._seconds = time.perf_counter() - started
        self._num_saved += 1
        self.wait_anew()
        if written:
            run_events.note("checkpoint", update=update, path=str(self._folder.path))

    def finish(self) -> None:
        """The fit has come to its end: the next one of this process is another."""
        if self._folder is not None and self._path is not None:
            key = os.path.abspath(self._path)
            _finished[key] = _finished.get(key, 0) + 1

    def close(self) -> None:
        """Waits until the last one is on disk."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None


def own_folder(path: str | os.PathLike[str]) -> Path:
    """The folder, or one inside of it where fits of this process have ended with it, by their number."""
    count = _finished.get(os.path.abspath(path), 0)
    return Path(path, f"fit-{count + 1}") if count else Path(path)


def plain_history(history: Any, ended: tuple[int, dict[str, Any]] | None) -> dict[str, Any]:
    """Keras's History as plain data, with the epoch that has just ended, of which it may not have heard yet."""
    found = getattr(history, "history", None) or {}
    epochs = [int(epoch) for epoch in getattr(history, "epoch", [])]
    plain = {str(name): [float(value) for value in values] for name, values in found.items()}
    if ended is not None and ended[0] not in epochs:
        epochs.append(ended[0])
        for name, value in ended[1].items():
            plain.setdefault(str(name), []).append(float(value))
    return {"history": plain, "epochs": epochs}
