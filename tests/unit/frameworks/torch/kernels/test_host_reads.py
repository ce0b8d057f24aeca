import gc

import pytest
import torch

from memfit.frameworks.torch.kernels import host_reads as readings
from memfit.frameworks.torch.kernels.host_reads import Readings
from tests.unit.frameworks.torch.sessions import running

PATIENCE = readings._PATIENCE


@pytest.fixture
def notes():
    return []


class Program:
    """A program that reads at the line it is told to be at."""

    def __init__(self, notes):
        self.line = "train.py:1"
        self.readings = Readings(lambda: self.line, lambda code, text: notes.append((code, text)))

    def reads(self, stand_in, times):
        """The answers that are none of `stand_in`, each with the number of the reading."""
        found = [(number, self.readings.answer(stand_in)) for number in range(1, times + 1)]
        return [(number, answer) for number, answer in found if answer != stand_in]


@pytest.fixture
def program(notes):
    return Program(notes)


@pytest.mark.parametrize(("stand_in", "other"), [(False, True), (True, False), (1, 0), (1.0, 0.0)], ids=str)
def test_who_asks_again_and_again_gets_another_answer(program, notes, stand_in, other):
    # GIVEN a program that waits at one line for another number, without taking a step
    found = program.reads(stand_in, 2 * PATIENCE + 1)

    # THEN it gets one from time to time, of the same type
    assert found == [(PATIENCE, other), (2 * PATIENCE, other)]
    assert type(found[0][1]) is type(stand_in)
    assert notes == [("stand-in-value", f"read 5,000 times within a step, and then given {other!r}")] * 2


def test_a_program_that_takes_steps_does_not_wait(program, notes):
    for _ in range(3):
        assert program.reads(False, PATIENCE - 1) == []
        program.readings.step_taken()

    assert notes == []


def test_lines_are_counted_one_by_one(program):
    for line in ("train.py:1", "train.py:2"):
        program.line = line
        assert program.reads(1, PATIENCE - 1) == []


def test_a_softmax_is_read_as_equal_probabilities(program, notes):
    made = torch.empty(3, 4, device="meta")
    program.readings.are_probabilities(made)

    copied = program.readings.host_copy(made, torch.float64)

    assert torch.equal(copied, torch.full((3, 4), 0.25, dtype=torch.float64))
    # Views of it too.
    assert program.readings.host_copy(made[0], torch.float32).sum() == 1
    assert {code for code, _ in notes} == {"stand-in-value"}


def test_a_mask_is_read_as_true_until_the_program_waits_for_another(program):
    made = torch.empty(3, dtype=torch.bool, device="meta")
    copies = [program.readings.host_copy(made, torch.bool).tolist() for _ in range(PATIENCE)]
    assert copies[:-1] == [[True] * 3] * (PATIENCE - 1)
    assert copies[-1] == [False] * 3


def test_other_tensors_are_left_to_the_caller(program, notes):
    made, other = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    assert program.readings.host_copy(other, torch.float32) is NotImplemented
    program.readings.are_probabilities(made)

    assert program.readings.host_copy(other, torch.float32) is NotImplemented
    # A single number is no distribution.
    assert program.readings.host_copy(made[0], torch.float32) is NotImplemented
    assert notes == []


def test_what_is_gone_is_forgotten(program):
    made = torch.empty(4, device="meta")
    program.readings.are_probabilities(made)
    assert len(program.readings._probabilities) == 1
    del made
    gc.collect()

    assert program.readings._probabilities == {}


def test_a_program_that_draws_from_a_softmax_on_the_host():
    with running():
        chances = torch.randn(2, 5, device="cuda").softmax(-1)
        drawn = torch.multinomial(chances.cpu(), 1)
        total = chances.cpu().sum(-1)

    assert drawn.shape == (2, 1)
    assert torch.allclose(total, torch.ones(2))


def test_a_program_that_waits_for_the_device_goes_on():
    with running() as session:
        asked = 0
        # GIVEN a loop that ends when a number is small enough
        while torch.randn(3, device="cuda").sum().item() > 0.5:
            asked += 1
            assert asked < 2 * PATIENCE, "it would never end"

    assert asked == PATIENCE - 1
    assert "and then given 0.0" in " ".join(note.text for note in session.simulation.notes.found.values())
