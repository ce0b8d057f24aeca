import dataclasses

import pytest

from memfit.core.settings import Keeps
from tests.unit.planner.builders import situation, training


def test_what_a_move_keeps_is_one_of_three_words():
    assert {kind.value for kind in Keeps} == {"exact", "rounding", "changes training"}


def test_a_situation_knows_nothing_it_was_not_told():
    given = situation(training())

    assert (given.num_parameters, given.num_devices) == (0, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        given.num_devices = 2
