import pytest
import torch
from torch import nn

from memfit.api.jobs import adapter_of, as_job
from memfit.core.errors import BadInput
from memfit.core.job import Job


def loss(model, batch):
    return model(batch).square().mean()


@pytest.fixture
def job():
    return Job(nn.Linear(2, 2), loss, torch.randn(4, 2))


def test_a_module_is_pytorchs(job):
    assert adapter_of(job).title == "PyTorch"


def test_a_job_and_its_parts_exclude_each_other(job):
    with pytest.raises(BadInput, match="either a Job or a model"):
        as_job(job, (loss,), None, None)
    with pytest.raises(BadInput, match=r"For a name: memfit.named_job\('hf:gpt2'\)"):
        as_job("hf:gpt2", (), None, None)
    with pytest.raises(BadInput, match="loss and batch are missing"):
        as_job(job.model, (), None, None)
