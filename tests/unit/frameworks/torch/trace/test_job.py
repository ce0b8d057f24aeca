import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.core.errors import BadBatch, BadInput, BadModel, StepFailed
from memfit.core.job import Job
from memfit.core.timeline import Category
from memfit.frameworks.torch.trace.job import OpenJob, own_gpu
from tests.unit.frameworks.torch.builders import AMPERE, mean_of_output, total

BATCH = torch.empty(4, 6)


def make_job(**changes):
    options = {"model": nn.Linear(6, 2), "loss": mean_of_output, "batch": BATCH} | changes
    return Job(**options)


def batch_bytes(traced):
    return total(traced.timeline.blocks, Category.BATCH)


def test_a_job_knows_its_name_and_batch_size():
    job = OpenJob(make_job(), AMPERE)

    assert (job.name, job.batch_size, job.notes) == ("Linear", 4, ())
    assert OpenJob(make_job(name="mine"), AMPERE).name == "mine"


def test_it_is_traced_at_its_own_size_and_at_others():
    job = OpenJob(make_job(), AMPERE)

    assert [batch_bytes(job.trace(n)) for n in (None, 4, 8, 1)] == [96, 96, 192, 24]


def test_a_batch_size_replaces_the_first_dimension():
    job = OpenJob(make_job(), AMPERE, batch_size=16)

    assert job.batch_size == 16
    assert batch_bytes(job.trace(None)) == 16 * 6 * 4


def test_a_function_makes_batches_of_any_size():
    sizes = []

    def make(count):
        sizes.append(count)
        return torch.empty(count, 6)

    job = OpenJob(make_job(batch=make), AMPERE, batch_size=3)
    job.trace(5)

    assert sizes == [3, 5]
    assert job.batch_size == 3


def test_a_function_decides_what_a_batch_size_means():
    # GIVEN pairs: two rows per sample
    job = OpenJob(make_job(batch=lambda count: torch.empty(2 * count, 6)), AMPERE, batch_size=5)

    assert job.batch_size == 5
    assert batch_bytes(job.trace(7)) == 14 * 6 * 4


def test_a_model_may_be_a_class_or_a_function():
    class Model(nn.Linear):
        def __init__(self):
            super().__init__(6, 2)

    assert OpenJob(make_job(model=Model), AMPERE).name == "Model"
    assert OpenJob(make_job(model=lambda: nn.Linear(6, 2)), AMPERE).name == "Linear"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": 3}, BadModel, "but int was given"),
        ({"model": lambda: 3}, BadModel, "returned int"),
        ({"loss": "mse"}, BadInput, "loss must be a function.*str"),
        ({"precision": "fp8"}, BadInput, "fp32, fp16, bf16, amp-fp16, amp-bf16, but 'fp8'"),
        ({"batch": None}, BadBatch, "holds no tensor.*NoneType"),
        ({"batch": {}}, BadBatch, "holds no tensor.*dict"),
        ({"batch": [1, 2]}, BadBatch, "holds no tensor.*list"),
        ({"batch": torch.empty(0, 6)}, BadBatch, r"empty tensor of shape \(0, 6\)"),
    ],
)
def test_what_cannot_be_used_is_refused_at_once(changes, error, message):
    with pytest.raises(error, match=message):
        OpenJob(make_job(**changes), AMPERE)


@pytest.mark.parametrize("size", [0, -3])
def test_a_batch_size_below_one_is_refused(size):
    with pytest.raises(BadBatch, match=f"at least 1, but {size}"):
        OpenJob(make_job(), AMPERE, batch_size=size)


def test_a_batch_without_common_dimension_has_no_size():
    batch = (torch.empty(4, 6), torch.empty(3))

    job = OpenJob(make_job(batch=batch, loss=lambda m, b: m(b[0]).mean()), AMPERE)

    assert job.batch_size is None
    with pytest.raises(BadBatch, match="share no first dimension"):
        OpenJob(make_job(batch=batch), AMPERE, batch_size=2)


def test_a_failure_with_disagreeing_tensors_says_that_they_disagree():
    batch = (torch.empty(4, 6), torch.empty(3, 2))
    job = OpenJob(make_job(batch=batch, loss=lambda m, b: F.l1_loss(m(b[0]).exp() + b[1], b[1])), AMPERE)

    with pytest.raises(BadBatch, match=r"(?s)the step failed.*disagree in their first dimension: 3, 4"):
        job.trace(None)


def test_a_failure_with_agreeing_tensors_is_the_steps_own():
    job = OpenJob(make_job(batch=torch.empty(4, 7)), AMPERE)

    with pytest.raises(StepFailed, match="the step failed in its forward"):
        job.trace(None)


def test_evaluation_mode_is_remarked_upon():
    assert [n.code for n in OpenJob(make_job(model=nn.Linear(6, 2).eval()), AMPERE).notes] == ["evaluation-mode"]
    assert OpenJob(make_job(model=nn.Linear(6, 2).eval(), mode="inference"), AMPERE).notes == ()


def test_inference_has_no_gradients():
    traced = OpenJob(make_job(mode="inference", optimizer=torch.optim.Adam), AMPERE).trace(None)

    assert {b.category for b in traced.timeline.blocks}.isdisjoint({Category.GRADIENT, Category.OPTIMIZER_STATE})


def test_all_options_of_a_job_reach_the_trace():
    plain = OpenJob(make_job(optimizer=torch.optim.Adam), AMPERE).trace(None)
    half = OpenJob(make_job(optimizer=torch.optim.Adam, precision="bf16"), AMPERE).trace(None)
    zeroed = OpenJob(make_job(optimizer=torch.optim.Adam, set_to_none=False), AMPERE).trace(None)

    assert half.parameter_bytes * 2 == plain.parameter_bytes
    assert half.batch_bytes * 2 == plain.batch_bytes
    gradients = [[b for b in t.timeline.blocks if b.category is Category.GRADIENT] for t in (plain, zeroed)]
    assert len(gradients[0]) == 2 * len(gradients[1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_machine_without_a_gpu_has_none():
    assert own_gpu() is None


@pytest.mark.filterwarnings("ignore")
def test_a_job_can_ask_for_compilation():
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Tanh())
    plain, compiled = (OpenJob(make_job(model=model, compile=asked), AMPERE) for asked in (False, "default"))

    assert (plain.name, compiled.name) == ("Sequential", "Sequential, compiled")
    assert any(block.op.startswith("inductor.") for block in compiled.trace(None).timeline.blocks)
    assert not any(block.op.startswith("inductor.") for block in plain.trace(None).timeline.blocks)
    # The given model stays as it is.
    assert model.__class__ is nn.Sequential
    assert model._compiled_call_impl is None
