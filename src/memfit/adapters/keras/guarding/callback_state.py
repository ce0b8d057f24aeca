"""What callbacks have found out so far, as far as it is plain data: the best loss, epochs without progress.

A callback keeps that in attributes beside its options. What has changed since training began is state; what hasn't is
an option, and a script that is run again may have given another one.
"""

from typing import Any

import numpy

from memfit.adapters.keras.guarding.stored import Plain
from memfit.core.guarding import BadCheckpoint
from memfit.core.typed_data import mismatch

# `min_delta` is an option whose sign Keras turns after the first epoch of a process; stored, it would be turned twice.
_NEVER = ("model", "_model", "params", "_params", "min_delta")


class CallbackStates:
    """The states of the callbacks of one call of `fit`.

    Args:
        callbacks: in Keras's order, without memfit's own.
    """

    def __init__(self, callbacks: list[Any]) -> None:
        self._callbacks = callbacks
        self._first = [_plain(callback) for callback in callbacks]

    def to_json(self, plain: Plain) -> list[Any]:
        """What has changed since the beginning, by callback.

        Args:
            plain: takes the arrays.
        """
        found = []
        for number, (callback, first) in enumerate(zip(self._callbacks, self._first, strict=True)):
            now = _plain(callback)
            changed = {name: value for name, value in now.items() if name not in first or not _same(value, first[name])}
            state = {name: plain.encode(value, f"callback.{number}.{name}") for name, value in changed.items()}
            found.append([type(callback).__name__, state])
        return found

    def check(self, states: Any, plain: Plain) -> None:
        """Refuses what can't be states, for `load`."""
        problem = mismatch(states, list[list[Any]], "callbacks")
        for one in [] if problem else states:
            if len(one) != 2 or not isinstance(one[0], str) or not isinstance(one[1], dict):
                problem = "callbacks has something else than names and attributes"
                break
            live: Any = next((own for own in self._callbacks if type(own).__name__ == one[0]), None)
            for name, value in one[1].items():
                now = getattr(live, name, None)
                kinds = next((kinds for kinds in _KINDS if isinstance(now, kinds)), None)
                found = plain.decode(value)
                if kinds is not None and found is not None and not isinstance(found, kinds):
                    problem = f"{one[0]}.{name} is a {type(found).__name__}, and a {type(now).__name__} is here"
        if problem:
            raise BadCheckpoint(f"the states of the callbacks are none: {problem}")

    def load(self, states: list[Any], plain: Plain) -> None:
        """Gives callbacks of the same classes, in the same order, what they had found out."""
        left = list(states)
        for callback in self._callbacks:
            match = next((one for one in left if one[0] == type(callback).__name__), None)
            if match is None:
                continue
            left.remove(match)
            for name, value in match[1].items():
                if name not in _NEVER:
                    setattr(callback, name, plain.decode(value))


# Numbers of any kind may follow each other.
_KINDS: tuple[Any, ...] = ((bool, int, float, numpy.number), (str,), (list, tuple), (dict,), (numpy.ndarray,))


def _plain(callback: Any) -> dict[str, Any]:
    """Attributes that are plain data."""
    found = {}
    for name, value in vars(callback).items():
        if name in _NEVER:
            continue
        try:
            encoder = Plain()
            encoded = encoder.encode(value, name)
        except TypeError:
            continue
        # Lists and dictionaries go on changing after this.
        found[name] = Plain({path: numpy.array(array) for path, array in encoder.arrays.items()}).decode(encoded)
    return found


def _same(one: Any, other: Any) -> bool:
    first, second = Plain(), Plain()
    if first.encode(one, "") != second.encode(other, ""):
        return False
    return all(numpy.array_equal(array, second.arrays[path]) for path, array in first.arrays.items())
