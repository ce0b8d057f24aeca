"""The checkpoints of a guarded loop: one folder, written by all processes together, resumed from by all of them."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.core import run_events
from memfit.guard.checkpoints import Folder

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
        self._folder = None if folder is None else Folder(folder, keep, announce=_log.warning)
        if self._folder is not None and loop.is_first:
            self._folder.claim()

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
        writer, problem = None, ""
        if loop.is_first:
            try:
                writer = folder.begin(update)
            except OSError as error:
                problem = str(error)
        directory = loop.share("" if writer is None else str(writer.directory))
        if directory:
            try:
                loop.write_state(Path(directory), progress)
            except OSError as error:
                problem = str(error)
        failed = loop.any(bool(problem))
        if writer is not None and not failed:
            try:
                writer.finish(asynchronous=True)
            except OSError as error:
                problem, failed = str(error), True
        if failed and loop.is_first:
            if writer is not None:
                writer.abandon()
            _log.warning("the checkpoint of update %d can't be written: %s. The training goes on.", update, problem)
        return not failed

    def resume(self) -> dict[str, Any] | None:
        """Loads the newest checkpoint that is whole; what `save` was given, and the update. None: there is none."""
        if self._folder is None:
            return None
        latest = self._folder.latest() if self._loop.is_first else None
        found = self._loop.share("" if latest is None else str(latest.path))
        return self._loop.read_state(Path(found)) if found else None

    def close(self) -> None:
        """Waits until the last checkpoint is on disk."""
        if self._folder is not None:
            self._folder.close()
