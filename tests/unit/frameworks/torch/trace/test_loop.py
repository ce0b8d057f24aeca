import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.core.errors import BadInput, StepFailed
from memfit.core.timeline import Category, Phase
from tests.unit.frameworks.torch.builders import AMPERE, HOST, moment, run
from tests.unit.frameworks.torch.measured import allocations

ROWS, INPUT, HIDDEN, CLASSES = 32, 256, 512, 1024


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUT, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def parameter_bytes(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


def loss(model, batch):
    return F.cross_entropy(model(batch).float(), torch.zeros(ROWS, dtype=torch.int64, device=batch.device))


def train(model, **options):
    options = {"optimizer": torch.optim.AdamW, **options}
    return run(model, torch.zeros(ROWS, INPUT), loss=loss, **options).timeline


def live_at_update(timeline, step):
    return sum(b.size_bytes for b in timeline.live_at(moment(timeline, Phase.OPTIMIZER, step)))


def test_outputs_live_until_the_next_are_there():
    plain, keeping = train(make()), train(make(), keep_outputs=True)
    logits = ROWS * CLASSES * 4
    assert live_at_update(keeping, 2) == live_at_update(plain, 2) + logits
    # Those of the first step are there while the second computes its own.
    tick = moment(keeping, Phase.BACKWARD, 2) - 1
    made = [b for b in keeping.blocks if b.op == "aten.addmm" and b.size_bytes == logits]
    assert [b.end is not None and b.end < tick for b in made] == [True, False]


def test_a_model_is_left_without_hooks():
    model = make()
    train(model, keep_outputs=True, data_parallel=2)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("device", [AMPERE, HOST], ids=["cuda", "cpu"])
def test_buckets_are_a_second_copy_of_the_gradients(device):
    model = make()
    hook = sys.excepthook
    plain, parallel = train(model, device=device), train(model, device=device, data_parallel=8)
    assert live_at_update(parallel, 2) == live_at_update(plain, 2) + parameter_bytes(model)
    gradients = [b for b in parallel.live_at(moment(parallel, Phase.OPTIMIZER, 2)) if b.category is Category.GRADIENT]
    assert sum(b.size_bytes for b in gradients) == 2 * parameter_bytes(model)
    assert sys.excepthook is hook


def test_buckets_are_of_the_size_that_pytorch_gives_them():
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)])
    timeline = run(model, torch.zeros(2, 1024), optimizer=None, data_parallel=2).timeline
    buckets = [b.size_bytes >> 20 for b in timeline.live_at(timeline.num_ticks - 1) if b.op == "aten.empty"]
    # The first holds what exceeds 1 MiB, the others what reaches 25: 4 MiB each.
    assert sorted(buckets) == [4, 28]


def test_data_parallel_options_that_make_no_sense_are_refused():
    for count in (0, 10**20, 2.0):
        with pytest.raises(BadInput, match="data_parallel is a number of devices, from 1 to 1,048,576, but"):
            memfit.Job(make(), loss, torch.zeros(ROWS, INPUT), data_parallel=count)
    frozen = make().requires_grad_(False)
    batch = torch.zeros(ROWS, INPUT, requires_grad=True)
    with pytest.raises(StepFailed, match="preparation"):
        run(frozen, batch, loss=loss, optimizer=None, data_parallel=2)


def test_a_plan_is_made_for_one_process():
    job = memfit.Job(make(), loss, torch.zeros(ROWS, INPUT), optimizer=torch.optim.AdamW, data_parallel=4)
    with pytest.raises(BadInput, match=r"the job has data_parallel=4.*smaller by the buckets .* \(2.51 MiB\)"):
        memfit.plan(job, device="16GiB")


def in_backward(model):
    """The usual way to fuse updates into the backward pass."""
    optimizers = {p: torch.optim.AdamW([p], foreach=False) for p in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return optimizers


def test_updates_in_hooks_free_each_gradient_and_make_state():
    model = make()
    in_backward(model)
    timeline = train(model, optimizer=None)
    last = timeline.live_at(timeline.num_ticks - 1)
    assert not [b for b in last if b.category is Category.GRADIENT]
    state = sum(b.size_bytes for b in last if b.category is Category.OPTIMIZER_STATE)
    assert state == 2 * parameter_bytes(model)
    # The largest gradient at the most.
    together = max(
        sum(b.size_bytes for b in timeline.live_at(tick) if b.op in ("aten.mm", "aten.t"))
        for tick in range(moment(timeline, Phase.BACKWARD, 2), timeline.num_ticks)
    )
    assert together <= HIDDEN * CLASSES * 4 + ROWS * CLASSES * 4


def test_hooks_and_their_optimizers_are_as_before():
    model = make()
    optimizers = in_backward(model)
    parameters = list(model.parameters())
    loss(model, torch.ones(ROWS, INPUT)).backward()
    kept = [(p.detach().clone(), copy.deepcopy(dict(optimizers[p].state[p]))) for p in parameters]
    train(model, optimizer=None)
    assert all(p is before for p, before in zip(model.parameters(), parameters, strict=True))
    for parameter, (values, state) in zip(parameters, kept, strict=True):
        assert torch.equal(parameter, values)
        assert list(optimizers[parameter].state) == [parameter]
        assert all(torch.equal(optimizers[parameter].state[parameter][name], state[name]) for name in state)
    # They still do what they did.
    loss(model, torch.ones(ROWS, INPUT)).backward()
    assert all(not torch.equal(p, values) for p, (values, _) in zip(parameters, kept, strict=True))
    assert all(len(p._post_accumulate_grad_hooks) == 1 for p in parameters)


def test_updates_in_hooks_take_what_was_measured_on_the_cpu():
    model = make()
    in_backward(model)
    timeline = train(model, optimizer=None, device=HOST)
    start = next(mark.tick for mark in timeline.marks if mark.step == 2)
    curve = timeline.curve()
    batch = torch.zeros(ROWS, INPUT)
    loss(model, batch).backward()
    total = peak = 0
    for change in allocations(lambda: loss(model, batch).backward()):
        total += change
        peak = max(peak, total)
    assert max(curve[start:]) - curve[start - 1] == pytest.approx(peak, abs=64)
