"""The callback by which Keras tells a guard of `fit` where it is."""

from typing import Any, Protocol

import keras

from memfit.adapters.keras.guarding.data import found_in_fit


class Keeper(Protocol):
    """What the callback tells."""

    def train_begins(self, model: Any, iterator: Any, callbacks: list[Any], params: dict[str, Any]) -> None:
        """Training begins."""

    def epoch_begins(self, epoch: int) -> None:
        """An epoch begins."""

    def epoch_ends(self, epoch: int, logs: dict[str, Any]) -> None:
        """An epoch has ended, validation included."""

    def train_ends(self) -> None:
        """Training has ended."""


class FitCallback(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Guards the `fit` whose callback it is.

    Args:
        keeper: the guard.
    """

    def __init__(self, keeper: Keeper) -> None:
        super().__init__()
        self._keeper = keeper

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras."""
        iterator, callbacks = found_in_fit()
        others = [callback for callback in callbacks if callback is not self]
        self._keeper.train_begins(self.model, iterator, others, dict(self.params or {}))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self._keeper.epoch_begins(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self._keeper.epoch_ends(epoch, dict(logs or {}))

    def on_train_end(self, logs: Any = None) -> None:
        """Called by Keras."""
        self._keeper.train_ends()
