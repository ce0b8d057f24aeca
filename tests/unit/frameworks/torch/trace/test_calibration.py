import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from memfit.core.errors import BadLoss, StepFailed
from memfit.core.settings import OptimizerKernels, Settings
from memfit.frameworks.torch.trace import calibration
from memfit.frameworks.torch.trace.calibration import measure, race, rates, time_passes, update_seconds


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)
        self.num_calls = 0

    def forward(self, values):
        self.num_calls += 1
        # The body is called once, the head twice.
        hidden = self.body(values)
        return self.head(hidden) + self.head(-hidden)


def loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def batch():
    return torch.randn(8, 6), torch.randint(0, 3, (8,))


def test_passes_are_measured_at_each_size():
    found = measure(Net(), loss, batch(), [4, 2, 8])

    assert [one.batch_size for one in found] == [2, 4, 8]
    assert all(one.forward_seconds > 0 and one.backward_seconds > 0 for one in found)


def test_each_module_that_is_called_has_its_share():
    (found,) = measure(Net(), loss, batch(), [8])

    assert set(found.unit_seconds) == {"body", "body.0", "body.1", "body.2", "head"}
    assert all(0 <= seconds <= found.forward_seconds for seconds in found.unit_seconds.values())


class Waits(nn.Module):
    """Takes as long as it says, by the clock of the test."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, values):
        # Not an attribute of the module, which would be put back.
        CLOCK[0] += self.seconds * len(values)
        return values * self.weight


CLOCK = [0.0]
SEEN = []


@pytest.fixture
def clock(monkeypatch):
    """Time that passes where a module says so, and a microsecond each time that somebody looks."""
    now = iter(range(10**9))
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: CLOCK[0] + next(now) * 1e-6)
    return CLOCK


def waiting(*seconds):
    return nn.Sequential(*(Waits(one) for one in seconds))


def total(model, batch):
    return model(batch).sum()


def test_times_are_those_of_the_passes(clock):
    (small, large) = measure(waiting(0.01, 0.03), total, torch.ones(4), [1, 4])

    assert small.forward_seconds == pytest.approx(0.04, rel=1e-3)
    assert large.forward_seconds == pytest.approx(0.16, rel=1e-3)
    assert small.unit_seconds == pytest.approx({"0": 0.01, "1": 0.03}, rel=1e-2)
    assert large.unit_seconds == pytest.approx({"0": 0.04, "1": 0.12}, rel=1e-2)


def test_a_module_inside_of_others_is_counted_in_each(clock):
    inner = Waits(0.02)
    model = nn.Sequential(nn.Sequential(inner, inner))

    (found,) = measure(model, total, torch.ones(1), [1])

    assert found.unit_seconds == pytest.approx({"0": 0.04, "0.0": 0.04}, rel=1e-2)


def test_sizes_without_time_left_are_left_out(clock):
    found = measure(waiting(0.1), total, torch.ones(64), [1, 2, 64], limit_seconds=3.0)

    assert [one.batch_size for one in found] == [1, 2]


def test_the_smallest_size_is_measured_however_long_it_takes(clock):
    found = measure(waiting(100.0), total, torch.ones(2), [1, 2], limit_seconds=3.0)

    assert [one.batch_size for one in found] == [1]
    assert found[0].forward_seconds == pytest.approx(100.0, rel=1e-3)


def test_the_time_is_bounded(clock):
    begun = CLOCK[0]

    measure(waiting(0.05), total, torch.ones(8), [1, 2, 4, 8], limit_seconds=3.0)

    assert CLOCK[0] - begun < 4.0


class NotesSizes(nn.Linear):
    def forward(self, values):
        SEEN.append(len(values))
        return super().forward(values)


def test_samples_are_repeated_for_larger_sizes():
    SEEN.clear()

    found = measure(NotesSizes(6, 3), loss, batch(), [20])

    assert [one.batch_size for one in found] == [20]
    assert set(SEEN) == {20}


def test_a_larger_size_that_fails_is_left_out():
    def picky(model, batch):
        if len(batch[0]) > 4:
            raise RuntimeError("out of memory")
        return loss(model, batch)

    assert [one.batch_size for one in measure(Net(), picky, batch(), [2, 4, 8])] == [2, 4]
    with pytest.raises(StepFailed, match="out of memory"):
        measure(Net(), picky, batch(), [8])


@pytest.mark.parametrize("precision", [None, "fp32", "bf16", "amp-bf16"])
def test_nothing_of_the_users_is_changed(precision):
    # GIVEN a model in use, with an optimizer that steps in the backward pass
    model, given = Net(), batch()
    loss(model, given).backward()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    values = {name: copy.deepcopy(gradient) for name, gradient in gradients.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.head.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    samples = [tensor.clone() for tensor in given]
    random_state = torch.get_rng_state()

    # WHEN it is measured
    found = measure(model, loss, given, [2, 4], precision)

    # THEN there are times, and everything is as it was
    assert len(found) == 2
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(tensor.dtype is state[name].dtype for name, tensor in model.state_dict().items())
    assert all(parameter.grad is gradients[name] for name, parameter in model.named_parameters())
    assert all(g is None or torch.equal(g, values[name]) for name, g in gradients.items())
    assert model.num_calls == 1
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(*pair) for pair in zip(given, samples, strict=True))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not optimizer.state


def test_the_precision_is_that_of_the_passes():
    def check(model, batch):
        output = model(batch[0])
        assert output.dtype is torch.bfloat16
        return functional.cross_entropy(output.float(), batch[1])

    assert measure(nn.Linear(6, 3), check, batch(), [2], "bf16")
    assert measure(nn.Linear(6, 3), check, batch(), [2], "amp-bf16")
    with pytest.raises(StepFailed):
        measure(nn.Linear(6, 3), check, batch(), [2])


def test_a_loss_with_its_weight_is_measured():
    assert measure(Net(), lambda model, batch: (loss(model, batch), len(batch[0])), batch(), [2])


def test_what_is_no_loss_is_refused():
    with pytest.raises(BadLoss):
        measure(Net(), lambda model, batch: model(batch[0]), batch(), [2])


def test_rates_of_this_machine_are_plausible_and_measured_once():
    found = rates()

    assert 1e8 < found[0] < 1e14
    assert 1e8 < found[1] < 1e13
    assert rates() is found


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, betas=(0.8, 0.9)), set(OptimizerKernels)),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), set(OptimizerKernels)),
        (
            lambda parameters: torch.optim.RMSprop(parameters),
            {OptimizerKernels.KEEP, OptimizerKernels.SINGLE},
        ),
    ],
)
def test_updates_are_measured_by_kind_of_kernels(make, kinds):
    # GIVEN a model with gradients and its optimizer
    model = Net()
    loss(model, batch()).backward()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = make(model.parameters())

    # WHEN updates are measured
    found = update_seconds(optimizer, model)

    # THEN each kind that the optimizer has is there, and nothing was updated
    assert set(found) == kinds
    assert all(seconds > 0 for seconds in found.values())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert not optimizer.state


def test_updates_grow_with_the_model(monkeypatch):
    # GIVEN a cost for each tensor and each byte
    def cost(optimizer, kernels, like, number, elements):
        return number * 1e-6 + (number * elements * 4 * 1e-9 if elements > 10_000 else 0)

    monkeypatch.setattr(calibration, "_time_update", cost)
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    model[1].requires_grad_(False)

    found = update_seconds(torch.optim.Adam(model.parameters()), model)

    # THEN two tensors of 110 elements in all are updated
    assert found[OptimizerKernels.KEEP] == pytest.approx(2e-6 + 440e-9)


def test_settings_of_the_optimizer_are_kept():
    optimizer = torch.optim.AdamW(Net().parameters(), lr=0.5, amsgrad=True, foreach=True)
    optimizer.param_groups[0]["lr"] = 0.25
    scratch = [nn.Parameter(torch.ones(2))]

    made = calibration._with_kernels(optimizer, OptimizerKernels.KEEP, scratch).param_groups[0]
    fused = calibration._with_kernels(optimizer, OptimizerKernels.FUSED, scratch).param_groups[0]
    single = calibration._with_kernels(optimizer, OptimizerKernels.SINGLE, scratch).param_groups[0]

    assert (made["lr"], made["amsgrad"], made["foreach"]) == (0.25, True, True)
    assert (fused["fused"], fused["foreach"]) == (True, None)
    assert (single["fused"], single["foreach"]) == (None, False)


def test_an_optimizer_that_needs_a_closure_is_not_measured():
    assert update_seconds(torch.optim.LBFGS([nn.Parameter(torch.ones(1))]), Net()) == {}


def test_a_model_without_trained_parameters_has_no_update():
    model = Net().requires_grad_(False)

    assert update_seconds(torch.optim.Adam([nn.Parameter(torch.ones(1))]), model) == {}


def test_passes_of_several_settings_are_timed_and_leave_no_trace():
    # GIVEN a model with a gradient of its own
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()))
    batch = torch.randn(16, 8)
    model(batch).sum().backward()
    before = [(p.detach().clone(), p.grad) for p in model.parameters()]
    plans = [Settings(), Settings(micro_batches=4), Settings(checkpoint=("1",), kernels=OptimizerKernels.FUSED)]

    # WHEN several settings are timed
    found = time_passes(model, lambda model, batch: model(batch).mean(), batch, plans, limit_seconds=0.1)

    # THEN there is a time for each, and the model is as it was
    assert len(found) == 3 and all(0 < seconds < 60 for seconds in found)
    for parameter, (value, gradient) in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value) and parameter.grad is gradient
    assert "forward" not in model[1].__dict__


def test_what_there_is_no_time_for_is_not_timed():
    plans = [Settings(), Settings(micro_batches=4), Settings(micro_batches=2)]
    model, batch = torch.nn.Linear(2, 2), torch.ones(4, 2)

    found = time_passes(model, lambda model, batch: model(batch).mean(), batch, plans, limit_seconds=0.0)

    # THEN one pass of the first was made
    assert found[0] > 0
    assert found[1:] == [None, None]


FAST, CLOSE, SLOW = (Settings(micro_batches=parts) for parts in (1, 2, 3))
SECONDS = {FAST: 1.0, CLOSE: 1.04, SLOW: 2.0}


def runs(order, pace=lambda number: 1.0):
    """What runs one of the settings: notes it, and takes its time at the pace of the moment."""

    def run(settings):
        order.append(settings)
        return SECONDS[settings] * pace(len(order) - 1)

    return run


@pytest.mark.parametrize("moment", [4, 7, 10])
def test_a_fast_moment_of_the_machine_goes_to_nobody(clock, moment):
    # GIVEN a machine that is three times as fast for the length of one run of the second, in any turn
    order = []

    found = race(SECONDS, runs(order, lambda number: 1 / 3 if number == moment else 1.0), math.inf)

    assert order[moment] is CLOSE
    assert found[FAST] < found[CLOSE] < found[SLOW]


def test_a_machine_that_slows_down_hits_all_alike(clock):
    found = race(SECONDS, runs([], lambda number: (1.0, 1.0, 4.0, 1.5)[min(3, number // 3)]), math.inf)

    assert found[CLOSE] / found[FAST] == pytest.approx(1.04)
    assert found[SLOW] / found[FAST] == pytest.approx(2.0)


def test_those_that_are_clearly_slower_drop_out_and_keep_their_times(clock):
    order = []

    found = race(SECONDS, runs(order), math.inf)

    # THEN a slow one drops out after a warm-up and three turns, one that is close after some more
    assert order.count(SLOW) == 4 and 4 < order.count(CLOSE) == order.count(FAST) < 16
    assert found == pytest.approx({FAST: 1.0, CLOSE: 1.04, SLOW: 2.0})


def test_one_alone_runs_a_few_turns_too(clock):
    order = []

    assert race((FAST, FAST), runs(order), math.inf) == {FAST: pytest.approx(1.0)}
    assert len(order) == 4


def test_runs_go_there_and_back_again_until_equal_ones_are_known_to_be(clock):
    order = []

    race((FAST, CLOSE, FAST), lambda settings: order.append(settings) or 1.0, math.inf)

    assert order[:6] == [FAST, CLOSE, CLOSE, FAST, FAST, CLOSE]
    assert len(order) == 14


def test_a_warm_up_does_not_count(clock):
    found = race((FAST, CLOSE), runs([], lambda number: 100.0 if number < 2 else 1.0), math.inf)

    assert found[FAST] == pytest.approx(1.0)


def test_those_for_whom_there_is_no_time_drop_out(clock):
    assert race(SECONDS, runs([]), end=0.0) == {FAST: pytest.approx(1.0)}
