import dataclasses

import pytest

from memfit.core.job import Job


def test_defaults_are_those_of_pytorch():
    job = Job("model", len, "batch")

    assert (job.mode, job.precision, job.optimizer) == ("training", None, None)
    assert job.set_to_none is None
    assert (job.num_workers, job.prefetch_factor, job.pin_memory) == (0, 2, False)


def test_jobs_do_not_change_but_can_be_varied():
    job = Job("model", len, "batch")

    with pytest.raises(dataclasses.FrozenInstanceError):
        job.mode = "inference"
    assert dataclasses.replace(job, mode="inference").mode == "inference"
