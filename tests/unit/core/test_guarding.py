"""How a guarded run can end."""

from memfit.core.errors import BadFile, MemfitError
from memfit.core.guarding import BadCheckpoint, BatchSize, BrokenUpdate, CannotFit, OutOfMemory, Where


def test_a_run_that_can_not_fit_says_so_by_its_exit_code():
    failure = OutOfMemory(Where.DEVICE, "cuda", 100)
    error = CannotFit("nothing is left", failure)

    assert isinstance(error, MemfitError)
    assert (error.exit_code, error.failure) == (3, failure)
    assert BrokenUpdate("half").exit_code == 3


def test_a_bad_checkpoint_is_a_bad_file():
    assert issubclass(BadCheckpoint, BadFile)


def test_a_batch_without_samples_can_not_be_split():
    assert BatchSize(None).num_samples is None
