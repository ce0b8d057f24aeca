"""States of the random generators."""

import random

import numpy as np
import torch

from memfit.adapters.keras.guarding.randomness import restore, states


def draw():
    return random.random(), np.random.rand(), float(torch.rand(()))


def test_all_generators_go_back():
    found = states()
    first = draw()
    assert draw() != first

    restore(found)

    assert draw() == first
