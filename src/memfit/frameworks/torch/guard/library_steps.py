"""What the guards of trainers share: where they go on, and attributes replaced for a while."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from memfit.core import run_events
from memfit.frameworks.torch.shapes.stand_in import map_tensors

_log = logging.getLogger("memfit")


StepGuard = Any  # a `memfit.api.library_guard.LibraryGuard`, which is made above the frameworks and handed down
MakeGuard = Callable[..., StepGuard]  # takes model, optimizer and scaler


def last_checkpoint(library: str, advice: str) -> str | None:
    """The checkpoint that a run goes on from where a supervisor has started it again; None: as the script says.

    Args:
        library: whose checkpoints they are.
        advice: what to do where it has written none.
    """
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


def replace_attribute(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Gives an object another attribute until `undo` is closed."""
    own = vars(owner)
    if name in own:
        undo.callback(setattr, owner, name, own[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def copied(batch: Any) -> Any:
    """The batch with containers of its own: libraries take out of them what they have used."""
    return map_tensors(batch, lambda tensor: tensor)


def weighed(loss: torch.Tensor, factor: float) -> torch.Tensor:
    """The loss of a part that counts by a factor, as the backward pass needs it."""
    if factor == 1.0:
        return loss
    # A mean over nothing is no number, and must not spoil the others.
    return loss * factor if factor else loss.nan_to_num() * 0.0
