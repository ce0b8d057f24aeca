import functools
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

from memfit.frameworks.torch.trace import real_runs as untouched_module
from memfit.frameworks.torch.trace.real_runs import restoring

TEACHER = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


class Counting(nn.Module):
    """Changes attributes, a plain tensor, a buffer and a parameter as it runs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.table = nn.Embedding(5, 3, max_norm=0.1)
        self.register_buffer("mean", torch.zeros(3))
        self.calls = 0
        self.history = []
        self.plain = torch.zeros(2)

    def forward(self, values):
        self.calls += 1
        self.history.append(values)
        self.plain += 1
        self.mean.add_(values.mean(0).detach())
        return self.linear(values) + self.table(torch.arange(len(values)))


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def unchanged(model, before):
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_model_is_put_back():
    # GIVEN a model with gradients
    model = Counting()
    before = snapshot(model)
    gradient = torch.ones(3, 3)
    model.linear.weight.grad = gradient
    parameters = list(model.parameters())

    # WHEN it runs forward and backward, and is changed
    with restoring(model):
        assert model.linear.weight.grad is None
        model(torch.randn(5, 3)).sum().backward()
        assert model.linear.weight.grad is not None
        model.eval()
        model.extra = 1

    # THEN it is as it was
    assert unchanged(model, before)
    assert (model.calls, model.history, model.training) == (0, [], True)
    assert torch.equal(model.plain, torch.zeros(2))
    assert not hasattr(model, "extra")
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    assert model.linear.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(3, 3))
    assert model.table.weight.grad is None


def test_a_model_that_is_too_large_to_copy_lends_its_memory(monkeypatch):
    monkeypatch.setattr(untouched_module, "_COPIED_BYTES", 0)
    model = Counting()
    before, original = snapshot(model), model.linear.weight.data_ptr()

    with restoring(model):
        assert model.linear.weight.data_ptr() == original
        # Its forward pass changes this one in place.
        assert model.table.weight.data_ptr() != dict(before)["table.weight"].data_ptr()
        model(torch.randn(5, 3)).sum().backward()

    assert unchanged(model, before)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("copied_bytes", [0, 2**20])
def test_an_optimizer_that_steps_in_backward_is_not_set_off(monkeypatch, copied_bytes):
    monkeypatch.setattr(untouched_module, "_COPIED_BYTES", copied_bytes)
    model = nn.Linear(3, 3)
    before = snapshot(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())

    with restoring(model):
        model(torch.ones(2, 3)).sum().backward()

    assert unchanged(model, before)
    # Without protection it is.
    model(torch.ones(2, 3)).sum().backward()
    assert not unchanged(model, before)


def test_ties_are_kept():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight

    with restoring(model):
        assert model[1].weight is model[0].weight

    assert model[1].weight is model[0].weight


def test_a_module_inside_of_another_that_the_loss_holds_too_is_copied_once():
    inner = nn.Linear(3, 3)
    model = nn.Sequential(inner, nn.Linear(3, 3))
    model[1].weight = inner.weight

    with restoring(model, lambda model, batch: inner(batch)):
        assert model[1].weight is inner.weight

    assert model[1].weight is inner.weight


class Criterion:
    def __init__(self):
        self.centres = torch.zeros(3)
        self.seen = 0
        self.network = nn.BatchNorm1d(3)

    def method(self, model, batch):
        self.seen += 1
        with torch.no_grad():
            self.centres += batch.mean(0)
        return self.network(model(batch)).sum() + self.centres.sum()

    __call__ = method


@pytest.mark.parametrize("wrap", [lambda c: c, lambda c: c.method, lambda c: functools.partial(c.method)])
def test_what_an_object_behind_the_loss_holds_is_put_back(wrap):
    criterion, model = Criterion(), nn.Linear(3, 3)
    before = snapshot(criterion.network)
    loss = wrap(criterion)

    with restoring(model, loss):
        loss(model, torch.ones(4, 3)).backward()
        assert criterion.seen == 1

    assert criterion.seen == 0
    assert torch.equal(criterion.centres, torch.zeros(3))
    assert unchanged(criterion.network, before)


def test_what_a_function_names_is_put_back():
    history, model = [], nn.Linear(3, 4)
    before = snapshot(TEACHER)

    def loss(model, batch):
        value = functional.mse_loss(model(batch), TEACHER(batch))
        history.append(value.item())
        return value

    with restoring(model, loss):
        loss(model, torch.randn(4, 3)).backward()
        assert len(history) == 1

    assert history == []
    assert unchanged(TEACHER, before)
    assert all(parameter.grad is None for parameter in TEACHER.parameters())


def test_random_states_are_put_back():
    model = nn.Linear(1, 1)
    before, python_before = torch.get_rng_state(), random.getstate()

    with restoring(model):
        torch.randn(3)
        random.random()

    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python_before


def test_it_is_put_back_after_an_error():
    model = Counting()
    before = snapshot(model)

    with pytest.raises(ValueError, match="stop"), restoring(model):
        model(torch.randn(5, 3))
        raise ValueError("stop")

    assert unchanged(model, before)
    assert model.calls == 0


def test_recurrent_layers_run_on_their_copies():
    model = nn.LSTM(3, 4)
    before = snapshot(model)

    with restoring(model):
        model(torch.randn(2, 1, 3))[0].sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    assert unchanged(model, before)
    assert all(flat is own for flat, own in zip(model._flat_weights, model.parameters(), strict=True))
