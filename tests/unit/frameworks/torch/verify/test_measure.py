import pytest
import torch

import memfit
from memfit.frameworks.torch.verify.measure import Runner
from memfit.frameworks.torch.verify.steps import list_steps


def step(name, *, on_gpu):
    return next((job, size) for job, size in list_steps(on_gpu=on_gpu) if job.name == name)


@pytest.mark.parametrize("name", ["perceptron, Adam", "depthwise convolutions", "LSTM language model"])
def test_a_step_on_the_host_takes_what_was_predicted(name):
    job, size = step(name, on_gpu=False)

    run = Runner("cpu").run(job, size, 0.01)

    assert run.allocated_bytes == pytest.approx(
        memfit.estimate(job, device="cpu", batch_size=size).peak_bytes, rel=0.03
    )
    assert run.reserved_bytes is None
    assert run.seconds > 0


@pytest.mark.parametrize("name", ["residual network, autocast", "language model, causal"])
def test_a_step_on_a_gpu_is_counted_by_its_allocator(name):
    job, size = step(name, on_gpu=True)
    predicted = memfit.estimate(job, device="t4", batch_size=size)

    with memfit.simulate("t4"):
        run = Runner("cuda").run(job, size, 0.01)

    assert (run.allocated_bytes, run.reserved_bytes) == (predicted.allocated_peak_bytes, predicted.reserved_peak_bytes)


def test_random_numbers_go_on_as_if_nothing_had_been_run():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    job, size = step("perceptron, Adam", on_gpu=False)

    Runner("cpu").run(job, size, 0.01)

    assert torch.equal(torch.rand(2), expected)


def test_the_host_has_rates_and_no_context():
    measured = Runner("cpu").measure_device()

    assert measured.bandwidth_bytes_per_second > 1e8
    assert measured.flops["float32"] > 1e8
    assert 0 < measured.launch_seconds < 1e-2
    assert (measured.context_bytes, measured.usable_bytes) == (None, None)


def test_a_gpu_has_memory_and_a_workspace():
    with memfit.simulate("a10g"):
        measured = Runner("cuda").measure_device()

    assert measured.usable_bytes == memfit.find_device("a10g").usable_bytes
    assert measured.cublas_workspace_bytes == 8519680
    # The other process, which would tell by what it takes, has no such device.
    assert measured.context_bytes is None
    assert set(measured.flops) == {"float32", "float16", "bfloat16"}
