"""The callback by which Keras tells a guard of `fit` where it is."""

from typing import Any

import keras

from memfit.frameworks.keras.guard.data import found_in_fit


class FitCallback(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Guards the `fit` whose callback it is; `keeper` is a `memfit.api.fit.GuardedFit`."""

    def __init__(self, keeper: Any) -> None:
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
