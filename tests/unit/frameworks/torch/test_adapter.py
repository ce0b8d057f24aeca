import pytest
import torch
from torch import nn

import memfit
from memfit.core.errors import BadInput
from memfit.core.job import Job
from memfit.core.settings import Settings
from memfit.frameworks.torch import adapter

JOB = Job(nn.Linear(2, 2), lambda model, batch: model(batch).sum(), torch.ones(4, 2))


def test_a_precision_that_must_be_used_is_the_jobs():
    assert adapter.planned_job(JOB, "keep") is JOB
    assert adapter.planned_job(JOB, "auto") is JOB
    assert adapter.planned_job(JOB, "amp-bf16").precision == "amp-bf16"


def test_an_open_job_can_be_profiled():
    tracer = adapter.open_job(JOB, memfit.find_device("cpu"))

    step = adapter.planning(tracer, memfit.find_device("cpu"))

    assert step.batch_size == 4
    assert step.profile(4, Settings()).num_parameters == 6


def test_optimizers_by_name():
    assert adapter.named_optimizer("none") is None
    with pytest.raises(BadInput, match="adamm"):
        adapter.named_optimizer("adamm")
