"""Opens a job of JAX: a training step and its arguments, compiled for shapes at any batch size."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

_KINDS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)


def is_step(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
    """Whether a function and its arguments are a step of JAX: it is jitted, or there are arrays or shapes in them."""
    if hasattr(function, "lower") and hasattr(function, "trace"):
        return True
    return any(isinstance(leaf, _KINDS) for leaf in jax.tree.leaves(arguments))
