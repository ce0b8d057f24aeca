import pytest
import torch

from memfit.core.errors import BadOptimizer
from memfit.frameworks.torch.apply.single_updates import OptionGroups, SingleUpdates, check_independent, plain_step


def parameters():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(3, 4, dtype=torch.float64)) for _ in range(3)]


def gradients(held, number):
    return [torch.sin(parameter.detach() * (number + 2)) for parameter in held]


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as some optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=group["lr"] / group["count"])


class CountingOnce(torch.optim.SGD):
    """Counts its steps in the object: one by one it would count every parameter."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=group["lr"] / self.count)


class Clipping(torch.optim.SGD):
    """Looks at all gradients together."""

    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for parameter in held:
            parameter.data.sub_(parameter.grad, alpha=float(0.1 / norm))


class Closing(torch.optim.SGD):
    """Computes the loss again in each step."""

    def step(self, closure):
        return closure()


@pytest.mark.parametrize(
    "make",
    [
        lambda held: torch.optim.Adam(held, lr=0.1),
        lambda held: torch.optim.AdamW([{"params": held[:1], "lr": 0.3}, {"params": held[1:], "weight_decay": 0.5}]),
        lambda held: torch.optim.SGD(held, lr=0.1, momentum=0.9, nesterov=True),
        lambda held: Counting(held, lr=0.1),
    ],
    ids=["Adam", "two groups", "SGD", "Counting"],
)
def test_one_by_one_is_the_same_as_together(make):
    # GIVEN two equal sets of parameters
    together, single = parameters(), parameters()
    plain, used = make(together), make(single)
    updates = SingleUpdates(used)

    # WHEN one is updated by the optimizer's step and the other one by one, in another order, with a change on the way
    for number in range(3):
        for parameter, gradient in zip(together, gradients(together, number), strict=True):
            parameter.grad = gradient
        for parameter, gradient in reversed(list(zip(single, gradients(single, number), strict=True))):
            parameter.grad = gradient
            updates.update(parameter)
            parameter.grad = None
        plain.step()
        for optimizer in (plain, used):
            optimizer.param_groups[-1]["lr"] *= 0.5
    updates.close()

    # THEN they are equal, and so are options and states, as if nothing had happened
    for expected, found in zip(together, single, strict=True):
        assert torch.equal(expected, found)
    assert [{**g, "params": 0} for g in plain.param_groups] == [{**g, "params": 0} for g in used.param_groups]
    assert plain.state_dict()["state"].keys() == used.state_dict()["state"].keys()


def test_a_stand_in_is_updated_with_the_state_of_the_parameter():
    (parameter, *_), (other, *_) = parameters(), parameters()
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    before = parameter.detach().clone()
    other.grad = torch.ones_like(other)
    SingleUpdates(optimizer).update(parameter, other)
    assert torch.equal(parameter, before)
    assert torch.allclose(other, before - 0.1)
    assert list(optimizer.state) == [parameter]
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.ones_like(parameter))


def test_options_go_before_those_of_the_group():
    (parameter, *_) = parameters()
    before = parameter.detach().clone()
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    SingleUpdates(optimizer).update(parameter, lr=0.5)
    assert torch.allclose(parameter, before - 0.5)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_failed_update_leaves_the_groups():
    (parameter, *_) = parameters()
    optimizer = torch.optim.SparseAdam([parameter])
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="dense gradients"):
        SingleUpdates(optimizer).update(parameter)
    assert optimizer.param_groups[0]["params"] == [parameter]


def test_hooks_of_the_optimizer_are_not_run():
    (parameter, *_) = parameters()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    plain_step(optimizer)(optimizer)
    assert not calls
    optimizer.step()
    assert calls


def test_groups_follow_a_loaded_checkpoint_and_refuse_strangers():
    held = parameters()
    optimizer = torch.optim.SGD(held[:2], lr=0.1)
    groups = OptionGroups(optimizer)
    assert groups.of(held[0]) is optimizer.param_groups[0]
    optimizer.load_state_dict(optimizer.state_dict())
    assert groups.of(held[0]) is optimizer.param_groups[0]
    with pytest.raises(BadOptimizer, match=r"shape \(3, 4\) is in none"):
        groups.of(held[2])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda held: torch.optim.LBFGS(held), "LBFGS computes the loss again"),
        (lambda held: Closing(held, lr=0.1), "Closing computes the loss again"),
        (lambda held: Clipping(held, lr=0.1), "Clipping gives different results"),
        (lambda held: CountingOnce(held, lr=0.1), "CountingOnce gives different results"),
    ],
)
def test_optimizers_that_need_all_gradients_are_refused(make, words):
    held = parameters()
    before = [parameter.detach().clone() for parameter in held]
    with pytest.raises(BadOptimizer, match=f"the move .*{words}"):
        check_independent(make(held), "the move")
    assert all(torch.equal(a, b) for a, b in zip(before, held, strict=True))


def test_an_optimizer_that_cannot_be_tried_is_refused():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise NotImplementedError("not today")

    with pytest.raises(BadOptimizer, match=r"could not be tried out .*not today"):
        check_independent(Failing(parameters(), lr=0.1), "the move")


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.Adafactor, lambda held: Counting(held, lr=0.1)])
def test_others_are_accepted(make):
    check_independent(make(parameters()), "the move")
