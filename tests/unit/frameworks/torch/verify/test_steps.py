import pytest

import memfit
from memfit.frameworks.torch.verify.steps import list_steps


def test_there_are_a_dozen_of_different_names():
    names = [job.name for job, _ in list_steps(on_gpu=True)]

    assert len(names) == len(set(names)) == 12


@pytest.mark.parametrize("number", range(0, 12, 3))
def test_each_can_be_estimated_and_fits_a_small_gpu(number):
    job, batch_size = list_steps(on_gpu=True)[number]

    estimate = memfit.estimate(job, device="4GiB", batch_size=batch_size)

    assert estimate.fits
    assert estimate.batch_size == batch_size
