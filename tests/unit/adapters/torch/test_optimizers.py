"""The stand-in takes the steps; the user's optimizer never moves."""

import copy
import threading

import pytest
import torch

import memfit
from memfit.adapters.torch.optimizers import optimizer_for
from memfit.adapters.torch.stand_in import ShapeCopies, swapped
from memfit.core.errors import BadOptimizer


def loss(model, batch):
    return model(batch).pow(2).mean()


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


class Lookahead(torch.optim.Optimizer):
    """A wrapper as they are usually written: shares groups and state with the optimizer it wraps."""

    def __init__(self, base):
        self.base = base
        self.defaults = base.defaults
        self.param_groups = base.param_groups
        self.state = base.state
        self.history = []

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    def step(self, closure=None):
        self.history.append(1)
        return self.base.step(closure)


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p),
    "wrapper": lambda p: Lookahead(torch.optim.Adam(p)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_users_optimizer_and_weights_do_not_move(name):
    # GIVEN an optimizer over a model with gradients, as in the middle of a training loop
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    loss(model, torch.randn(2, 8)).backward()
    weights = copy.deepcopy(model.state_dict())
    gradients = [p.grad.clone() for p in model.parameters()]

    # WHEN the step is estimated
    memfit.estimate(model, loss, torch.randn(4, 8), optimizer=optimizer, device="t4")

    # THEN nothing of it has happened
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert len(optimizer.state) == 0
    assert getattr(optimizer, "history", []) == []


def test_the_state_of_a_wrapped_optimizer_is_counted():
    model = make_model()
    plain = memfit.estimate(model, loss, torch.randn(4, 8), optimizer=torch.optim.Adam, device="t4")
    wrapper = Lookahead(torch.optim.Adam(model.parameters()))
    wrapped = memfit.estimate(model, loss, torch.randn(4, 8), optimizer=wrapper, device="t4")

    assert wrapped.breakdown.by_category["optimizer state"] == plain.breakdown.by_category["optimizer state"]


def test_existing_state_survives_and_is_not_copied():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    loss(model, torch.randn(2, 8)).backward()
    optimizer.step()
    before = {id(p): state["exp_avg"].clone() for p, state in optimizer.state.items()}

    memfit.estimate(model, loss, torch.randn(4, 8), optimizer=optimizer, device="t4")

    assert {id(p) for p in optimizer.state} == set(before)
    assert all(torch.equal(state["exp_avg"], before[id(p)]) for p, state in optimizer.state.items())


def test_hooks_and_schedulers_are_not_called():
    # GIVEN a step hook and a scheduler, which replaces `step` on the instance
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    weights = copy.deepcopy(model.state_dict())

    memfit.estimate(model, loss, torch.randn(4, 8), optimizer=optimizer, device="t4")

    assert calls == []
    assert scheduler.last_epoch == 0
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def test_an_optimizer_that_cannot_be_copied_says_so():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.lock = threading.Lock()

    with pytest.raises(BadOptimizer, match=r"can't be copied.*Give a function that takes parameters"):
        memfit.estimate(model, loss, torch.randn(4, 8), optimizer=optimizer, device="t4")


def test_an_optimizer_of_another_model_is_refused():
    optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1)

    with pytest.raises(BadOptimizer, match="4 of the optimizer's 4 parameters are not the model's"):
        memfit.estimate(make_model(), loss, torch.randn(4, 8), optimizer=optimizer, device="t4")


@pytest.mark.parametrize("bad, text", [(3, "int was given"), (lambda p: 3, "returned int")])
def test_something_else_is_refused(bad, text):
    with pytest.raises(BadOptimizer, match=text):
        memfit.estimate(make_model(), loss, torch.randn(4, 8), optimizer=bad, device="t4")


def optimizer_of(model, optimizer):
    copies = ShapeCopies()
    parameters = list(model.parameters())
    with swapped(model, copies):
        return optimizer_for(optimizer, model, copies, parameters), list(model.parameters())


def test_an_instance_is_cloned_with_its_groups_and_without_its_state():
    # GIVEN an optimizer with two groups that has already stepped
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "weight_decay": 0.5}]
    optimizer = torch.optim.Adam(groups, lr=0.2)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    # WHEN it is made for the shapes
    clone, shapes = optimizer_of(model, optimizer)

    # THEN groups and options are the same, the parameters are shapes, and the state is fresh
    assert type(clone) is torch.optim.Adam
    assert [(g["lr"], g["weight_decay"]) for g in clone.param_groups] == [(0.1, 0), (0.2, 0.5)]
    assert [id(p) for g in clone.param_groups for p in g["params"]] == [id(p) for p in shapes]
    assert not clone.state
    assert len(optimizer.state) == 4
    assert not any(p.is_meta for g in optimizer.param_groups for p in g["params"])


def test_a_function_gets_the_parameters_that_learn():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)

    made, shapes = optimizer_of(model, torch.optim.AdamW)

    assert [id(p) for p in made.param_groups[0]["params"]] == [id(p) for p in shapes[2:]]


def test_no_optimizer_is_none():
    assert optimizer_of(torch.nn.Linear(2, 2), None)[0] is None


def test_an_optimizer_may_be_given_by_name():
    by_name = memfit.estimate(make_model(), loss, torch.randn(4, 8), optimizer="adamw", device="t4")
    by_class = memfit.estimate(make_model(), loss, torch.randn(4, 8), optimizer=torch.optim.AdamW, device="t4")

    assert by_name.timeline == by_class.timeline
    with pytest.raises(memfit.BadInput, match="optimizer must be one of none, sgd"):
        memfit.estimate(make_model(), loss, torch.randn(4, 8), optimizer="adamm", device="t4")
