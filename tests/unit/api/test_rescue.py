import pytest
import torch

import memfit


def test_a_loop_inside_a_rescue_trains_the_same(tmp_path):
    # GIVEN a step
    def step():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        model(torch.rand(32, 64)).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    plain = step()

    # WHEN everything that it saves moves to files
    with memfit.rescue(eager=True, folder=str(tmp_path)):
        rescued = step()

    # THEN the gradients are the same bits
    assert all(torch.equal(one, other) for one, other in zip(plain, rescued, strict=True))


def test_a_limit_that_is_none_is_refused():
    with pytest.raises(memfit.BadInput, match="24 bananas"):
        memfit.rescue(limit="24 bananas")
