"""What is the same for steps on all backends."""

import pytest

keras = pytest.importorskip("keras")
from memfit.frameworks.keras.guard import steps as steps_module  # noqa: E402
from memfit.frameworks.keras.guard.steps import Steps, make_steps  # noqa: E402
from tests.unit.frameworks.keras.guard.models import build  # noqa: E402


def test_room_is_that_of_the_largest_variables(monkeypatch):
    made = Steps(build(), len)
    assert made.room_bytes() == 0

    monkeypatch.setattr(steps_module, "_LARGE_BYTES", 1)
    # Four times the largest, 24 numbers of 4 bytes, are more than all of them together.
    assert made.room_bytes() == 224


def test_a_function_that_was_left_behind_is_unwrapped():
    model = build()
    model.make_train_function()
    plain = model.train_function
    for _ in range(2):
        steps = make_steps(model, len)
        steps.install()
    steps.remove()

    assert model.train_function is plain


def test_steps_know_whether_they_are_in_place():
    model = build()
    model.make_train_function()
    steps = make_steps(model, len)
    assert not steps.is_installed
    steps.install()
    assert steps.is_installed

    model.compile("sgd", "mse")

    assert not steps.is_installed


def test_the_optimizer_that_was_watched_is_let_go():
    model = build()
    model.make_train_function()
    plain = model.optimizer
    steps = make_steps(model, len)
    steps.install()
    model.optimizer = keras.optimizers.LossScaleOptimizer(plain)
    steps.remove()

    assert "apply" not in plain.__dict__
