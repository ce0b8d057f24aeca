"""What the guards of trainers share."""

import pytest
import torch

from memfit.frameworks.torch.guard.library_steps import LibraryLoop, copied, unwrapped, weighed


class Owner:
    def method(self):
        return "own"


@pytest.mark.parametrize("is_set_before", [False, True])
def test_an_attribute_is_replaced_for_a_while(is_set_before):
    owner = Owner()
    if is_set_before:
        owner.method = lambda: "set"
    before, own = owner.method(), dict(vars(owner))

    loop = LibraryLoop(None, None)
    loop.replace(owner, "method", lambda: "other")
    assert owner.method() == "other"
    loop.close()

    assert owner.method() == before
    assert vars(owner) == own


def test_a_copy_has_containers_of_its_own_and_the_same_tensors():
    batch = {"a": torch.ones(2), "b": [torch.zeros(2)]}

    other = copied(batch)
    other.pop("a")
    other["b"].clear()

    assert set(batch) == {"a", "b"}
    assert copied(batch)["b"][0] is batch["b"][0]


def test_a_part_that_counts_for_nothing_has_gradients_of_zero():
    value = torch.tensor(float("nan"), requires_grad=True)

    weighed(value, 0.0).backward()

    assert value.grad == 0


def test_a_loss_is_weighed():
    value = torch.tensor(3.0)

    assert weighed(value, 1.0) is value
    assert weighed(value, 0.5) == 1.5


# Optimizers that accelerate has prepared.


def prepared(optimizer, scaler=None):
    made = type("AcceleratedOptimizer", (), {"__module__": "accelerate.optimizer"})()
    made.optimizer, made.scaler = optimizer, scaler
    return made


def test_a_plain_optimizer_stays_as_it_is():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])

    assert unwrapped(optimizer, None) == (optimizer, None)


def test_a_prepared_optimizer_is_taken_out_of_all_its_wrappers():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])

    assert unwrapped(prepared(prepared(optimizer)), None) == (optimizer, None)


def test_the_scaler_of_the_accelerator_is_found_and_a_given_one_comes_first():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])

    assert unwrapped(prepared(optimizer, "its own"), None) == (optimizer, "its own")
    assert unwrapped(prepared(optimizer, "its own"), "given") == (optimizer, "given")


def test_wrappers_of_others_are_left_alone():
    class Wrapper:
        optimizer = "inner"

    wrapper = Wrapper()

    assert unwrapped(wrapper, None) == (wrapper, None)
