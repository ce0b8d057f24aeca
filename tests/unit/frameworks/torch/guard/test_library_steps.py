"""What the guards of trainers share."""

from contextlib import ExitStack

import pytest
import torch

from memfit.frameworks.torch.guard.library_steps import copied, replace_attribute, weighed


class Owner:
    def method(self):
        return "own"


@pytest.mark.parametrize("is_set_before", [False, True])
def test_an_attribute_is_replaced_for_a_while(is_set_before):
    owner = Owner()
    if is_set_before:
        owner.method = lambda: "set"
    before, own = owner.method(), dict(vars(owner))

    with ExitStack() as undo:
        replace_attribute(undo, owner, "method", lambda: "other")
        assert owner.method() == "other"

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
