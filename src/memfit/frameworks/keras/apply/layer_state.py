"""What layers do besides computing: statistics that they keep of batches, and random numbers that they draw.

Both differ where a batch is computed in parts. Statistics of parts aren't those of the batch, which changes what is
trained; other random numbers from the same distribution don't.
"""

from collections.abc import Callable
from typing import Any

import keras

from memfit.frameworks.keras import internals
from memfit.frameworks.keras.model import layer_paths

_SHOWN = 3


def with_statistics(model: Any) -> list[str]:
    """Paths of the layers that change variables of their own as they are called in training."""

    def changes(layer: Any) -> bool:
        if isinstance(layer, keras.layers.BatchNormalization):
            # A frozen one uses its moving statistics, and leaves them.
            return bool(layer.trainable)
        if isinstance(layer, keras.layers.RNN):
            return bool(layer.stateful)
        if isinstance(layer, keras.layers.Normalization):
            return False
        trained, others, seeds = internals.own_variables(layer)
        known = {id(variable) for variable in (*trained, *seeds)}
        return any(id(variable) not in known for variable in others)

    return _paths(model, changes)


def with_random_numbers(model: Any) -> list[str]:
    """Paths of the layers that draw random numbers in training."""

    def draws(layer: Any) -> bool:
        # Layers of Keras make their generator whether or not they will use it.
        rates = [getattr(layer, name, None) for name in ("rate", "dropout", "recurrent_dropout")]
        numbers = [rate for rate in rates if isinstance(rate, int | float)]
        return bool(internals.own_variables(layer)[2]) and (not numbers or any(numbers))

    return _paths(model, draws)


def _paths(model: Any, is_meant: Callable[[Any], bool]) -> list[str]:
    paths = layer_paths(model)
    return [paths.get(id(layer), layer.name) for layer in internals.layers_of(model) if is_meant(layer)]


def listed(paths: list[str]) -> str:
    """Some paths in words."""
    left = len(paths) - _SHOWN
    shown = ", ".join(repr(path) for path in paths[:_SHOWN])
    return f"{shown} and {left} more" if left > 0 else shown
