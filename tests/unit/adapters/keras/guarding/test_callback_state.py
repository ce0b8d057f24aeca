"""What callbacks have found out."""

import numpy as np

from memfit.adapters.keras.guarding.callback_state import CallbackStates
from memfit.adapters.keras.guarding.stored import Plain


class Stopping:
    def __init__(self, patience):
        self.patience = patience
        self.wait = 0
        self.best = float("inf")
        self.best_weights = None
        self.model = object()
        self.function = len
        self.seen = []


def test_what_changed_is_kept_and_options_are_not():
    one = Stopping(patience=3)
    states = CallbackStates([one])
    one.wait, one.best, one.best_weights = 2, np.float32(0.5), [np.ones(2)]
    one.seen.append(1)
    plain = Plain()
    found = states.to_json(plain)

    assert set(found[0][1]) == {"wait", "best", "best_weights", "seen"}

    other = Stopping(patience=7)
    CallbackStates([object.__new__(type("Other", (), {})), other]).load(found, plain)

    assert (other.patience, other.wait, other.best, other.seen) == (7, 2, 0.5, [1])
    assert np.array_equal(other.best_weights[0], np.ones(2))
