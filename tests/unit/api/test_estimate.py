import dataclasses
import importlib.util
import json
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import memfit
from memfit.api.jobs import named_optimizer
from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import BadBatch, BadInput, BadModel, MissingDependency, StepFailed, UnknownDevice
from memfit.core.job import Job
from memfit.core.timeline import Category
from memfit.core.units import GIB, MIB, format_size
from tests import jobs

JOBS = [jobs.conv_job, jobs.transformer_job, jobs.contrastive_job]
# A device that nothing but its size tells from no device at all.
UNLIMITED = Device("unlimited", "Unlimited", Kind.CUDA, None, None, Origin.ASSUMED, (8, 6))


def sized(usable_bytes):
    return dataclasses.replace(UNLIMITED, usable_bytes=usable_bytes)


def category_bytes(estimate, category):
    return sum(block.size_bytes for block in estimate.timeline.blocks if block.category is category)


# Ways to say what to estimate


def test_a_job_and_its_parts_give_the_same():
    job = jobs.conv_job()

    whole = memfit.estimate(job, device="rtx-3090")
    parts = memfit.estimate(job.model, job.loss, job.batch, optimizer=job.optimizer, device="rtx-3090")

    assert (whole.timeline, whole.replay) == (parts.timeline, parts.replay)
    assert whole.subject == "ConvNet"


def test_a_model_and_its_class_give_the_same():
    built = dataclasses.replace(jobs.conv_job(), model=jobs.ConvNet())

    assert (
        memfit.estimate(built, device="rtx-3090").timeline
        == memfit.estimate(jobs.conv_job(), device="rtx-3090").timeline
    )


def test_an_optimizer_and_its_class_give_the_same():
    model = jobs.ConvNet()
    job = dataclasses.replace(jobs.conv_job(), model=model, optimizer=torch.optim.Adam(model.parameters()))

    made = memfit.estimate(job, device="rtx-3090")

    assert made.timeline == memfit.estimate(jobs.conv_job(), device="rtx-3090").timeline


def test_what_is_estimated_stays_as_it_was():
    # GIVEN a model with weights, gradients of an earlier step and a state of its optimizer
    model = jobs.ConvNet()
    optimizer = torch.optim.Adam(model.parameters())
    images, labels = torch.randn(2, 3, 32, 32), torch.tensor([1, 2])
    jobs.classification_loss(model, (images, labels)).backward()
    optimizer.step()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in model.parameters()]

    # WHEN it is estimated
    memfit.estimate(model, jobs.classification_loss, (images, labels), optimizer=optimizer, device="rtx-3090")

    # THEN nothing has changed
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(torch.equal(a, b.grad) for a, b in zip(gradients, model.parameters(), strict=True))
    assert len(optimizer.state) == len(list(model.parameters()))


def test_a_batch_may_be_a_function_of_its_size():
    made = memfit.estimate(dataclasses.replace(jobs.conv_job(), batch=jobs.images), device="rtx-3090", batch_size=4)

    assert made.batch_size == 4
    assert made.timeline == memfit.estimate(jobs.conv_job(4), device="rtx-3090").timeline


def test_a_function_decides_what_a_batch_size_means():
    # GIVEN a batch of pairs: two rows for each sample
    job = dataclasses.replace(jobs.conv_job(), batch=lambda n: jobs.images(2 * n))

    made = memfit.estimate(job, device="rtx-3090", batch_size=3)

    assert made.batch_size == 3
    assert made.timeline == memfit.estimate(jobs.conv_job(6), device="rtx-3090").timeline
    assert made.at_batch(5).timeline == memfit.estimate(jobs.conv_job(10), device="rtx-3090").timeline


def test_batch_size_replaces_the_first_dimension():
    assert (
        memfit.estimate(jobs.conv_job(4), device="rtx-3090", batch_size=9).timeline
        == memfit.estimate(jobs.conv_job(9), device="rtx-3090").timeline
    )


def test_a_batch_of_shapes_is_enough():
    images, labels = (tensor.to("meta") for tensor in jobs.images(4))
    job = dataclasses.replace(jobs.conv_job(), batch=(images, labels))

    assert memfit.estimate(job, device="cpu").timeline == memfit.estimate(jobs.conv_job(4), device="cpu").timeline


def test_options_beside_a_job_take_the_place_of_its_own():
    job = jobs.conv_job(precision="bf16")

    assert memfit.estimate(job, device="rtx-3090").precision == "bf16"
    changed = memfit.estimate(job, device="rtx-3090", precision="fp32", mode="inference")
    assert (changed.precision, changed.mode) == ("fp32", "inference")


def test_a_job_brings_its_own_loss_and_batch():
    with pytest.raises(BadInput, match="a Job brings its own loss and batch; give either a Job or a model"):
        memfit.estimate(jobs.conv_job(), jobs.classification_loss, device="rtx-3090")


LINEAR = nn.Linear(2, 2)
ONES = torch.ones(1, 2)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((LINEAR,), {}, BadInput, "loss and batch are missing: give a function that takes"),
        ((LINEAR, 3, ONES), {}, BadInput, "loss must be a function of (model, batch), but int was given"),
        ((7, len, ONES), {}, BadModel, "model must be a torch.nn.Module or a function that builds one, but int"),
        ((lambda: 7, len, ONES), {}, BadModel, "the model callable returned int, not a torch.nn.Module"),
        ((LINEAR, len, ONES), {"mode": "testing"}, BadInput, "one of training, inference, but 'testing' was given"),
        ((LINEAR, len, ONES), {"precision": "fp7"}, BadInput, "amp-fp16, amp-bf16, but 'fp7' was given"),
        ((LINEAR, len, ONES), {"device": 24}, BadInput, "or a size such as '24GiB', but 24 was given"),
    ],
)
def test_nonsense_is_refused(arguments, options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        memfit.estimate(*arguments, **{"device": "rtx-3090", **options})


# Devices


def test_a_device_is_a_name_a_size_or_a_device():
    named = memfit.estimate(jobs.conv_job(), device="RTX 3090")
    given = memfit.estimate(jobs.conv_job(), device=memfit.find_device("rtx-3090"))
    sized = memfit.estimate(jobs.conv_job(), device="24GiB")

    assert named.replay == given.replay
    assert sized.capacity_bytes == 24 * GIB
    assert named.device.name == "rtx-3090"


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "GPU", None])
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_told_in_one_message(device):
    with pytest.raises(BadInput, match=r"no CUDA device.*Name the device to simulate, such as device='rtx-3090'"):
        memfit.estimate(jobs.conv_job(), device=device)


def test_a_missing_pytorch_names_what_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(MissingDependency, match=r"PyTorch is not installed\. Install it with `pip install torch`"):
        memfit.estimate(jobs.conv_job(), device="rtx-3090")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("NVIDIA GeForce RTX 3090", "rtx-3090"), ("NVIDIA Prototype 1", "NVIDIA Prototype 1")],
)
def test_the_own_gpu_has_the_memory_it_reports(monkeypatch, name, expected):
    from memfit.frameworks.torch import adapter

    monkeypatch.setattr(adapter, "own_gpu", lambda: (name, 7 * GIB, (8, 6)))

    device = memfit.estimate(jobs.conv_job(), device="cuda").device

    assert (device.name, device.usable_bytes, device.usable_origin) == (expected, 7 * GIB, Origin.MEASURED)


def test_an_unknown_device_names_the_nearest():
    with pytest.raises(UnknownDevice, match=r"no device is called 'rtx-390'\. The nearest: rtx-3090"):
        memfit.estimate(jobs.conv_job(), device="rtx-390")


# Precision, mode, allocator


def test_half_precision_halves_the_parameters():
    whole = memfit.estimate(jobs.conv_job(), device=UNLIMITED)
    half = memfit.estimate(jobs.conv_job(), device=UNLIMITED, precision="bf16")

    assert category_bytes(half, Category.PARAMETER) * 2 == category_bytes(whole, Category.PARAMETER)
    assert half.num_parameters == whole.num_parameters == sum(p.numel() for p in jobs.ConvNet().parameters())


@pytest.mark.parametrize("precision", ["amp-fp16", "amp-bf16"])
def test_autocast_keeps_parameters_and_saves_activations(precision):
    options = {"device": UNLIMITED, "batch_size": 64}
    whole = memfit.estimate(jobs.conv_job(), **options)
    mixed = memfit.estimate(jobs.conv_job(), precision=precision, **options)

    assert category_bytes(mixed, Category.PARAMETER) == category_bytes(whole, Category.PARAMETER)
    assert category_bytes(mixed, Category.ACTIVATION) < category_bytes(whole, Category.ACTIVATION)
    assert mixed.precision == precision


def test_single_precision_is_what_the_model_is_in_anyway():
    given = memfit.estimate(jobs.conv_job(), device=UNLIMITED)
    single = memfit.estimate(jobs.conv_job(), device=UNLIMITED, precision="fp32")

    assert given.timeline == single.timeline
    assert (given.precision, single.precision) == ("as given", "fp32")


def test_inference_has_no_gradients_and_no_optimizer():
    training = memfit.estimate(jobs.conv_job(), device="cpu")
    inference = memfit.estimate(jobs.conv_job(), device="cpu", mode="inference")

    for category in (Category.GRADIENT, Category.OPTIMIZER_STATE, Category.ACTIVATION):
        assert category_bytes(inference, category) == 0
        assert category_bytes(training, category) > 0
    assert inference.peak_bytes < training.peak_bytes


def test_the_optimizer_has_its_state():
    parameters = category_bytes(memfit.estimate(jobs.conv_job(), device="cpu"), Category.PARAMETER)
    state = {
        name: category_bytes(
            memfit.estimate(jobs.conv_job(optimizer=named_optimizer(name)), device=UNLIMITED),
            Category.OPTIMIZER_STATE,
        )
        for name in ("none", "sgd", "sgd-momentum", "adam")
    }

    assert state["none"] == state["sgd"] == 0
    assert state["sgd-momentum"] == parameters
    assert state["adam"] == pytest.approx(2 * parameters, rel=0.02)


def test_allocator_options_reach_the_allocator():
    job = jobs.deep_job()

    plain = memfit.estimate(job, device=UNLIMITED)
    expandable = memfit.estimate(job, device=UNLIMITED, allocator=memfit.AllocatorOptions(expandable_segments=True))
    rounded = memfit.estimate(job, device=UNLIMITED, allocator=memfit.AllocatorOptions(roundup_power2_divisions=2))

    assert plain.timeline == expandable.timeline == rounded.timeline
    assert expandable.reserved_peak_bytes < plain.reserved_peak_bytes
    assert rounded.allocated_peak_bytes > plain.allocated_peak_bytes


# Batch sizes


@pytest.mark.parametrize("make", JOBS)
@pytest.mark.parametrize("device", ["rtx-3090", "t4", "cpu"])
def test_another_batch_size_is_what_a_trace_of_its_own_would_give(make, device):
    # GIVEN one estimate
    estimate = memfit.estimate(make(4), device=device)

    # THEN moving it is tracing anew, block by block
    for batch_size in (2, 3, 5, 8, 32, 111):
        moved, fresh = estimate.at_batch(batch_size), memfit.estimate(make(batch_size), device=device)
        assert moved.timeline == fresh.timeline
        same = dataclasses.replace(fresh, seconds=moved.seconds)
        assert moved == same


def triples_job(batch_size):
    """Every pair of a batch is compared, and every triple: the step grows with the square and with the cube."""

    def loss(model, batch):
        pairs = model(batch) @ model(batch).t()
        margins = (pairs[:, :, None] - pairs[:, None, :]).relu()
        return margins.mean() + torch.logsumexp(pairs, 1).mean()

    return Job(nn.Linear(64, 32), loss, torch.zeros(batch_size, 64), optimizer=torch.optim.Adam)


@pytest.mark.parametrize("device", ["rtx-3090", "cpu"])
def test_a_step_that_grows_with_square_and_cube_of_the_batch(device):
    estimate = memfit.estimate(triples_job(32), device=device)

    for batch_size in (2, 20, 48, 57, 100, 300):
        fresh = memfit.estimate(triples_job(batch_size), device=device)
        assert estimate.at_batch(batch_size).allocated_peak_bytes == pytest.approx(fresh.allocated_peak_bytes, rel=1e-4)


@pytest.mark.parametrize("device", ["rtx-3090", "t4", "h100"])
def test_a_batch_far_larger_has_the_buffers_of_its_own_sums(device):
    # GIVEN a step whose sums go to one block of threads each at 4 samples, and to several at hundreds
    estimate = memfit.estimate(jobs.transformer_job(4), device=device)

    for batch_size in (111, 200, 700):
        moved, fresh = estimate.at_batch(batch_size), memfit.estimate(jobs.transformer_job(batch_size), device=device)
        assert moved.peak_bytes == pytest.approx(fresh.peak_bytes, rel=0.002)


@pytest.mark.parametrize("make", [jobs.transformer_job, jobs.contrastive_job])
def test_a_batch_of_one_is_no_smaller_version_of_others(make):
    # PyTorch goes through other operators for dimensions of size 1.
    one, four = memfit.estimate(make(1), device="rtx-3090"), memfit.estimate(make(4), device="rtx-3090")

    assert four.at_batch(1).timeline == one.timeline
    assert one.at_batch(4).timeline == four.timeline


@pytest.mark.parametrize("make", JOBS)
def test_estimates_do_not_depend_on_what_was_estimated_before(make):
    first, second = (memfit.estimate(make(13), device="rtx-3090") for _ in range(2))

    assert first.timeline == second.timeline


@pytest.mark.parametrize("batch_size", [0, -3])
def test_a_batch_has_at_least_one_sample(batch_size):
    with pytest.raises(BadBatch, match=f"a batch size must be at least 1, but {batch_size} was given"):
        memfit.estimate(jobs.conv_job(), device="cpu", batch_size=batch_size)
    with pytest.raises(BadBatch, match=f"a batch size must be at least 1, but {batch_size} was given"):
        memfit.estimate(jobs.conv_job(), device="cpu").at_batch(batch_size)


@pytest.mark.parametrize("batch_size", [2.5, "8", [4]])
def test_a_batch_size_is_a_whole_number(batch_size):
    with pytest.raises(BadBatch, match=r"a batch size must be a whole number from 1 up, but .* was given"):
        memfit.estimate(jobs.conv_job(), device="cpu", batch_size=batch_size)


def fixed_size_loss(model, batch):
    return model(batch.view(4, 8)).sum()


def test_a_step_of_one_size_can_be_estimated_at_that_size():
    # GIVEN a step that works with 4 samples only
    estimate = memfit.estimate(nn.Linear(8, 1), fixed_size_loss, torch.ones(4, 8), device="cpu")

    # THEN its estimate is there, and another size says why it can't be
    assert estimate.batch_size == 4
    with pytest.raises(StepFailed, match=r"failed in its forward at .*test_estimate\.py:\d+ in fixed_size_loss"):
        estimate.at_batch(5)


def without_batch_dimension(model, batch):
    return model(batch["x"]).sum() + batch["y"].sum()


def test_a_batch_without_common_dimension_has_no_size():
    batch = {"x": torch.ones(4, 8), "y": torch.ones(3)}
    estimate = memfit.estimate(nn.Linear(8, 1), without_batch_dimension, batch, device="cpu")

    assert estimate.batch_size is None
    with pytest.raises(BadInput, match="its batch has no common first dimension"):
        estimate.at_batch(5)
    with pytest.raises(BadBatch, match=r"share no first dimension, so no batch size can be set\. Give a batch whose"):
        memfit.estimate(nn.Linear(8, 1), without_batch_dimension, batch, device="cpu", batch_size=3)
    with pytest.raises(
        BadBatch, match=r"share no first dimension, so it can't be made larger or smaller\. Give tensors"
    ):
        memfit.max_batch(nn.Linear(8, 1), without_batch_dimension, batch, device="1GiB")


# Does it fit


@pytest.mark.parametrize("make", JOBS)
@pytest.mark.parametrize("device", ["rtx-3090", "300MiB", "cpu", UNLIMITED], ids=str)
@pytest.mark.parametrize("batch_size", [4, 200])
def test_bounds_lie_around_the_peak(make, device, batch_size):
    estimate = memfit.estimate(make(batch_size), device=device)

    least, most = estimate.interval_bytes
    assert 0 < least <= estimate.peak_bytes <= most
    assert 0 < estimate.certain_bytes <= estimate.tight_bytes <= estimate.peak_bytes
    assert estimate.fit_probability is None or (estimate.fit_probability >= 0.5) == estimate.fits
    assert estimate.allocated_peak_bytes <= estimate.reserved_peak_bytes


def test_verdicts_follow_the_capacity():
    job = jobs.conv_job(64)
    free = memfit.estimate(job, device=UNLIMITED)

    assert free.fits is None
    assert memfit.estimate(job, device=sized(free.peak_bytes)).fits is True
    assert memfit.estimate(job, device=sized(2 * free.peak_bytes)).fits is True
    assert memfit.estimate(job, device=sized(free.timeline.peak()[1] // 2)).fits is False


def test_what_does_not_fit_says_what_it_would_need():
    job = jobs.conv_job(64)
    free = memfit.estimate(job, device=UNLIMITED)

    failed = memfit.estimate(job, device=sized(20 * MIB))

    assert failed.fits is False
    assert failed.peak_bytes == free.peak_bytes
    assert failed.replay.allocated == free.replay.allocated
    assert failed.replay.out_of_memory is not None
    assert "at least" not in str(failed)
    assert str(failed).splitlines()[1].startswith(f"{memfit.core.units.format_size(free.peak_bytes)} needed, 20.0 MiB")


def test_a_tight_fit_is_noted():
    # GIVEN capacities between what a step can do with and what it would like to have
    free = memfit.estimate(jobs.deep_job(), device=UNLIMITED)
    between = range(free.certain_bytes // 2, free.peak_bytes, (free.peak_bytes - free.certain_bytes) // 12)
    made = [memfit.estimate(jobs.deep_job(), device=sized(size)) for size in (*between, free.peak_bytes)]

    # THEN with each more of memory it does better: fails, drops workspaces, releases its cache, just fits
    stages = [(estimate.fits, *(note.code for note in estimate.notes)) for estimate in made]
    assert list(dict.fromkeys(stages)) == [(False,), (True, "workspace-dropped"), (True, "cache-released"), (True,)]
    for estimate in made:
        assert estimate.certain_bytes <= estimate.tight_bytes <= estimate.peak_bytes <= free.peak_bytes
        assert estimate.fits == (estimate.peak_bytes <= estimate.capacity_bytes)
        assert estimate.fits == (estimate.tight_bytes <= estimate.capacity_bytes)
        for view in dataclasses.asdict(estimate.breakdown).values():
            assert sum(view.values()) == estimate.peak_bytes
            assert min(view.values()) >= 0


def test_the_host_fails_beyond_its_memory():
    host = Device("host", "Host", Kind.HOST, None, 100_000, Origin.ASSUMED)

    estimate = memfit.estimate(jobs.conv_job(), device=host)

    assert estimate.fits is False
    assert estimate.context_bytes == 0
    assert estimate.peak_bytes == memfit.estimate(jobs.conv_job(), device="cpu").peak_bytes


def test_host_memory_counts_workers_and_pinned_batches():
    batch_bytes = sum(t.numel() * t.element_size() for t in jobs.images(4))
    plain = memfit.estimate(jobs.conv_job(), device="rtx-3090").host
    loaded = memfit.estimate(jobs.conv_job(num_workers=3, prefetch_factor=4, pin_memory=True), device="rtx-3090").host

    assert plain.parts["batch being fed"] == batch_bytes
    assert plain.parts["Python and PyTorch (assumed)"] == 600 * MIB
    more = {name: size for name, size in loaded.parts.items() if name not in plain.parts}
    assert more == {
        "3 loader workers (assumed 250 MiB each)": 3 * 250 * MIB,
        "prefetched batches, pinned": 12 * batch_bytes,
        "batches on their way, in shared memory (/dev/shm)": 3 * batch_bytes,
    }
    alone = memfit.estimate(jobs.conv_job(pin_memory=True), device="rtx-3090").host
    assert alone.parts["prefetched batches, pinned"] == batch_bytes
    shared = memfit.estimate(jobs.conv_job(num_workers=3, prefetch_factor=4), device="rtx-3090").host
    assert shared.parts["3 x 4 prefetched batches, in shared memory (/dev/shm)"] == 12 * batch_bytes
    assert not any("model" in name for name in memfit.estimate(jobs.conv_job(), device="cpu").host.parts)


# Reports


def test_printing_answers_the_question():
    lines = str(memfit.estimate(jobs.conv_job(), device="rtx-3090")).splitlines()

    assert lines[0] == "ConvNet: training, batch size 4, precision as given"
    assert lines[1].endswith("usable on NVIDIA GeForce RTX 3090: fits (99%)")
    assert any("tests/jobs.py:" in line for line in lines)


def test_no_line_of_the_caller_is_blamed():
    estimate = memfit.estimate(jobs.conv_job(), device="rtx-3090")

    assert {block.source.rpartition(":")[0] for block in estimate.timeline.blocks} == {"", "tests/jobs.py"}


def test_an_estimate_survives_json():
    estimate = memfit.estimate(jobs.conv_job(64), device="300MiB")

    assert memfit.Estimate.from_json(json.dumps(estimate.to_json())) == estimate


def test_a_page_is_written(tmp_path):
    path = tmp_path / "memory.html"

    memfit.estimate(jobs.conv_job(), device="rtx-3090").report(path)

    assert path.read_text(encoding="utf-8").startswith("<!")
    assert list(tmp_path.iterdir()) == [path]


def test_import_loads_nothing_it_does_not_need():
    unwanted = ["email", "importlib.metadata", "importlib.resources", "tempfile", "memfit.reports.page", "argparse"]
    code = f"import sys, memfit; print([name for name in {unwanted} if name in sys.modules])"

    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, env={"PYTHONPATH": "src"})

    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_device_of_torch_means_this_machine():
    import torch

    by_name = memfit.estimate(jobs.conv_job(), device="cpu")

    assert memfit.estimate(jobs.conv_job(), device=torch.device("cpu")).device == by_name.device


@pytest.mark.parametrize(
    ("device", "precision", "told"), [("t4", "amp-bf16", 1), ("t4", "bf16", 1), ("a100-40gb", "bf16", 0)]
)
def test_the_other_precision_of_a_device_is_simulated_too(device, precision, told):
    result = memfit.estimate(LINEAR, lambda model, x: model(x).sum(), ONES, device=device, precision=precision)
    other = precision.replace("bf16", "fp16")
    needed = memfit.estimate(LINEAR, lambda model, x: model(x).sum(), ONES, device=device, precision=other)
    remarks = [note.text for note in result.notes if note.text.startswith(f"with precision {other} the step needs")]
    assert len(remarks) == told
    assert all(format_size(needed.peak_bytes) in text for text in remarks)
