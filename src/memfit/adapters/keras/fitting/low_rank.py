"""Low-rank adapters (LoRA) and int8 base weights where Keras offers them."""

from collections.abc import Callable

import keras

from memfit.core.settings import Settings


def apply(settings: Settings, model: keras.Model) -> Callable[[], None]:
    """Adds adapters of `settings.lora_rank`, over an int8 base with `quantized_base`; returns what undoes it."""
    raise NotImplementedError


def difference(settings: Settings) -> str:
    """What differs from the plain step in words, or ""."""
    raise NotImplementedError
