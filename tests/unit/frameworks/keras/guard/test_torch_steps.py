"""Steps on PyTorch: what a step has changed is undone."""

import pytest

keras = pytest.importorskip("keras")
from memfit.core.guarding import BrokenUpdate  # noqa: E402
from memfit.frameworks.keras.guard import variables  # noqa: E402
from memfit.frameworks.keras.guard.steps import make_steps  # noqa: E402
from tests.unit.frameworks.keras.guard.models import as_array, build, data  # noqa: E402

pytestmark = pytest.mark.skipif(keras.backend.backend() != "torch", reason="needs Keras on PyTorch")


def numbers(model):
    return [as_array(one.value).tolist() for group in variables.grouped(model).values() for one in group]


def prepared(**options):
    model = build(**options)
    batch = tuple(keras.ops.convert_to_tensor(one) for one in data())
    model._symbolic_build(data_batch=batch)
    model.make_train_function()
    steps = make_steps(model, lambda one: steps.run(one))
    steps.install()
    return model, steps, batch


def test_a_forward_pass_is_undone(monkeypatch):
    model, steps, batch = prepared()
    before = numbers(model)

    def fails(*arguments):
        raise MemoryError

    steps.begin(batch)
    monkeypatch.setattr(steps, "updating", fails)
    with pytest.raises(MemoryError):
        steps.run(batch)
    assert numbers(model) != before
    steps.roll_back()

    assert numbers(model) == before
    assert all(one.value.grad is None for one in model.trainable_variables)


def test_an_update_that_has_begun_is_not():
    _, steps, batch = prepared()
    steps.begin(batch)
    steps.run(batch)

    with pytest.raises(BrokenUpdate, match=r"are between two steps\. Resume from the last checkpoint"):
        steps.roll_back()


def test_room_for_the_update_is_asked_for_first(monkeypatch):
    model, steps, batch = prepared()
    monkeypatch.setattr(steps, "room_bytes", lambda: 2**60)
    before = numbers(model)
    steps.begin(batch)
    with pytest.raises(RuntimeError, match="allocate"):
        steps.run(batch)
    steps.roll_back()

    assert numbers(model) == before


def test_a_step_of_the_users_own_is_undone_as_a_whole():
    class Own(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    model = Own([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    batch = tuple(keras.ops.convert_to_tensor(one) for one in data())
    model._symbolic_build(data_batch=batch)
    model.make_train_function()
    steps = make_steps(model, lambda one: None)
    steps.install()
    before = numbers(model)
    steps.begin(batch)
    steps.run(batch)
    steps.roll_back()

    assert numbers(model) == before


def test_the_plain_function_comes_back():
    model, steps, batch = prepared()
    assert model.train_function([batch]) is not None
    assert "apply" in model.optimizer.__dict__
    steps.forget()
    steps.remove()

    assert not hasattr(model.train_function, "memfit_function")
    assert "apply" not in model.optimizer.__dict__


def test_masks_that_a_failed_call_left_in_cells_are_dropped():
    class Failing(keras.layers.LSTMCell):
        fails = False

        def call(self, *arguments, **options):
            made = super().call(*arguments, **options)
            if self.fails:
                raise MemoryError
            return made

    cell = Failing(3, dropout=0.5)
    model = keras.Sequential([keras.layers.Input((2, 4)), keras.layers.RNN(cell)])
    model.compile("sgd", "mse")
    batch = (keras.ops.ones((5, 2, 4)), keras.ops.ones((5, 3)))
    model._symbolic_build(data_batch=batch)
    model.make_train_function()
    steps = make_steps(model, lambda one: steps.run(one))
    steps.install()
    steps.begin(batch)
    cell.fails = True
    with pytest.raises(MemoryError):
        steps.run(batch)
    assert cell._dropout_mask is not None
    steps.roll_back()
    assert cell._dropout_mask is None
