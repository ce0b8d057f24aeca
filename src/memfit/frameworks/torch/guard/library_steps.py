"""What the guards of other libraries' training loops share: what they replace for a while, and where they go on."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from memfit.core import run_events
from memfit.core.patching import Replacement, replaced
from memfit.frameworks.torch.shapes.stand_in import map_tensors

_log = logging.getLogger("memfit")


StepGuard = Any  # a `memfit.api.integrations.LibraryGuard`, which is made above the frameworks and handed down
MakeGuard = Callable[..., StepGuard]  # takes model, optimizer and scaler


class LibraryLoop:
    """Guards one trainer of a library, whose attributes are replaced until it is closed."""

    def __init__(self, trainer: Any, make_guard: MakeGuard) -> None:
        self._trainer = trainer
        self._make_guard = make_guard
        self._guard: StepGuard | None = None
        self._undo = ExitStack()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Gives an object another attribute until this is closed."""
        self._undo.enter_context(replaced([Replacement(owner, name, value)]))

    def close(self) -> None:
        """Leaves the trainer as it was."""
        self._undo.close()
        if self._guard is not None:
            self._guard.forget()
            self._guard.close()
            self._guard = None


def unwrapped(optimizer: Any, scaler: Any) -> tuple[Any, Any]:
    """The user's own optimizer, and the gradient scaler: the one that was given or else the accelerator's.

    An optimizer that `accelerator.prepare` returned hides the user's, and leaves `step` and `zero_grad` out in the
    middle of `accelerator.accumulate`; a guard has windows of its own. The accelerator's gradient scaler hangs on it.
    A prepared model is what a guard takes, and a prepared scheduler steps once for each process, which its user has
    counted on: both stay.
    """
    while type(optimizer).__module__.partition(".")[0] == "accelerate" and hasattr(optimizer, "optimizer"):
        scaler = getattr(optimizer, "scaler", None) if scaler is None else scaler
        optimizer = optimizer.optimizer
    return optimizer, scaler


def last_checkpoint(library: str, advice: str) -> str | None:
    """What a run goes on from where a supervisor has started it again; None, with advice: from the beginning."""
    request = run_events.current()
    if request is None or request.attempt < 2:
        return None
    path = run_events.last_checkpoint()
    if path is None:
        _log.warning("started again from the beginning: %s had written no checkpoint. %s", library, advice)
        return None
    _log.warning("resuming %s from %s", library, path)
    run_events.note("resume", path=path)
    return path


def copied(batch: Any) -> Any:
    """The batch with containers of its own: libraries take out of them what they have used."""
    return map_tensors(batch, lambda tensor: tensor)


def weighed(loss: torch.Tensor, factor: float) -> torch.Tensor:
    """The loss of a part that counts by a factor, as the backward pass needs it."""
    if factor == 1.0:
        return loss
    # A mean over nothing is no number, and must not spoil the others.
    return loss * factor if factor else loss.nan_to_num() * 0.0
