"""What a piece of work leaves behind, and who holds it."""

import gc
import weakref

import pytest
import torch
from torch import nn

from memfit.frameworks.torch.guard.release_model import seed, watch

KEPT = []


@pytest.fixture(autouse=True)
def nothing_kept():
    yield
    KEPT.clear()


def trained(keep=lambda model, loss, optimizer: None):
    model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 8))
    optimizer = torch.optim.Adam(model.parameters())
    loss = model(torch.ones(4, 64)).sum()
    loss.backward()
    optimizer.step()
    keep(model, loss, optimizer)
    return weakref.ref(model)


def test_nothing_is_left_of_a_training_that_keeps_nothing():
    leftovers = watch()

    model = trained()

    assert leftovers() == ""
    assert model() is None


def test_cycles_are_freed():
    leftovers = watch()
    gc.disable()
    try:
        model = trained(lambda model, *_: setattr(model, "itself", [model]))
        assert model() is not None
        assert leftovers() == ""
        assert model() is None
    finally:
        gc.enable()


def test_a_model_that_is_kept_is_named_with_its_holder():
    leftovers = watch()

    trained(lambda model, *_: KEPT.append(model))

    said = leftovers()
    assert said.startswith(
        "its model Sequential is still in memory (146.0 KiB of parameters): the variable KEPT[0] of "
    )
    assert "trial.keep(model)" in said


def test_a_loss_with_its_graph_is_named():
    leftovers = watch()

    model = trained(lambda _, loss, __: KEPT.append(loss))

    assert model() is None
    said = leftovers()
    assert "a tensor of shape () with the graph that made it is still in memory" in said
    assert "the variable KEPT[0] of " in said
    assert "tensor.item()" in said


def test_an_optimizer_is_named():
    leftovers = watch()

    trained(lambda _, __, optimizer: KEPT.append(optimizer))

    said = leftovers()
    assert "a parameter of shape (512, 64) is still in memory" in said
    assert "KEPT[0]." in said


def test_what_was_there_before_does_not_count():
    trained(lambda model, *_: KEPT.append(model))

    assert watch()() == ""


def test_data_and_small_things_do_not_count():
    leftovers = watch()

    KEPT.extend([torch.ones(512, 512), nn.Linear(2, 2)])

    assert leftovers() == ""


def test_generators_are_seeded():
    seed(3)
    first = torch.rand(3)
    seed(3)
    assert torch.equal(first, torch.rand(3))
