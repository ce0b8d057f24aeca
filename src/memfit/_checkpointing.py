"""The checkpoints of a guarded loop: one folder, written by all processes together, resumed from by all of them."""

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.core import run_events
from memfit.core.errors import BadFile
from memfit.core.guarding import BadCheckpoint
from memfit.guard.checkpoints import FULL, Folder

if TYPE_CHECKING:
    from memfit.adapters.torch.guarding.loop import TorchLoop

_log = logging.getLogger("memfit")


class Checkpointing:
    """Checkpoints of one loop.

    Args:
        loop: whose state they hold.
        folder: where they are; None: there are none.
        keep: how many stay.
    """

    def __init__(self, loop: "TorchLoop", folder: str | os.PathLike[str] | None, keep: int) -> None:
        self._loop = loop
        owner = getattr(loop, "optimizer", None)
        self._folder = None if folder is None else Folder(folder, keep, announce=_log.warning, owner=owner)
        if self._folder is not None:
            self._of_first(self._folder.claim)

    @property
    def is_open(self) -> bool:
        """Whether there is a folder."""
        return self._folder is not None

    @property
    def path(self) -> Path | None:
        """The folder."""
        return None if self._folder is None else self._folder.path

    def save(self, update: int, progress: dict[str, Any]) -> None:
        """Writes everything that a resume needs; the last part of it goes on in the background."""
        if self._folder is None:
            return
        progress = {**progress, "update": update}
        if self._loop.num_ranks == 1:
            written = self._folder.write(
                update, lambda directory: self._loop.write_state(directory, progress), asynchronous=True
            )
        else:
            written = self._save_together(self._folder, update, progress)
        if written:
            run_events.note("checkpoint", update=update, path=str(self._folder.path))

    def _save_together(self, folder: Folder, update: int, progress: dict[str, Any]) -> bool:
        """All processes write into one directory, which the first of them makes and finishes."""
        loop = self._loop
        while True:
            writer, problem = None, None
            if loop.is_first:
                try:
                    writer = folder.begin(update)
                except OSError as error:
                    problem = error
            directory = loop.share("" if writer is None else str(writer.directory))
            if directory:
                try:
                    loop.write_state(Path(directory), progress)
                except OSError as error:
                    problem = error
            failed = loop.any(problem is not None)
            is_full = failed and loop.any(problem is not None and problem.errno in FULL)
            if writer is not None and not failed:
                try:
                    writer.finish(asynchronous=True)
                except OSError as error:
                    problem, failed = error, True
            if not loop.any(failed):
                return True
            again = False
            if loop.is_first:
                if writer is not None:
                    writer.abandon()
                problem = problem or OSError(errno.ENOSPC if is_full else errno.EIO, "another process can't write")
                again = folder.make_room(problem)
                if not again:
                    folder.failed(update, problem)
            if not loop.share("again" if again else ""):
                return False

    def resume(self, check: Callable[[dict[str, Any]], None] = lambda progress: None) -> dict[str, Any] | None:
        """Loads the newest checkpoint that is whole; what `save` was given, and the update. None: there is none.

        Args:
            check: may refuse what `save` was given, before anything is changed.
        """
        if self._folder is None:
            return None
        folder = self._folder
        found = self._of_first(lambda: "" if (latest := folder.latest()) is None else str(latest.path))
        return self._loop.read_state(Path(found), check) if found else None

    def _of_first(self, action: Callable[[], str | None]) -> str:
        """What the first process finds out; what it refuses, all do, for none may wait for one that has ended."""
        answer, refusal = "", None
        if self._loop.is_first:
            try:
                answer = action() or ""
            except BadFile as error:
                refusal = error
        shared = self._loop.share("-" + answer if refusal is None else f"{type(refusal).__name__}:{refusal}")
        if refusal is not None:
            raise refusal
        if not shared.startswith("-"):
            kind, _, text = shared.partition(":")
            raise (BadCheckpoint if kind == BadCheckpoint.__name__ else BadFile)(text)
        return shared[1:]

    def close(self) -> None:
        """Waits until the last checkpoint is on disk."""
        if self._folder is not None:
            self._folder.close()
