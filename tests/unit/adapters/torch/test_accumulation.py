import torch
from torch import nn

from memfit.adapters.torch.accumulation import Accumulation
from memfit.core.timeline import Category, Phase
from tests.unit.adapters.torch.builders import made_in, run, sizes, total

WIDTH = 10
DATA = torch.empty(4, WIDTH)
ACTIVATION = 4 * WIDTH * 4


def sums(traced):
    """Sizes of the new tensors that sums of gradients made."""
    return sizes(made_in(traced, Phase.BACKWARD), "aten.add")


class Branches(nn.Module):
    """The output of one layer, used `count` times by functions whose gradients are new tensors."""

    def __init__(self, count):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.functions = (torch.sin, torch.cos, torch.tanh, torch.exp)[:count]

    def forward(self, data):
        middle = self.layer(data)
        return torch.cat([function(middle) for function in self.functions])


def test_where_gradients_meet_the_engine_adds_in_place():
    for count in (2, 3, 4):
        assert sums(run(Branches(count), DATA, loss=lambda m, b: m(b).sum())) == []


def test_a_gradient_held_elsewhere_is_not_overwritten():
    # GIVEN a sum whose gradient goes to both of its terms as one tensor, and a further use of each term
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, data):
            left = self.layer(data)
            right = left.sin()
            total = left + right
            return total * total.detach()

    # WHEN the engine adds the gradient of the sine to that of the sum
    traced = run(Residual(), DATA, loss=lambda m, b: m(b).sum())

    # THEN at most one new tensor is needed
    assert sums(traced) in ([], [ACTIVATION])


def test_a_parameter_used_twice_has_one_gradient():
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    model = nn.Sequential(layer, nn.ReLU(), layer)

    traced = run(model, DATA, loss=lambda m, b: m(b).sum())

    # A layer's gradient is a transposed view, which the engine never adds into: both contributions live until their sum
    # is made, as they do in a real run.
    size = WIDTH * WIDTH * 4
    gradients = [b for b in made_in(traced, Phase.BACKWARD) if b.size_bytes == size]
    assert total(gradients, Category.GRADIENT) == size
    assert total(gradients, Category.TEMPORARY) == 2 * size


def test_other_sums_are_not_taken_for_the_engines():
    accumulation = Accumulation()
    left, right = torch.empty(3, device="meta"), torch.empty(3, device="meta")

    assert not accumulation.in_place((left, right), {})


def test_a_sum_in_a_users_backward_function_makes_a_new_tensor():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, data):
            return data * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient + gradient

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, data):
            return Doubled.apply(self.layer(data))

    traced = run(Model(), DATA, loss=lambda m, b: m(b).sin().sum())

    assert sums(traced) == [ACTIVATION]
