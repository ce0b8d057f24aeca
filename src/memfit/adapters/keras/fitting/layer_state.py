"""What layers do besides computing: statistics that they keep of batches, and random numbers that they draw.

Both differ where a batch is computed in parts. Statistics of parts aren't those of the batch, which changes what is
trained; other random numbers from the same distribution don't.
"""

from typing import Any

import keras

from memfit.adapters.keras.model import layer_paths

_SHOWN = 3


def with_statistics(model: Any) -> list[str]:
    """Paths of the layers that change variables of their own as they are called in training."""
    paths = layer_paths(model)
    return [paths.get(id(layer), layer.name) for layer in model._flatten_layers() if _changes(layer)]


def _changes(layer: Any) -> bool:
    if isinstance(layer, keras.layers.BatchNormalization):
        # A frozen one uses its moving statistics, and leaves them.
        return bool(layer.trainable)
    if isinstance(layer, keras.layers.RNN):
        return bool(layer.stateful)
    if isinstance(layer, keras.layers.Normalization):
        return False
    frozen = {id(variable) for variable in layer._trainable_variables}
    seeds = {id(generator.state) for generator in layer._seed_generators}
    return any(id(variable) not in frozen | seeds for variable in layer._non_trainable_variables)


def with_random_numbers(model: Any) -> list[str]:
    """Paths of the layers that draw random numbers in training."""
    paths = layer_paths(model)
    return [paths.get(id(layer), layer.name) for layer in model._flatten_layers() if _draws(layer)]


def _draws(layer: Any) -> bool:
    if not layer._seed_generators:
        return False
    # Layers of Keras make their generator whether or not they will use it.
    rates = [getattr(layer, name, None) for name in ("rate", "dropout", "recurrent_dropout")]
    numbers = [rate for rate in rates if isinstance(rate, int | float)]
    return not numbers or any(numbers)


def listed(paths: list[str]) -> str:
    """Some paths in words."""
    left = len(paths) - _SHOWN
    shown = ", ".join(repr(path) for path in paths[:_SHOWN])
    return f"{shown} and {left} more" if left > 0 else shown
