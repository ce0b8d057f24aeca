"""A plan that compiles the model, put into practice by PyTorch's real compiler."""

import copy
import shutil

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import memfit
from benchmarks.compiled_models import MODELS, loss
from benchmarks.measure_cpu import allocations, find_peak, storage_bytes

pytestmark = [
    # PyTorch's compiler loads parts of PyTorch that PyTorch deprecates.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles its kernels for the CPU with g++"),
]


def updated(model, run, batch):
    """What two updates, each the step that `run` makes of an optimizer, leave in a copy of the model."""
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    step = run(twin, optimizer)
    losses = [step(batch).item() for _ in range(2)]
    return losses, [parameter.detach() for parameter in twin.parameters()]


def plainly(model, optimizer):
    def step(batch):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        return value

    return step


@pytest.mark.parametrize("name", ["mlp", "convnet"])
def test_a_compiled_plan_takes_what_was_predicted_and_computes_the_same(name):
    # GIVEN a plan whose budget only the compiled step fits into
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            # Inductor draws other masks.
            module.p = 0.0
    plan = memfit.plan(
        model,
        loss,
        batch,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        device="cpu",
        budget="40MiB",
        allow=["compile", "set-to-none"],
        options=memfit.PlanOptions(measure=False),
    )
    assert [move.name for move in plan.moves] == ["compile"]

    # WHEN the step runs: plainly, as the plan says, and as its code says
    def by_plan(twin, optimizer):
        fitted = plan.apply(twin, optimizer)
        return lambda given: fitted.step(loss, given)

    def by_code(twin, optimizer):
        names = {}
        exec(compile(plan.code(), "plan", "exec"), names)
        twin, optimizer = names["prepare"](twin, optimizer)
        return lambda given: names["step"](twin, optimizer, loss, given)

    plain, *compiled = (updated(model, run, batch) for run in (plainly, by_plan, by_code))

    # THEN all compute the same up to rounding
    for losses, parameters in compiled:
        assert losses == pytest.approx(plain[0], rel=1e-5)
        for one, other in zip(parameters, plain[1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)

    # AND the compiled step takes what was predicted
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with plan.apply(model, optimizer) as fitted:
        fitted.accumulate(loss, batch)
        fitted.clear_gradients()
        before = storage_bytes([*model.parameters(), *model.buffers(), batch])
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            for _ in range(2):
                fitted.step(loss, batch)
    measured = before + find_peak(allocations(profiled))[0]
    assert plan.after.allocated_bytes == pytest.approx(measured, rel=0.03)
