"""Leaves a user's model as it was, whatever is done to it meanwhile.

Tracing builds optimizers and metrics, advances seeds and may change how the model is run. All of that is kept in
attributes of Keras's objects and in the lists, dictionaries and sets that they hold; what they held before is noted and
put back.
"""

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from memfit.frameworks.keras import internals

_OBJECTS = (
    keras.Layer,
    keras.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
    keras.random.SeedGenerator,
    internals.Variable,
    internals.Tracker,
)
_CONTAINERS: tuple[Any, ...] = (dict, list, set, deque)


@contextmanager
def untouched(model: Any) -> Iterator[None]:
    """Puts the model, its optimizer, metrics and seeds, and the random states back at the end."""
    before = Snapshot([model, internals.global_seed_generator()])
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        before.restore()
        random.setstate(python_state)
        np.random.set_state(numpy_state)


class Snapshot:
    """What an object of Keras, or several in a list, and all that they reach hold now."""

    def __init__(self, value: Any) -> None:
        self._saved: dict[int, tuple[Any, Any]] = {}
        waiting = [value]
        while waiting:
            found = waiting.pop()
            # TensorFlow shows the dictionaries and tuples of a layer through proxies.
            found = getattr(found, "__wrapped__", found) if isinstance(found, dict | tuple) else found
            if isinstance(found, tuple):
                waiting.extend(tuple.__iter__(found))
            elif isinstance(found, (*_CONTAINERS, *_OBJECTS)):
                waiting.extend(self._note(found))

    def _note(self, found: Any) -> list[Any]:
        """Remembers an object or a container, and gives what it holds; nothing where it is known."""
        if isinstance(found, _OBJECTS):
            return [getattr(found, "__dict__", None)]
        if id(found) in self._saved:
            return []
        if isinstance(found, dict):
            contents: Any = dict.copy(found)
            parts = list(contents.values())
        else:
            kind = next(kind for kind in _CONTAINERS if isinstance(found, kind))
            parts = contents = list(kind.__iter__(found))
        self._saved[id(found)] = (found, contents)
        # Containers of Keras and TensorFlow keep books of their own.
        return [*parts, getattr(found, "__dict__", None)]

    def restore(self) -> None:
        """Puts everything back; containers of Keras report each change, which nobody must hear of now."""
        for container, contents in self._saved.values():
            kind: Any = next(kind for kind in _CONTAINERS if isinstance(container, kind))
            kind.clear(container)
            if kind in (list, deque):
                kind.extend(container, contents)
            else:
                kind.update(container, contents)
