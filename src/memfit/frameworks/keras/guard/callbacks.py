"""The callback by which Keras tells a guard where it is, and what other callbacks have found out so far.

Of the latter, plain data are kept: the best loss, epochs without progress. A callback has them in attributes beside its
options. What has changed since training began is state; what hasn't is an option, and a script that is run again may
have given another one.
"""

import contextlib
import copy
from typing import Any

import keras
import numpy

from memfit.core.guarding import BadCheckpoint
from memfit.core.state_tree import Decoder, Encoder
from memfit.core.typed_data import mismatch
from memfit.frameworks.keras.guard.data import found_in_fit

# `min_delta` is an option whose sign Keras turns after the first epoch of a process; stored, it would be turned twice.
_NEVER = ("model", "_model", "params", "_params", "min_delta")
# Numbers of any kind may follow each other.
_KINDS: tuple[Any, ...] = ((bool, int, float, numpy.number), (str,), (list, tuple), (dict,), (numpy.ndarray,))


class CallbackStates:
    """The states of the callbacks of one call of `fit`, in Keras's order, without memfit's own."""

    def __init__(self, callbacks: list[Any]) -> None:
        self._callbacks = callbacks
        self._first = [_plain(callback) for callback in callbacks]

    def to_json(self, encoder: Encoder) -> list[Any]:
        """What has changed since the beginning, by callback; the encoder takes the arrays."""
        found = []
        for number, (callback, first) in enumerate(zip(self._callbacks, self._first, strict=True)):
            now = _plain(callback)
            changed = {name: value for name, value in now.items() if name not in first or not _same(value, first[name])}
            state = {name: encoder.encode(value, f"callback.{number}.{name}") for name, value in changed.items()}
            found.append([type(callback).__name__, state])
        return found

    def check(self, states: Any, decoder: Decoder) -> None:
        """Refuses what can't be states, for `load`."""
        problem = mismatch(states, list[list[Any]], "callbacks")
        for one in [] if problem else states:
            if len(one) != 2 or not isinstance(one[0], str) or not isinstance(one[1], dict):
                problem = "callbacks holds more than names and attributes"
                break
            live: Any = next((own for own in self._callbacks if type(own).__name__ == one[0]), None)
            for name, value in one[1].items():
                now = getattr(live, name, None)
                kinds = next((kinds for kinds in _KINDS if isinstance(now, kinds)), None)
                found = decoder.decode(value)
                if kinds is not None and found is not None and not isinstance(found, kinds):
                    problem = f"{one[0]}.{name} is a {type(found).__name__}, and a {type(now).__name__} is here"
        if problem:
            raise BadCheckpoint(f"the states of the callbacks are invalid: {problem}")

    def load(self, states: list[Any], decoder: Decoder) -> None:
        """Gives callbacks of the same classes, in the same order, what they had found out."""
        left = list(states)
        for callback in self._callbacks:
            match = next((one for one in left if one[0] == type(callback).__name__), None)
            if match is None:
                continue
            left.remove(match)
            for name, value in match[1].items():
                if name not in _NEVER:
                    setattr(callback, name, decoder.decode(value))


def _plain(callback: Any) -> dict[str, Any]:
    """Attributes that are plain data, as they are now."""
    plain = {}
    for name, value in vars(callback).items():
        if name not in _NEVER:
            with contextlib.suppress(BadCheckpoint):
                Encoder().encode(value, name)
                # Lists and dictionaries go on changing after this.
                plain[name] = copy.deepcopy(value)
    return plain


def _same(one: Any, other: Any) -> bool:
    first, second = Encoder(), Encoder()
    if first.encode(one, "") != second.encode(other, ""):
        return False
    return all(numpy.array_equal(array, second.tensors[path]) for path, array in first.tensors.items())


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
