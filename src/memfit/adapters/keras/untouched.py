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

# Not exported: what an object has been given, and the state that belongs to no object.
from keras.src.backend.common import global_state
from keras.src.utils.tracking import Tracker

_OBJECTS = (
    keras.Layer,
    keras.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
    keras.random.SeedGenerator,
    keras.Variable,
    Tracker,
)


def global_seed_generator() -> Any:
    """The seeds that layers without their own draw from; None where none has been drawn yet."""
    return global_state.get_global_attribute("global_seed_generator")


@contextmanager
def untouched(model: Any) -> Iterator[None]:
    """Puts the model, its optimizer, metrics and seeds, and the random states back at the end."""
    saved: dict[int, tuple[Any, Any]] = {}
    _save([model, global_seed_generator()], saved)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        for container, contents in saved.values():
            _put_back(container, contents)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _save(value: Any, saved: dict[int, tuple[Any, Any]]) -> None:
    """Notes what `value` and everything inside of it holds."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, _OBJECTS):
            found = getattr(found, "__dict__", None)
        if id(found) in saved:
            continue
        if isinstance(found, dict):
            saved[id(found)] = (found, dict(found))
            waiting.extend(dict.values(found))
        elif isinstance(found, list | deque | set):
            saved[id(found)] = (found, list(found))
            waiting.extend(found)
        elif isinstance(found, tuple):
            waiting.extend(found)


def _put_back(container: Any, contents: Any) -> None:
    """Fills a container anew; those of Keras report each change, which nobody must hear of now."""
    if isinstance(container, dict):
        dict.clear(container)
        dict.update(container, contents)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, contents)
    elif isinstance(container, list):
        list.clear(container)
        list.extend(container, contents)
    else:
        deque.clear(container)
        deque.extend(container, contents)
