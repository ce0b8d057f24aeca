import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from memfit.frameworks.torch import internals, oom
from memfit.frameworks.torch.guard.fully_sharded import FullySharded
from memfit.frameworks.torch.guard.ranks import ranks_of
from tests.unit.frameworks.torch.guard.faults import faults

pytestmark = pytest.mark.usefixtures("one_process")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.outer = nn.Linear(8, 4)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(x)))


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), Block(), nn.Linear(4, 2))
    fully_shard(model[1])
    return fully_shard(model)


def one_pass(model, samples=3):
    torch.manual_seed(1)
    model(torch.randn(samples, 3)).square().sum().backward()


def failing_pass(model, index):
    with faults({index}):
        one_pass(model)


def gradients(model):
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


def num_operators(model):
    with faults(()) as counted:
        one_pass(model)
    model.zero_grad(set_to_none=True)
    return counted.counts[""]


def test_a_sharded_model_is_recognised():
    ranks = ranks_of(make())

    assert isinstance(ranks, FullySharded)
    assert (ranks.num_ranks, ranks.is_first, ranks.communicates) == (1, True, True)


def test_wherever_a_pass_fails_the_next_one_is_as_if_nothing_had_been(monkeypatch):
    # GIVEN the gradients of a pass, and how many operators it has
    monkeypatch.setattr(oom, "release", lambda: None)  # collecting garbage a hundred times takes long
    model = make()
    ranks = FullySharded(model)
    one_pass(model)
    expected = gradients(model)
    model.zero_grad(set_to_none=True)
    for index in range(num_operators(model)):
        # WHEN an operator of a pass fails, in the forward or in the backward pass
        with pytest.raises(RuntimeError, match="can't allocate"):
            ranks.run(1, lambda _, index=index: failing_pass(model, index), lambda: one_pass(model, samples=1))
        model.zero_grad(set_to_none=True)

        # THEN another pass has the right gradients, and whole parameters take no memory
        assert all(parameter.grad is None for parameter in model.parameters())
        one_pass(model)
        assert all(map(torch.equal, gradients(model), expected)), index
        model.zero_grad(set_to_none=True)


def test_what_a_failed_backward_pass_left_would_be_added_without_a_reset():
    # GIVEN passes that fail, some after the gradient of a whole parameter is there
    model = make()
    one_pass(model)
    expected = gradients(model)
    model.zero_grad(set_to_none=True)
    wrong = []
    for index in range(num_operators(model)):
        with pytest.raises(RuntimeError, match="can't allocate"):
            failing_pass(model, index)

        # WHEN only PyTorch's own recovery is used
        model.reset_iter_state()
        model.zero_grad(set_to_none=True)
        one_pass(model)
        if not all(map(torch.equal, gradients(model), expected)):
            wrong.append(index)
        FullySharded(model).reset()
        model.zero_grad(set_to_none=True)

    # THEN gradients are wrong after some, which `reset` exists for
    assert wrong


def test_a_reset_frees_whole_parameters():
    model = make()
    ranks = FullySharded(model)
    with pytest.raises(RuntimeError, match="can't allocate"), faults({num_operators(model) // 2}):
        one_pass(model)

    ranks.reset()

    for group in internals.fsdp_groups(ranks._states):
        assert group.is_sharded
        assert all(t.untyped_storage().size() == 0 for p in group.fsdp_params for t in p.all_gather_outputs)


def test_an_evaluation_leaves_nothing_that_changes_what_a_pass_gathers():
    model = make()
    ranks = FullySharded(model)
    with torch.no_grad():
        model(torch.randn(2, 3))
    group = next(internals.fsdp_groups(ranks._states))
    assert group.comm_ctx.post_forward_order
    assert not group.is_sharded

    ranks.ready()

    assert not group.comm_ctx.post_forward_order
    assert group.is_sharded


def test_a_reset_before_the_first_pass_does_nothing():
    model = make()

    FullySharded(model).reset()

    one_pass(model)


def test_the_division_by_the_number_of_processes_is_taken_back(monkeypatch):
    model = make()
    ranks = FullySharded(model)
    one_pass(model)
    expected = [4 * gradient for gradient in gradients(model)]
    for group in internals.fsdp_groups(ranks._states):
        group.gradient_divide_factor = 4.0

    ranks.reduce_gradients()

    assert all(map(torch.equal, gradients(model), expected))


@pytest.mark.parametrize("norm", [0.1, 1e6])
def test_gradients_are_clipped_as_pytorch_clips_them(norm):
    model, plain = make(), make()
    for one in (model, plain):
        one_pass(one)
    torch.nn.utils.clip_grad_norm_(plain.parameters(), norm)

    FullySharded(model).clip_norm(list(model.parameters()), norm)

    for left, right in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=0)


def test_a_model_that_is_split_in_another_way_is_refused():
    model = make()
    ranks = FullySharded(model)
    next(internals.fsdp_groups(ranks._states)).fsdp_params[0].is_dtensor = True

    with pytest.raises(ValueError, match="tensor parallelism"):
        FullySharded(model)
