import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from memfit.core.settings import Weighting
from memfit.frameworks.torch.trace.loss_hypotheses import Loss
from memfit.frameworks.torch.trace.loss_probe import find_weighting
from memfit.frameworks.torch.trace.loss_slopes import directions, slope
from tests.unit.frameworks.torch.trace.test_loss_probe import CLASSES, WIDTH, classes, classify, features, linear


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_loss_whose_gradient_does_not_add_up_is_not_split(share):
    def loss(model, batch):
        value = classify(model, batch)
        return value / value.detach() + share * value

    found = find_weighting(linear(), loss, (features(), classes()))

    assert found.weighting is None
    assert "loss.detach()" in found.reason


def test_constants_of_each_sample_are_no_reason_against_splitting():
    def focal(model, batch):
        each = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return ((1 - (-each).exp().detach()) ** 2 * each).mean()

    for model in (linear(), linear().to(torch.bfloat16)):
        batch = (features().to(model.weight.dtype), classes())
        assert find_weighting(model, focal, batch).weighting == Weighting("samples")


def test_hooks_and_gradients_of_parameters_are_left_alone_by_a_look_at_slopes():
    model, calls = linear(), []
    model.bias.register_hook(lambda gradient: calls.append(gradient))
    model.weight.grad = torch.ones_like(model.weight)

    assert find_weighting(model, classify, (features(), classes())).weighting == Weighting("samples")

    assert calls == []
    assert model.weight.grad.eq(1).all()
    assert model.bias.grad is None


def test_a_gradient_of_which_a_norm_leaves_nothing_tells_nothing():
    model = nn.Sequential(nn.Linear(WIDTH, CLASSES), nn.BatchNorm1d(CLASSES))

    found = find_weighting(model, lambda model, batch: model(batch).pow(2).mean(), features())

    assert found.weighting == Weighting("samples")


def test_slopes_are_those_of_the_gradient():
    model = linear()
    (bias, _), (weight, along) = directions([model])
    batch = features(), classes()
    loss = classify(model, batch)
    read = Loss.read(loss, torch.float32)

    found = slope(loss, read, [(weight, along)])

    classify(model, batch).backward()
    assert bias is model.bias
    assert math.isclose(found.value, float((weight.grad * along).sum()), rel_tol=1e-5)
    assert 0 < found.floor < 0.01 * float((weight.grad * along).norm()) + 1e-3
