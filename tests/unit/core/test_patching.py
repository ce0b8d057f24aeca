import types

import pytest

from memfit.core.patching import Replacement, around, put_in_front, put_in_front_once, replaced


class Base:
    def name(self):
        return "base"

    @staticmethod
    def double(number):
        return 2 * number


class Child(Base):
    pass


def test_stand_ins_are_there_while_it_lasts():
    module = types.ModuleType("module")
    module.answer = 1

    with replaced([Replacement(module, "answer", 2), Replacement(module, "question", "?")]):
        assert (module.answer, module.question) == (2, "?")

    assert module.answer == 1
    assert not hasattr(module, "question")


def test_an_inherited_attribute_is_inherited_again():
    with replaced([Replacement(Child, "name", lambda self: "child")]):
        assert Child().name() == "child"

    assert "name" not in vars(Child)
    assert Child().name() == "base"


def test_descriptors_come_back_as_they_were():
    before = vars(Base)["double"]

    with replaced([Replacement(Base, "double", lambda number: 0)]):
        pass

    assert vars(Base)["double"] is before
    assert isinstance(before, staticmethod)


def test_the_same_attribute_twice_is_undone_in_reverse():
    module = types.ModuleType("module")
    module.answer = 1

    with replaced([Replacement(module, "answer", 2), Replacement(module, "answer", 3)]):
        assert module.answer == 3

    assert module.answer == 1


def test_all_is_put_back_when_the_body_raises():
    module = types.ModuleType("module")
    module.answer = 1

    with pytest.raises(ZeroDivisionError), replaced([Replacement(module, "answer", 2)]):
        raise ZeroDivisionError

    assert module.answer == 1


def test_what_was_replaced_is_put_back_when_something_cannot_be():
    # GIVEN that attributes of classes in C can't be set
    module = types.ModuleType("module")
    module.answer = 1

    with (
        pytest.raises(TypeError, match="immutable type"),
        replaced([Replacement(module, "answer", 2), Replacement(int, "real", None)]),
    ):
        pass

    assert module.answer == 1


def test_a_stand_in_around_a_function_is_given_that_function_first():
    def changed(plain, child, *given):
        return f"{plain(child, *given)} of {child.surname}"

    child = Child()
    child.surname = "Smith"
    with replaced([around(Child, "name", changed)]):
        assert child.name() == "base of Smith"

    assert child.name() == "base"


def test_what_is_put_in_front_once_stays_and_the_first_wins():
    class Owner:
        def name(self):
            return "own"

    put_in_front_once(Owner, "name", lambda plain, owner: f"first {plain(owner)}")
    put_in_front_once(Owner, "name", lambda plain, owner: f"second {plain(owner)}")
    assert Owner().name() == "first own"

    put_in_front(Owner, "name", lambda plain, owner: f"third {plain(owner)}")
    assert Owner().name() == "third first own"
