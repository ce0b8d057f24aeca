import dataclasses

import pytest

from memfit.core.errors import BadInput
from memfit.core.job import COMPILE_MODES, Job


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


def test_compilation_is_asked_for_by_its_mode():
    assert [Job("model", len, "batch", compile=mode).compile for mode in (True, *COMPILE_MODES)]
    with pytest.raises(BadInput, match=r"compile must be True, False or one of default, .*, but 'fast' was given\."):
        Job("model", len, "batch", compile="fast")
