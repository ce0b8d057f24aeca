import types

import pytest

from memfit.core.patching import Replacement, around, replace_method, replaced


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


class Fitted:
    def fit(self, x, scale=1):
        """Fits."""
        return x * scale


class FittedAgain(Fitted):
    pass


def test_the_first_replacement_of_a_method_counts_and_reaches_all_that_inherit_it():
    calls = []

    def instead(plain, model, arguments, named):
        calls.append((type(model), arguments, named))
        return plain(model, *arguments, **named) + 1

    replace_method(FittedAgain, "fit", instead)
    replace_method(Fitted, "fit", lambda *_: None)
    replace_method(Fitted, "evaluate", instead)

    assert (FittedAgain().fit(3, scale=2), Fitted().fit(5)) == (7, 6)
    assert calls == [(FittedAgain, (3,), {"scale": 2}), (Fitted, (5,), {})]
    assert (Fitted.fit.__name__, Fitted.fit.__doc__) == ("fit", "Fits.")
    assert not hasattr(Fitted, "evaluate")
