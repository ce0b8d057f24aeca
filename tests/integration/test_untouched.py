"""Whatever the model is made of and however the estimate ends, the process is as it was."""

import os
import threading

import numpy
import pytest
import torch

import memfit
from memfit.core.errors import BadBatch, BadFile, BadInput, BadModel, StepFailed


def loss(model, batch):
    return model(batch).pow(2).mean()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_torchscript_is_refused_before_it_is_touched():
    scripted = torch.jit.script(torch.nn.Linear(8, 8))
    for model in (scripted, torch.nn.Sequential(scripted)):
        with pytest.raises(BadModel, match="TorchScript"):
            memfit.estimate(model, loss, torch.randn(4, 8), device="t4")
    assert next(scripted.parameters()).device.type == "cpu"
    assert torch.isfinite(scripted(torch.randn(2, 8))).all()


def test_lazy_modules_are_refused():
    with pytest.raises(BadModel, match="Run one batch through it first"):
        memfit.estimate(torch.nn.LazyLinear(4), loss, torch.randn(4, 8), device="t4")


def test_attributes_changed_in_place_are_left_alone():
    class Counting(torch.nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.calls = torch.zeros(())
            self.seen = numpy.zeros(2)

        def forward(self, data):
            self.calls += 1
            self.seen += 1
            return super().forward(data)

    model = Counting()
    memfit.estimate(model, loss, torch.randn(4, 8), device="t4")
    assert model.calls.item() == 0
    assert model.seen.tolist() == [0, 0]


def test_functions_that_build_leave_the_random_state():
    torch.manual_seed(7)
    state = torch.get_rng_state()
    job = memfit.Job(lambda: torch.nn.Linear(8, 8), loss, lambda n: torch.randn(n, 8))
    memfit.estimate(job, device="t4")
    assert torch.equal(torch.get_rng_state(), state)


def test_threads_leave_pytorch_as_it_was():
    before = (torch.nn.Module.__call__, torch.backends.cudnn.is_acceptable, torch.clear_autocast_cache)
    peaks = []

    def work():
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        peaks.append(memfit.estimate(model, loss, torch.randn(8, 64), device="t4").peak_bytes)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (torch.nn.Module.__call__, torch.backends.cudnn.is_acceptable, torch.clear_autocast_cache) == before
    assert len(peaks) == 4
    assert len(set(peaks)) == 1


def test_sys_exit_in_the_users_code_is_a_failed_step():
    def leave(model, batch):
        raise SystemExit(3)

    with pytest.raises(StepFailed, match="SystemExit"):
        memfit.estimate(torch.nn.Linear(8, 8), leave, torch.randn(4, 8), device="t4")


def test_a_list_of_images_has_no_batch_size():
    images = [torch.randn(3, 32, 32) for _ in range(8)]

    def of_list(model, batch):
        return model(torch.stack(batch)).mean()

    model = torch.nn.Conv2d(3, 4, 3)
    assert memfit.estimate(model, of_list, images, device="t4").batch_size is None
    with pytest.raises(BadBatch, match="share no first dimension"):
        memfit.max_batch(model, of_list, images, device="t4")


def test_two_tensors_of_one_shape_are_an_input_and_its_target():
    pair = [torch.randn(4, 8), torch.randn(4, 8)]
    estimate = memfit.estimate(torch.nn.Linear(8, 8), lambda m, b: (m(b[0]) - b[1]).mean(), pair, device="t4")
    assert estimate.batch_size == 4


def test_an_image_without_boxes_is_fine():
    batch = (torch.randn(2, 3, 8, 8), torch.zeros(0, 4))
    estimate = memfit.estimate(torch.nn.Conv2d(3, 4, 3), lambda m, b: m(b[0]).mean(), batch, device="t4")
    assert estimate.peak_bytes > 0


def test_a_host_tensor_in_the_loss_says_what_to_do():
    weight = torch.ones(8)
    with pytest.raises(StepFailed, match="put teachers, class weights and the like into the model or the batch"):
        memfit.estimate(torch.nn.Linear(8, 8), lambda m, b: (m(b) * weight).mean(), torch.randn(4, 8), device="t4")


@pytest.mark.parametrize("bad", [{"num_workers": -1}, {"prefetch_factor": 0}, {"mode": "train"}, {"precision": "fp8"}])
def test_a_job_checks_its_numbers(bad):
    with pytest.raises(BadInput, match="must be"):
        memfit.Job(torch.nn.Linear(8, 8), loss, torch.randn(4, 8), **bad)


def test_a_mode_given_beside_a_job_wins():
    job = memfit.Job(torch.nn.Linear(8, 8), loss, torch.randn(4, 8), mode="inference")
    assert memfit.estimate(job, device="t4").mode == "inference"
    assert memfit.estimate(job, device="t4", mode="training").mode == "training"


def test_a_report_follows_links_and_refuses_devices(tmp_path):
    estimate = memfit.estimate(torch.nn.Linear(8, 8), loss, torch.randn(4, 8), device="t4")
    real, link, pipe = tmp_path / "real.html", tmp_path / "link.html", tmp_path / "pipe"
    real.write_text("old")
    link.symlink_to(real)
    os.mkfifo(pipe)

    estimate.report(str(link))

    assert link.is_symlink()
    assert real.read_text().startswith("<!doctype html>")
    with pytest.raises(BadFile, match="is not a file"):
        estimate.report(str(pipe))
    assert pipe.is_fifo()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.float64])
@pytest.mark.parametrize("device", ["t4", "cpu"])
def test_matrices_of_different_dtypes_are_refused_as_kernels_refuse_them(dtype, device):
    with pytest.raises(StepFailed, match="must have the same dtype"):
        memfit.estimate(torch.nn.Linear(8, 8), loss, torch.zeros(4, 8).to(dtype), device=device)


def test_a_short_representation():
    estimate = memfit.estimate(torch.nn.Linear(8, 8), loss, torch.randn(4, 8), device="t4")
    found = memfit.max_batch(torch.nn.Linear(8, 8), loss, torch.randn(4, 8), device="t4", candidates=[4, 8])

    assert repr(estimate).startswith("<Estimate of Linear: ")
    assert repr(estimate).endswith(" on t4, fits>")
    assert len(repr(found)) < 500
