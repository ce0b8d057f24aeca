"""Who holds an object: the path that a person would look for."""

import sys
import types
import weakref

import pytest

from memfit.frameworks.torch.guard.holders import find_holder


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

    assert "the variable mine[0] of outer (test_holders.py:" in outer()


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
