"""The checkpoints of a guarded run: when one is due, written by all processes together, and the last one at exit.

The best parameters of a run are in a checkpoint of their own, or in host memory where the run has no folder. They are
not the best model, of which a copy would hold as much again on the device.
"""

import atexit
import contextlib
import math
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfit.core import run_events
from memfit.core.adapter import Ranks, SingleProcess
from memfit.core.errors import BadFile, BadInput
from memfit.core.guarding import BadCheckpoint
from memfit.guard.checkpoints import Folder

# Of the time of training, what checkpoints may cost where no interval is given; and the least time between two.
_SHARE = 0.01
_INTERVAL_SECONDS = 60.0
_FIRST_INTERVAL_SECONDS = 5.0

_finished: Counter[str] = Counter()  # how many calls of `fit` with each folder have ended in this process
_last_saves: "set[weakref.WeakMethod[Callable[[], None]]]" = set()


class Checkpointing:
    """Checkpoints of one run: `keep` of them, one `every` so many updates, or by time where that is None.

    Without a folder there are none; `ranks` write them together. A folder that can't be had is refused.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        keep: int = 3,
        every: int | None = None,
        *,
        owner: object = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks: Ranks = SingleProcess() if ranks is None else ranks
        self._every = every
        self._last = time.monotonic()
        self._save_seconds, self._num_saved = 0.0, 0
        self._folder = None if folder is None else Folder(folder, keep, owner=owner)
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

    def is_due(self, update: int) -> bool:
        """True if a checkpoint is due after this number of updates."""
        if self._folder is None:
            return False
        if self._every is not None:
            return update % self._every == 0
        # Sooner at first: a run that ends early has more to lose than the time that a checkpoint takes.
        seldom = min(_INTERVAL_SECONDS, _FIRST_INTERVAL_SECONDS * 2**self._num_saved)
        is_time = time.monotonic() - self._last >= max(seldom, self._save_seconds / _SHARE)
        return self._ranks.agreed(is_time)

    def wait_anew(self) -> None:
        """Nothing new has happened until now."""
        self._last = time.monotonic()

    def save(self, update: int, write: Callable[[Path], None]) -> None:
        """Writes one, the files of this process by `write`; the last part of it goes on in the background."""
        if self._folder is None:
            return
        started = time.perf_counter()
        written = self._folder.write(update, write, asynchronous=True, ranks=self._ranks)
        self._save_seconds = time.perf_counter() - started
        self._num_saved += 1
        self.wait_anew()
        if written:
            run_events.note("checkpoint", update=update, path=str(self._folder.path))

    def latest(self) -> Path | None:
        """The directory of the newest checkpoint that is whole; None: there is none."""
        if self._folder is None:
            return None
        folder = self._folder
        latest = self._of_first(lambda: "" if (newest := folder.latest()) is None else str(newest.path))
        return Path(latest) if latest else None

    def _of_first(self, action: Callable[[], str | None]) -> str:
        """What the first process finds out; what it refuses, all do, for none may wait for one that has ended."""
        answer, refusal = "", None
        if self._ranks.is_first:
            try:
                answer = action() or ""
            except BadFile as error:
                refusal = error
        shared = self._ranks.share("-" + answer if refusal is None else f"{type(refusal).__name__}:{refusal}")
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


class Best:
    """The parameters with the best score so far.

    Args:
        parameters: the model's: `write(directory)` and `read(directory, model)`, or, in host memory, `copy(into)` and
            `put(copies, model)`; the run's own model where it is None.
        current_step: says how many updates of the parameters have been made.
        folder: where they are kept; None: in host memory.
        before_load: called before parameters are put into the run's own model.
    """

    def __init__(
        self,
        parameters: Any,
        current_step: Callable[[], int],
        folder: Folder | None = None,
        before_load: Callable[[], None] = lambda: None,
    ) -> None:
        self._parameters = parameters
        self._current_step = current_step
        self._folder = folder
        self._before_load = before_load
        self._copies: Any = None
        self._higher: bool | None = None
        self.score: float | None = None  # the best so far; None before the first
        self.step: int | None = None  # the number of updates that had been made then
        latest = None if folder is None else folder.latest()
        if latest is None:
            return
        try:
            self.score, self._higher = float(latest.info["score"]), bool(latest.info["higher_is_better"])
        except (KeyError, TypeError, ValueError):
            raise BadCheckpoint(
                f"{latest.path} holds no best parameters: its manifest names no score. Give another folder."
            ) from None
        self.step = latest.step

    def offer(self, score: float, *, higher_is_better: bool) -> bool:
        """Keeps the parameters as they are now if their score is better than any before.

        Args:
            score: what they reach; one that is no number is never the best.
            higher_is_better: True for an accuracy, False for a loss; the same in all calls.

        Returns:
            Whether they are kept. False too where they couldn't be written, which is announced.

        Raises:
            BadInput: `higher_is_better` isn't what it was before.
        """
        score = float(score)
        if self._higher is not None and self._higher != higher_is_better:
            raise BadInput(
                f"higher_is_better={higher_is_better} was given, and the scores so far were kept with "
                f"higher_is_better={self._higher}. Give the same in all calls, or another folder."
            )
        is_better = self.score is None or (score > self.score if higher_is_better else score < self.score)
        if math.isnan(score) or not is_better:
            return False
        step = self._current_step()
        if self._folder is None:
            self._copies = self._parameters.copy(self._copies)
        else:
            info = {"score": score, "higher_is_better": higher_is_better}
            if not self._folder.write(step, self._parameters.write, info=info):
                return False
        self.score, self.step, self._higher = score, step, higher_is_better
        return True

    def load_into(self, model: Any = None) -> None:
        """Puts the best parameters into a model, or into the run's own.

        Raises:
            BadInput: no score has been offered yet.
            BadCheckpoint: they are of another model, or their files have been damaged.
        """
        if self.score is None:
            raise BadInput("there are no best parameters yet: offer a score first")
        self._before_load()
        if self._folder is None:
            self._parameters.put(self._copies, model)
            return
        latest = self._folder.latest()
        if latest is None:
            raise BadCheckpoint(f"the best parameters, of step {self.step}, are gone from {self._folder.path}")
        self._parameters.read(latest.path, model)

    def close(self) -> None:
        """Gives up possession of the folder."""
        if self._folder is not None:
            self._folder.close()


def folder_of_call(path: str | os.PathLike[str]) -> Path:
    """The folder for the next call of `fit`, or one inside of it where calls of this process have ended with it.

    A script may call `fit` several times with one folder, or know nothing of the folder that its supervisor names. A
    call that was broken off doesn't count: the same one goes on where it was.
    """
    count = _finished[os.path.abspath(path)]
    return Path(path, f"fit-{count + 1}") if count else Path(path)


def call_ended(path: str | os.PathLike[str]) -> None:
    """A call of `fit` with this folder has come to its end: the next one of this process is another."""
    _finished[os.path.abspath(path)] += 1


def save_at_exit(save: Callable[[], Any]) -> None:
    """Has a guard's method called when the script ends, unless the guard goes before."""
    _last_saves.add(weakref.WeakMethod(save, _last_saves.discard))


@atexit.register
def _save_what_is_left() -> None:
    for reference in list(_last_saves):
        save = reference()
        if save is not None:
            with contextlib.suppress(Exception):
                save()
