"""States of the random generators."""

import itertools
import random

import numpy as np
import torch

from memfit.frameworks.keras.guard import randomness
from memfit.frameworks.keras.guard.randomness import restore, restore_torch, seed, states


def draw():
    return random.random(), np.random.rand(), float(torch.rand(()))


def test_all_generators_go_back():
    found = states()
    first = draw()
    assert draw() != first

    restore(found)

    assert draw() == first


def test_what_layers_draw_from_goes_back_alone():
    found = states()
    first = draw()

    restore_torch(found)

    again = draw()
    assert again[2] == first[2]
    assert again[0] != first[0] and again[1] != first[1]


def test_a_seed_follows_from_those_of_the_script_and_draws_nothing(monkeypatch):
    def seeds(number):
        monkeypatch.setattr(randomness, "_count", itertools.count())
        random.seed(number)
        np.random.seed(number)
        return seed(), seed()

    first = seeds(1)
    drawn = draw()

    assert seeds(1) == first
    assert draw()[:2] == drawn[:2]
    assert len({*first, *seeds(2)}) == 4
