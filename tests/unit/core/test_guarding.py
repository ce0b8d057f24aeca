"""How a guarded run can end."""

import pytest

from memfit.core.errors import BadFile, BadInput, MemfitError
from memfit.core.guarding import (
    BadCheckpoint,
    BatchSize,
    BrokenUpdate,
    CannotFit,
    GuardOptions,
    MemoryFailure,
    Where,
)


def test_a_run_that_can_not_fit_says_so_by_its_exit_code():
    failure = MemoryFailure(Where.DEVICE, "cuda", 100)
    error = CannotFit("nothing is left", failure)

    assert isinstance(error, MemfitError)
    assert (error.exit_code, error.failure) == (3, failure)
    assert BrokenUpdate("half").exit_code == 3


def test_a_bad_checkpoint_is_a_bad_file():
    assert issubclass(BadCheckpoint, BadFile)


def test_a_batch_without_samples_can_not_be_split():
    assert BatchSize(None).num_samples is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep": None}, "keep must be a whole number from 1 up, but None was given"),
        ({"keep": 0}, "keep must be a whole number from 1 up, but 0 was given"),
        ({"checkpoint_every": 0}, "checkpoint_every must be a whole number from 1 up, but 0 was given"),
        ({"micro_batch_size": True}, "micro_batch_size must be a whole number from 1 up, but True was given"),
        ({"micro_batch_size": 1.5}, "micro_batch_size must be a whole number from 1 up, but 1.5 was given"),
        ({"grow_after": 0}, "grow_after must be a whole number from 1 up, but 0 was given"),
    ],
)
def test_options_that_can_not_be_used_are_refused(options, text):
    with pytest.raises(BadInput, match=text):
        GuardOptions(**options)


def test_options_that_a_guard_does_not_take_are_refused():
    GuardOptions().refuse("this one", {"keep": "ask another"})
    with pytest.raises(BadInput, match="this one takes no keep: ask another"):
        GuardOptions(keep=2).refuse("this one", {"keep": "ask another"})
