"""Recomputation in Keras: what a part of a model keeps is computed again in the backward pass."""

from collections.abc import Callable

import keras

from memfit.core.settings import Settings


def apply(settings: Settings, model: keras.Model) -> Callable[[], None]:
    """Has the parts of `settings.checkpoint` computed again in the backward pass; returns what undoes it."""
    raise NotImplementedError
