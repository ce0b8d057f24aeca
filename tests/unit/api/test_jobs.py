import pytest
import torch
from torch import nn

from memfit.api.jobs import adapter_of, as_job, on_installed_stack, open_estimator, torch_adapter
from memfit.catalogue import find_device
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


def test_the_device_carries_the_stack_that_runs(job):
    asked = find_device("t4", stack="torch2.4")

    assert open_estimator(job, find_device("t4")).device.stack == torch_adapter().stack()
    assert open_estimator(job, asked).device is asked
    assert on_installed_stack(find_device("t4"), None, "JAX").stack is None
    with pytest.raises(BadInput, match=r"torch2.4-cu121 was given for JAX, which doesn't run on it"):
        on_installed_stack(asked, None, "JAX")


def test_only_pytorch_compiles_models():
    keras_job = Job(None, None, torch.zeros(2), compile=True)

    with pytest.raises(BadInput, match=r"compile is for models of PyTorch, but the job runs on Keras"):
        open_estimator(keras_job, find_device("t4"))
