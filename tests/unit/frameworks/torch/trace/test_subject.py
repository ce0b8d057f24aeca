import pytest
import torch
from torch import nn

import memfit
from memfit.core.device import Origin
from memfit.core.errors import BadInput
from memfit.core.job import Job
from memfit.core.settings import OptimizerKernels, Settings
from memfit.frameworks.torch.apply.fitted import Fitted
from memfit.frameworks.torch.trace.job import OpenJob
from memfit.frameworks.torch.trace.subject import Subject


def loss(model, batch):
    return model(batch).square().mean()


def subject_of(model=None, batch=None, device="cpu", **options):
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) if model is None else model
    batch = torch.randn(16, 8) if batch is None else batch
    return Subject(OpenJob(Job(model, loss, batch, **options), memfit.find_device(device)))


def test_a_profile_is_that_of_the_batch_size_asked_for():
    subject = subject_of()
    small, large = subject.profile(16, Settings()), subject.profile(32, Settings())
    assert (small.batch_size, large.batch_size) == (16, 32)
    assert large.timeline.peak()[1] > small.timeline.peak()[1]


def test_a_profile_follows_the_settings():
    subject = subject_of(model=nn.Linear(64, 64), batch=torch.randn(512, 64), device="a100-40gb")
    plain, narrow = subject.profile(512, Settings()), subject.profile(512, Settings(precision="amp-bf16"))
    assert "autocast" not in plain.features and "autocast" in narrow.features


def test_a_cache_is_off_while_profiled_and_on_afterwards():
    class Config:
        use_cache = True

    seen = []

    class Cached(nn.Linear):
        config = None

        def forward(self, x):
            seen.append(self.config.use_cache)
            return super().forward(x)

    model = Cached(8, 8)
    model.config = Config()
    subject_of(model).profile(16, Settings())
    assert seen and not any(seen)
    assert model.config.use_cache is True


def test_a_tensor_that_stands_in_the_way_is_named():
    subject = subject_of(batch={"inputs": torch.randn(16, 8), "weights": torch.ones(3)})
    assert "weights" in subject.why_not_split() and "(3,)" in subject.why_not_split()


def test_a_mean_is_recognised():
    found = subject_of().find_weighting()
    assert found.weighting.kind == "samples" and found.origin is Origin.MEASURED


def test_values_have_a_place():
    assert subject_of().place() == "cpu"
    assert subject_of(device="a100-40gb").place() == "cpu"
    assert subject_of(batch=torch.empty(16, 8, device="meta")).place() == ""
    assert subject_of(batch=lambda size: torch.randn(size, 8)).place() == ""


def test_a_model_that_a_plan_runs_is_no_subject():
    model = nn.Linear(8, 8)
    with Fitted(Settings(), model), pytest.raises(BadInput, match="by a plan already"):
        subject_of(model)


def test_passes_are_measured():
    found = subject_of().measure([4, 16])
    assert [one.batch_size for one in found] == [4, 16]
    assert all(one.forward_seconds > 0 and one.backward_seconds > 0 for one in found)


def test_passes_that_fail_are_not_measured():
    def fail(model, batch):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    subject = Subject(OpenJob(Job(nn.Linear(8, 8), fail, torch.randn(4, 8)), memfit.find_device("cpu")))
    assert subject.measure([2]) == ()


def test_updates_are_measured_where_the_optimizer_is_at_hand():
    model = nn.Linear(8, 8)
    found = subject_of(model, optimizer=torch.optim.AdamW(model.parameters())).measure_updates()
    assert found["keep"] > 0 and found["fused"] > 0
    assert set(found) <= {kind.value for kind in OptimizerKernels}
    assert subject_of(optimizer=torch.optim.AdamW).measure_updates() == {}


@pytest.mark.parametrize("figure", [0, 1])
def test_the_host_has_rates(figure):
    assert subject_of().host_rates()[figure] > 1e6


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["job", "model"])
def test_a_compiled_job_is_planned_as_compiled(how):
    model = nn.Sequential(nn.Linear(64, 64), *[nn.Tanh()] * 6, nn.Linear(64, 64))
    batch = torch.randn(2**16, 64)
    job = Job(model, loss, batch, compile=True) if how == "job" else Job(torch.compile(model), loss, batch)
    known = memfit.estimate(job, device="rtx-3090")
    allow = ["exact", "rounding", "compile"]

    fits = memfit.plan(job, device="rtx-3090", allow=allow)
    split = memfit.plan(job, device="rtx-3090", budget=known.peak_bytes - 16 * 2**20, allow=allow)

    assert fits.before.allocated_bytes == fits.after.allocated_bytes == known.allocated_peak_bytes
    assert fits.subject == known.subject
    assert [refusal.reason for refusal in fits.refused if refusal.name == "compile"] == ["the step is compiled already"]
    assert split.settings.micro_batches > 1 and not split.settings.checkpoint
    assert any(block.op.startswith("inductor") for block in split.estimate_after.timeline.blocks)


@pytest.mark.filterwarnings("ignore")
def test_real_steps_of_a_compiled_job_are_not_timed():
    opened = OpenJob(Job(nn.Linear(8, 8), loss, torch.randn(4, 8), compile=True), memfit.find_device("cpu"))
    subject = Subject(opened)
    assert subject.place() == "cpu"
    opened.trace(4)
    assert subject.is_compiled and not subject.place()


@pytest.mark.filterwarnings("ignore")
def test_the_profile_of_a_compiled_way_is_that_of_its_kernels():
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(*[nn.Tanh()] * 6), nn.Dropout(), nn.Linear(64, 64))
    subject = subject_of(model, torch.randn(4096, 64))
    eager, compiled = (subject.profile(4096, Settings(compile=flag)) for flag in (False, True))

    assert compiled.timeline.peak()[1] < eager.timeline.peak()[1]
    assert "dropout" in compiled.features
    assert any(unit.calls for unit in eager.units)
    assert not any(unit.calls for unit in compiled.units) and all(unit.refused for unit in compiled.units)
    assert "inductor.fused" in {work.op for work in compiled.work}
    assert sum(work.moved_bytes for work in compiled.work) < 0.7 * sum(work.moved_bytes for work in eager.work)


@pytest.mark.filterwarnings("ignore")
def test_what_the_compiler_refuses_is_not_planned_compiled(monkeypatch):
    def refused(*arguments, **options):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("memfit.frameworks.torch.compilation.inductor_graphs.GraphMemory.runnable", refused)
    plan = memfit.plan(
        nn.Sequential(nn.Linear(64, 64), nn.Tanh()), loss, torch.randn(8, 64), device="rtx-3090", allow=["compile"]
    )
    assert not plan.settings.compile
    (refusal,) = (one for one in plan.refused if one.name == "compile")
    assert "torch.compile failed on shapes" in refusal.reason and "no such kernel" in refusal.reason
