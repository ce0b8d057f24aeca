import copy
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from memfit.core.errors import BadOptimizer
from memfit.core.settings import OptimizerKernels, OptimizerState, Settings
from memfit.core.timeline import Category, Phase
from memfit.frameworks.torch.apply.optimizers import FittedOptimizer
from tests.unit.frameworks.torch.builders import AMPERE, HOST, made_in, peak_of_temporaries, run, total

IN_BACKWARD = Settings(step_in_backward=True)
IN_HOST = Settings(state=OptimizerState.HOST)
EIGHT_BIT = Settings(state=OptimizerState.EIGHT_BIT)
SINGLE = Settings(kernels=OptimizerKernels.SINGLE)
FUSED = Settings(kernels=OptimizerKernels.FUSED)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def groups(model):
    return [
        {"params": [model[0].weight], "lr": 0.05, "weight_decay": 0.1},
        {"params": [model[0].bias, model[2].weight, model[2].bias]},
    ]


MAKERS = {
    "Adam": lambda model: torch.optim.Adam(groups(model), lr=0.01),
    "AdamW": lambda model: torch.optim.AdamW(groups(model), lr=0.01, weight_decay=0.2),
    "SGD": lambda model: torch.optim.SGD(groups(model), lr=0.01, momentum=0.9),
    "RMSprop": lambda model: torch.optim.RMSprop(groups(model), lr=0.01, momentum=0.5),
}


def train(model, optimizer, scheduler, steps=3):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        inputs = torch.randn(8, 6, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        scheduler.step()


def trained(name, settings, before=0, **options):
    """(model, optimizer) after steps with the settings, in between plain ones."""
    model = make_model()
    optimizer = MAKERS[name](model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    train(model, optimizer, scheduler, before)
    fitted = FittedOptimizer(settings, optimizer, model, **options)
    train(model, fitted.in_use, scheduler)
    fitted.undo()
    train(model, optimizer, scheduler)
    return model, optimizer


def assert_equal(expected, found, tolerance):
    for a, b in zip(expected[0].parameters(), found[0].parameters(), strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=0)
    for state, other in zip(expected[1].state.values(), found[1].state.values(), strict=True):
        assert state.keys() == other.keys()
    for group, other in zip(expected[1].param_groups, found[1].param_groups, strict=True):
        assert {**group, "params": 0} == {**other, "params": 0}


@pytest.mark.parametrize("before", [0, 2], ids=["from the start", "with a state"])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        (Settings(), 0),
        (SINGLE, 1e-12),
        (IN_BACKWARD, 1e-12),
        (IN_HOST, 1e-12),
        (replace(IN_HOST, step_in_backward=True), 1e-12),
        (replace(SINGLE, step_in_backward=True), 1e-12),
    ],
    ids=["keep", "single", "in backward", "host", "host in backward", "single in backward"],
)
def test_training_is_the_same(name, settings, tolerance, before):
    assert_equal(trained(name, Settings(), before), trained(name, settings, before), tolerance)


@pytest.mark.parametrize("before", [0, 2], ids=["from the start", "with a state"])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
@pytest.mark.parametrize("settings", [FUSED, replace(FUSED, step_in_backward=True)], ids=["fused", "in backward"])
def test_training_with_fused_kernels_is_the_same(name, settings, before):
    assert_equal(trained(name, Settings(), before), trained(name, settings, before), 1e-10)


def test_single_kernels_do_what_foreach_kernels_do():
    model, other = make_model(), make_model()
    for held, settings in ((model, Settings()), (other, SINGLE)):
        optimizer = torch.optim.AdamW(held.parameters(), lr=0.01, foreach=True)
        fitted = FittedOptimizer(settings, optimizer, held)
        assert fitted.in_use is optimizer
        assert [g["foreach"] for g in optimizer.param_groups] == [settings is not SINGLE]
        train(held, fitted.in_use, torch.optim.lr_scheduler.ConstantLR(optimizer))
        fitted.undo()
        assert optimizer.param_groups[0]["foreach"] is optimizer.defaults["foreach"] is True
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=0)


def test_gradients_are_gone_right_after_the_update():
    model = make_model()
    seen = []

    @contextmanager
    def around():
        yield
        seen.append([parameter.grad is None for parameter in model.parameters()])

    fitted = FittedOptimizer(IN_BACKWARD, torch.optim.SGD(model.parameters(), lr=0.1), model, around)
    before = copy.deepcopy(model.state_dict())
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    # Never were two gradients there at a time, and all parameters have moved without a call of `step`.
    assert len(seen) == 4
    assert all(all(gone) for gone in seen)
    assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    after = copy.deepcopy(model.state_dict())
    fitted.step()
    assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())


def test_shared_parameters_are_updated_once_with_the_whole_gradient():
    results = []
    for settings in (Settings(), IN_BACKWARD):
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.3)
        model[2].weight = model[0].weight
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        fitted = FittedOptimizer(settings, optimizer, model)
        train(model, fitted, torch.optim.lr_scheduler.ConstantLR(optimizer))
        assert optimizer.state[model[0].weight]["step"] == 3
        results.append(model[0].weight.detach())
    assert torch.allclose(*results, rtol=1e-12, atol=0)


@pytest.mark.parametrize("settings", [IN_BACKWARD, IN_HOST, replace(IN_HOST, step_in_backward=True)])
def test_frozen_parameters_stay(settings):
    model = make_model()
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, FittedOptimizer(settings, optimizer, model), torch.optim.lr_scheduler.ConstantLR(optimizer))
    assert torch.equal(model[0].weight, before)
    assert set(optimizer.state) == {model[2].weight, model[2].bias}


@pytest.mark.parametrize("make", [torch.optim.SparseAdam, lambda held: torch.optim.SGD(held, lr=0.1)])
def test_sparse_gradients_are_taken_in_backward(make):
    results = []
    for settings in (Settings(), IN_BACKWARD):
        layer = nn.Embedding(6, 3, sparse=True, dtype=torch.float64)
        nn.init.constant_(layer.weight, 0.5)
        fitted = FittedOptimizer(settings, make(list(layer.parameters())), layer)
        for _ in range(2):
            fitted.zero_grad()
            layer(torch.tensor([1, 4, 4])).square().sum().backward()
            fitted.step()
        results.append(layer.weight.detach())
    assert torch.equal(*results)
    assert results[0][4, 0] != 0.5


@pytest.mark.parametrize("settings", [IN_BACKWARD, IN_HOST])
def test_hooks_of_the_optimizer_run_once_per_step(settings):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, FittedOptimizer(settings, optimizer, model), torch.optim.lr_scheduler.ConstantLR(optimizer), steps=2)
    assert calls == ["before", "after"] * 2


def test_a_closure_is_called_first():
    model = make_model()
    fitted = FittedOptimizer(IN_HOST, torch.optim.SGD(model.parameters(), lr=0.1), model)
    before = model[0].weight.detach().clone()

    def closure():
        loss = model(torch.ones(2, 6, dtype=torch.float64)).sum()
        loss.backward()
        return loss

    assert fitted.step(closure).requires_grad
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("settings", [IN_BACKWARD, IN_HOST, EIGHT_BIT])
def test_a_checkpoint_goes_on_where_it_was(settings):
    if settings is EIGHT_BIT:
        pytest.importorskip("bitsandbytes")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fitted = FittedOptimizer(settings, optimizer, model)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    train(model, fitted, scheduler)
    saved, weights = copy.deepcopy(fitted.state_dict()), copy.deepcopy(model.state_dict())
    train(model, fitted, scheduler)
    expected = model[0].weight.detach().clone()

    model.load_state_dict(weights)
    fitted.load_state_dict(saved)
    train(model, fitted, scheduler)
    assert torch.equal(model[0].weight, expected)


def test_eight_bits_in_backward_do_what_they_do_afterwards():
    pytest.importorskip("bitsandbytes")
    results = []
    for settings in (EIGHT_BIT, replace(EIGHT_BIT, step_in_backward=True)):
        torch.manual_seed(0)
        layer = nn.Linear(100, 64)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        fitted = FittedOptimizer(settings, optimizer, layer)
        for _ in range(3):
            fitted.zero_grad()
            layer(torch.linspace(0, 1, 200).view(2, 100)).square().mean().backward()
            fitted.step()
        assert optimizer.state[layer.weight]["exp_avg"].dtype is torch.uint8
        results.append(layer.weight.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("settings", "make", "words"),
    [
        (IN_BACKWARD, torch.optim.LBFGS, "LBFGS computes the loss again"),
        (IN_HOST, torch.optim.LBFGS, "LBFGS computes the loss again"),
        (FUSED, torch.optim.RMSprop, "RMSprop has no fused kernel"),
        (EIGHT_BIT, torch.optim.RMSprop, "but RMSprop was given"),
        (Settings(), lambda held: "adam", "but str was given"),
    ],
)
def test_what_cannot_be_done_is_said(settings, make, words):
    model = make_model()
    with pytest.raises(BadOptimizer, match=words):
        FittedOptimizer(settings, make(model.parameters()), model)


def test_a_refusal_leaves_the_optimizer():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    with pytest.raises(BadOptimizer):
        FittedOptimizer(replace(EIGHT_BIT, kernels=OptimizerKernels.SINGLE), optimizer, model)
    assert optimizer.param_groups[0]["foreach"] is True


LAYERS, WIDTH = 10, 64
SIZE = LAYERS * WIDTH * WIDTH * 4
LAYER = SIZE // LAYERS


def traced(settings, device, kind=torch.optim.AdamW):
    if settings.state is OptimizerState.EIGHT_BIT:
        pytest.importorskip("bitsandbytes")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    return run(model, torch.empty(4, WIDTH), optimizer=kind(model.parameters()), settings=settings, device=device)


def state_at_end(trace):
    return total(trace.timeline.live_at(trace.timeline.num_ticks - 1), Category.OPTIMIZER_STATE)


@pytest.mark.parametrize("device", [AMPERE, HOST], ids=["cuda", "host"])
@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [
        (SINGLE, LAYER, 3 * LAYER + 16),
        (FUSED, 0, 16 * LAYERS),
        # Parts of a parameter: a gradient is there already, two moments, a denominator, new codes and scales.
        (EIGHT_BIT, 0, 4 * LAYER),
    ],
    ids=["single", "fused", "8-bit"],
)
def test_traced_temporaries(settings, least, most, device):
    trace = traced(settings, device)
    assert least <= peak_of_temporaries(trace, Phase.OPTIMIZER, 2) <= most


@pytest.mark.parametrize("device", [AMPERE, HOST], ids=["cuda", "host"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_traced_states(device, in_backward):
    plain = traced(replace(Settings(), step_in_backward=in_backward), device)
    small = traced(replace(EIGHT_BIT, step_in_backward=in_backward), device)
    assert state_at_end(plain) == pytest.approx(2 * SIZE, abs=8 * LAYERS)
    assert state_at_end(small) == 2 * (SIZE // 4) + 2 * (SIZE // 4 // 256) * 4


def test_a_traced_state_in_host_memory():
    trace = traced(IN_HOST, AMPERE)
    assert state_at_end(trace) == 0
    assert peak_of_temporaries(trace, Phase.OPTIMIZER, 2) == 0
    # A copy of the parameters, two moments, and counters.
    assert trace.host_bytes == pytest.approx(3 * SIZE, abs=8 * LAYERS)
    assert not trace.notes


def test_a_traced_state_in_host_memory_that_is_the_device():
    trace = traced(IN_HOST, HOST)
    assert state_at_end(trace) == pytest.approx(2 * SIZE, abs=8 * LAYERS)
    assert trace.host_bytes == 0


@pytest.mark.parametrize("device", [AMPERE, HOST], ids=["cuda", "host"])
def test_traced_gradients_in_backward_are_never_all_there(device):
    plain, fitted = traced(Settings(), device), traced(IN_BACKWARD, device)
    assert total(plain.timeline.live_at(plain.timeline.num_ticks - 1), Category.GRADIENT) == SIZE
    assert total(fitted.timeline.live_at(fitted.timeline.num_ticks - 1), Category.GRADIENT) == 0
    assert not [block for block in made_in(fitted, Phase.OPTIMIZER, 2) if block.size_bytes >= LAYER]
