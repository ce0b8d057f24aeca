"""The best parameters of a run: not the best model, of which a copy would hold as much again on the device.

They are in a checkpoint of their own, or in host memory where the run has no folder.
"""

import math
from collections.abc import Callable
from typing import Any

from memfit.core.errors import BadInput
from memfit.core.guarding import BadCheckpoint
from memfit.guard.checkpoints import Folder


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
