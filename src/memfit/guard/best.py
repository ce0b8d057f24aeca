"""The best parameters of a run: not the best model, of which a copy would hold as much again on the device.

They are in a checkpoint of their own, or in host memory where the run has no folder.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from memfit.core.errors import BadInput
from memfit.core.guarding import BadCheckpoint
from memfit.guard.checkpoints import Checkpoint, Folder


class Parameters(Protocol):
    """What can be kept of a model; the framework's part of `Best`."""

    def write(self, directory: Path) -> None:
        """Writes parameters and buffers into a directory."""

    def read(self, directory: Path, model: Any = None) -> None:
        """Puts what was written into a model, or into the run's own."""

    def copy(self, into: Any = None) -> Any:
        """Copies in host memory; into earlier ones, which they replace."""

    def put(self, copies: Any, model: Any = None) -> None:
        """Puts copies into a model, or into the run's own."""


class Best:
    """The parameters with the best score so far.

    Args:
        parameters: the model's.
        current_step: says how many updates of the parameters have been made.
        folder: where they are kept; None: in host memory.
        before_load: called before parameters are put into the run's own model.
    """

    def __init__(
        self,
        parameters: Parameters,
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
        if folder is not None:
            self._resume(folder.latest())

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
        if math.isnan(score) or not self._is_better(score, higher_is_better):
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
        found = self._folder.latest()
        if found is None:
            raise BadCheckpoint(f"the best parameters, of step {self.step}, are gone from {self._folder.path}")
        self._parameters.read(found.path, model)

    def close(self) -> None:
        """Gives up possession of the folder."""
        if self._folder is not None:
            self._folder.close()

    def _is_better(self, score: float, higher: bool) -> bool:
        if self.score is None:
            return True
        return score > self.score if higher else score < self.score

    def _resume(self, found: Checkpoint | None) -> None:
        if found is None:
            return
        try:
            score, higher = float(found.info["score"]), bool(found.info["higher_is_better"])
        except (KeyError, TypeError, ValueError):
            raise BadCheckpoint(
                f"{found.path} holds no best parameters: its manifest names no score. Give another folder."
            ) from None
        self.score, self.step, self._higher = score, found.step, higher
