"""What a piece of work leaves behind, and who holds it."""

import gc
import sys
import types
import weakref

import pytest
import torch
from torch import nn

from memfit.frameworks.torch.guard.release_model import find_holder, seed, watch

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


@pytest.mark.usefixtures("every_object_in_sight")
def test_a_model_that_is_kept_is_named_with_its_holder():
    leftovers = watch()

    trained(lambda model, *_: KEPT.append(model))

    said = leftovers()
    assert said.startswith(
        "its model Sequential is still in memory (146.0 KiB of parameters): the variable KEPT[0] of "
    )
    assert "trial.keep(model)" in said


@pytest.mark.usefixtures("every_object_in_sight")
def test_a_loss_with_its_graph_is_named():
    leftovers = watch()

    model = trained(lambda _, loss, __: KEPT.append(loss))

    assert model() is None
    said = leftovers()
    assert "a tensor of shape () with the graph that made it is still in memory" in said
    assert "the variable KEPT[0] of " in said
    assert "tensor.item()" in said


@pytest.mark.usefixtures("every_object_in_sight")
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


# Who holds an object: the path that a person would look for.


class Held:
    """Something that can be held."""


class Owner:
    """Something that holds."""


@pytest.fixture
def module():
    made = types.ModuleType("made_for_this_test")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def leave(change):
    """Lets `change` store a new object, of which no variable of this test knows."""
    held = Held()
    change(held)
    return id(held)


def holder_of(number):
    import gc

    (found,) = [value for value in gc.get_objects() if id(value) == number and isinstance(value, Held)]
    kept = [found]
    del found
    # The list is the only holder of its own.
    return find_holder(kept[0], [kept])


def test_a_variable_of_a_module(module):
    number = leave(lambda held: setattr(module, "model", held))

    assert holder_of(number) == "the variable model of module made_for_this_test"


def test_places_in_containers_are_shown(module):
    module.kept = {"best": [None]}
    number = leave(lambda held: module.kept["best"].append(held))

    assert holder_of(number) == "the variable kept['best'][1] of module made_for_this_test"


def test_attributes_are_shown(module):
    module.owner = Owner()
    number = leave(lambda held: setattr(module.owner, "model", held))

    assert holder_of(number) == "the variable owner.model of module made_for_this_test"


def test_a_local_variable_of_a_running_function():
    def outer():
        mine = [Held()]
        return holder_of(id(mine[0]))

    assert "the variable mine[0] of outer (test_release_model.py:" in outer()


def test_a_function_that_uses_it_from_outside(module):
    def make():
        held = Held()
        module.function = lambda: held
        return id(held)

    number = make()

    expected = "the variable held that the function test_a_function_that_uses_it_from_outside.<locals>.make.<locals>"
    assert holder_of(number).startswith(expected)


def test_asking_leaves_no_reference_behind():
    mine = Held()
    gone = weakref.ref(mine)
    find_holder(mine)
    mine = None

    assert gone() is None


def test_nothing_holds_it():
    def ask(kept):
        return find_holder(kept.pop())

    assert ask([Held()]) is None
