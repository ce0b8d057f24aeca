"""Steps on JAX, of a model that is played; the real one is in integration/test_keras_fit.py."""

import types

import pytest

pytest.importorskip("keras")
jax = pytest.importorskip("jax")

from memfit.core.guarding import BrokenUpdate  # noqa: E402
from memfit.frameworks.keras.guard import variables  # noqa: E402
from memfit.frameworks.keras.guard.jax_steps import BackendSteps  # noqa: E402


def played(**attributes):
    def train_step(state, batch):
        return {"loss": jax.numpy.sum(batch)}, jax.tree.map(lambda one: one + 1, state)

    values = {"run_eagerly": False, "jit_compile": True, "steps_per_execution": 2, "name": "played"}

    def train_function(state, iterator):
        return train_step(state, next(iterator))

    return types.SimpleNamespace(
        train_step=train_step, train_function=train_function, _jax_state_synced=False, **values | attributes
    )


def test_batches_are_drawn_one_by_one():
    steps = BackendSteps(played(), lambda batch: (steps.begin(batch), steps.run(batch))[1])
    steps.install()
    state = ([jax.numpy.zeros(3)], [], [], [])
    batches = iter([jax.numpy.ones(2), jax.numpy.ones(3), jax.numpy.ones(4)])

    logs, state = steps.over(state, batches)
    assert float(logs["loss"]) == 3
    logs, state = steps.over(state, batches)
    assert float(logs["loss"]) == 4
    assert state[0][0].tolist() == [3, 3, 3]
    with pytest.raises(StopIteration):
        steps.over(state, batches)


def test_memory_is_asked_for_before_the_state_is_given_away(monkeypatch):
    steps = BackendSteps(played(), len)
    steps.install()
    batch = jax.numpy.ones(2)
    steps._state = ([jax.numpy.zeros(3)], [], [], [])
    monkeypatch.setattr("memfit.frameworks.jax.guard.memory_request.beside_arguments", lambda memory: 2**60)
    steps.begin(batch)
    with pytest.raises(MemoryError):
        steps.run(batch)
    steps.roll_back()

    assert steps._state[0][0].tolist() == [0, 0, 0]


def test_a_state_that_is_gone_is_said_to_be():
    steps = BackendSteps(played(), len)
    steps._state = ([jax.numpy.zeros(3)], [], [], [])
    steps._state[0][0].delete()

    with pytest.raises(BrokenUpdate, match="JAX had taken the state of 'played'"):
        steps.roll_back()


def test_variables_get_their_values_back_after_a_failure(monkeypatch):
    emptied = types.SimpleNamespace(_value=None)
    model = played()
    groups = {name: [emptied] if name == variables.TRAINABLE else [] for name in variables.GROUPS}
    monkeypatch.setattr(variables, "grouped", lambda model: groups)
    steps = BackendSteps(model, len)
    steps.give_back()
    assert emptied._value is None

    steps._state = ([jax.numpy.ones(2)], [], [], [])
    steps.give_back()

    assert emptied._value.tolist() == [1, 1]
    assert model._jax_state_synced
    # AND a state that was handed over is not passed off for one
    model._jax_state_synced = False
    steps._state[0][0].delete()
    emptied._value = None
    steps.give_back()
    assert emptied._value is None


def test_after_a_change_of_the_model_the_step_is_traced_anew():
    # GIVEN a model whose step is a method, and what it computes that of its layers
    class Model:
        run_eagerly, jit_compile, steps_per_execution, name, factor = False, True, 1, "played", 1

        def train_step(self, state, batch):
            return {"loss": self.factor * jax.numpy.sum(batch)}, jax.tree.map(lambda one: one + 1, state)

        def make_train_function(self, force=False):
            self.train_function = lambda state, iterator: self.train_step(state, next(iterator))

    model = Model()
    model.make_train_function()
    steps = BackendSteps(model, lambda batch: steps.run(batch))
    steps.install()
    batches = iter([jax.numpy.ones(2), jax.numpy.ones(2)])
    logs, state = steps.over(([jax.numpy.zeros(3)], [], [], []), batches)
    assert float(logs["loss"]) == 2

    # WHEN the layers change and the step is made anew, while somebody still has the old one, as Keras does
    old = steps._jitted
    model.factor = 5
    steps.rebuild()

    # THEN JAX doesn't go on with what it had traced
    assert float(steps.over(state, batches)[0]["loss"]) == 10
    assert steps._jitted is not old
