import types

import pytest
import torch

from memfit.frameworks.torch.shapes.patching import Replacement, replaced


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
        replaced([Replacement(module, "answer", 2), Replacement(torch._C.Generator, "seed", None)]),
    ):
        pass

    assert module.answer == 1
