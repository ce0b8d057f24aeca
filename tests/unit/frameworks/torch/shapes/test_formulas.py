import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.core.timeline import Phase
from tests.unit.frameworks.torch.builders import made_in, run

SHAPE = (8, 1000)
SIZE = 8 * 1000 * 4


class Times(nn.Module):
    """Something that makes the batch need a gradient."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.factor


def gradients_of_full_size(work):
    """Operators of the backward pass that make a tensor of the input's size, without the last: the product's own."""
    traced = run(Times(), torch.empty(SHAPE), loss=lambda model, x: work(model(x)).sum())
    made = [b.op.removeprefix("aten.") for b in made_in(traced, Phase.BACKWARD) if b.size_bytes == SIZE]
    assert made.pop() == "mul"
    return made


def ids(x, *shape):
    return torch.zeros(shape, dtype=torch.int64, device=x.device)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.max(1)[0],
        lambda x: x.median(1)[0],
        lambda x: x.kthvalue(3, 1)[0],
        lambda x: x.topk(5, 1)[0],
        lambda x: x.sort(1)[0],
        lambda x: x.gather(1, ids(x, 8, 3)),
        lambda x: x.index_select(0, ids(x, 3)),
        lambda x: x[ids(x, 3)],
        lambda x: x[:, ids(x, 3)],
        lambda x: x.masked_select(x > 0),
        lambda x: x.take(ids(x, 3)),
        lambda x: x.cummax(1)[0],
    ],
)
def test_what_is_written_into_zeros_is_not_copied(work):
    made = gradients_of_full_size(work)

    assert len(made) == 1
    assert "zeros" in made[0]


def test_losses_of_logits_go_on_in_the_tensor_they_made():
    made = gradients_of_full_size(lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros(SHAPE, device=x.device)))

    assert made == ["sigmoid"]


def test_gradients_that_come_in_are_copied():
    # GIVEN formulas that fill what they are given, the second with a gradient that another made of zeros
    assert gradients_of_full_size(lambda x: x.masked_fill(x > 0, 0.0)) == ["masked_fill"]
    assert gradients_of_full_size(lambda x: x.masked_fill(x > 0, 0.0)[ids(x, 3)]) == ["new_zeros", "masked_fill"]


def test_a_users_own_formula_copies_where_it_says_so():
    class First(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x[:, 0].clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.new_zeros(SHAPE).index_fill(1, ids(gradient, 1), 1.0)

    assert gradients_of_full_size(First.apply) == ["new_zeros", "index_fill"]


def test_formulas_that_never_run_in_place_are_left():
    made = gradients_of_full_size(
        lambda x: x.scatter_reduce(1, ids(x, 8, 3), torch.ones(8, 3, device=x.device), "mean", include_self=False)
    )

    assert made[:2] == ["zeros_like", "scatter_add"]
