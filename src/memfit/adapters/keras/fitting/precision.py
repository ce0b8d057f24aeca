"""Mixed precision on a live Keras model."""

from collections.abc import Callable

import keras

from memfit.core.settings import Settings


def apply(settings: Settings, model: keras.Model) -> Callable[[], None]:
    """Has the model compute in `settings.precision`, with variables in float32; returns what undoes it."""
    raise NotImplementedError


def difference(settings: Settings) -> str:
    """What differs from the plain step in words, or ""."""
    raise NotImplementedError
