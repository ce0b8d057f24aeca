"""What the guards of trainers share: the guard as they see it, and attributes replaced for a while."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch

from memfit.adapters.torch.stand_in import map_tensors
from memfit.core.settings import Weighting


class StepGuard(Protocol):
    """A guard of passes and updates that a library runs; see `memfit._library_guard`."""

    @property
    def model(self) -> Any:
        """The model that is guarded."""

    @property
    def optimizer(self) -> Any:
        """Its optimizer."""

    def passes(
        self,
        loss: Callable[[Any, Any], Any],
        batch: Any,
        run: Callable[[Any, float], Any],
        *,
        is_last: bool,
        weighting: Weighting | None = None,
    ) -> Any:
        """Forward and backward pass of a batch; its loss."""

    def update(self, update: Callable[[], object], *, replay: bool) -> None:
        """Has the library update the parameters."""

    def retrying(self) -> AbstractContextManager[None]:
        """Entered around what changes gradients in place."""

    def put_back(self, kept: Any) -> None:
        """Has `kept` put back where a window is undone."""

    def forget(self) -> None:
        """The batches so far will see no update."""

    def close(self) -> None:
        """Takes all settings off the model."""


MakeGuard = Callable[..., StepGuard]
"""Takes model, optimizer and scaler."""


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
