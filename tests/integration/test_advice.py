"""What a change is said to save, against an estimate of the step with the change really made."""

import dataclasses
import importlib.util

import pytest

import memfit
from memfit.core.replay import AllocatorOptions
from memfit.planner import advise
from memfit.planner.timeline_moves import Situation

torch = pytest.importorskip("torch")

# How far the peak that is named may be below or above the true one; docs/howto/dryrun.md gives the range seen.
LOWEST, HIGHEST = 0.95, 1.12


def in_halves(job):
    """The job with two backward passes on half a batch each."""

    def halves(batch, part):
        half = lambda t: t[: len(t) // 2] if part == 0 else t[len(t) // 2 :]  # noqa: E731
        return torch.utils._pytree.tree_map_only(torch.Tensor, half, batch)

    def loss(model, batch):
        (job.loss(model, halves(batch, 0)) / 2).backward()
        return job.loss(model, halves(batch, 1)) / 2

    return dataclasses.replace(job, loss=loss)


def checkpointed(job):
    model = job.model
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable()
    else:
        model.set_grad_checkpointing(True)
    return job


@pytest.fixture(
    scope="module",
    params=[
        ("timm:vit_small_patch16_224", 32),
        pytest.param(("hf:BertForSequenceClassification", 8), marks=pytest.mark.slow),
    ],
)
def case(request):
    name, batch_size = request.param
    library = "timm" if name.startswith("timm") else "transformers"
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    job = memfit.named_job(name)
    built = job.model if isinstance(job.model, torch.nn.Module) else job.model()
    job = dataclasses.replace(job, model=built)
    base = estimate(job, batch_size)
    situation = Situation(base.timeline, AllocatorOptions(), base.num_parameters)
    found = advise(situation, base.replay, limit=20, context_bytes=base.context_bytes)
    return job, batch_size, {advice.title.split()[0]: advice for advice in found}


def estimate(job, batch_size, **options):
    return memfit.estimate(job, device="a100-40gb", batch_size=batch_size, **options)


def check(advice, truth):
    assert LOWEST <= advice.peak_bytes / truth.peak_bytes <= HIGHEST


def test_half_a_batch(case):
    job, batch_size, advice = case
    check(advice["halve"], estimate(in_halves(job), batch_size))


def test_autocast(case):
    job, batch_size, advice = case
    check(advice["compute"], estimate(job, batch_size, precision="amp-bf16"))


def test_growing_segments_are_exact(case):
    job, batch_size, advice = case
    truth = estimate(job, batch_size, allocator=AllocatorOptions(expandable_segments=True))

    assert advice["let"].peak_bytes == truth.peak_bytes


def test_checkpointing(case):
    # Last, because it changes the model.
    job, batch_size, advice = case
    check(advice["checkpoint"], estimate(checkpointed(job), batch_size))
