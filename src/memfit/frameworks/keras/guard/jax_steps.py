"""Guarded steps of Keras on JAX.

A step is a function of the state, which gives its memory to the new one (donation). JAX takes it when the step is
handed over, and when the computation then finds no memory, on another thread and later, old and new state are gone. So
memory is asked for before, see `frameworks.jax.guard.memory_request`.
"""

from typing import Any

import jax
import keras

from memfit.core.guarding import BrokenUpdate
from memfit.frameworks.jax.guard.memory_request import MemoryRequest
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.guard import variables
from memfit.frameworks.keras.guard.steps import Each, Steps


class BackendSteps(Steps):
    """See the module."""

    def __init__(self, model: Any, each: Each) -> None:
        super().__init__(model, each)
        self._state: Any = None
        self._last: Any = None
        self._jitted: Any = None
        self._request: MemoryRequest | None = None

    def over(self, *arguments: Any) -> Any:
        """The state and an iterator; as many batches as there are steps in an execution."""
        self._state, iterator = arguments
        return self.train_on(iterator), self._state

    def run(self, batch: Any) -> Any:
        """One compiled step, if the memory for it is there."""
        step = self._compiled()
        if step is None:
            logs, self._state = self._function(self._state, iter([batch]))
        else:
            if self._request is None:
                self._request = MemoryRequest(step)
            self._request.ask((self._state, batch), self.settle)
            logs, self._state = step(self._state, batch)
        self._last = logs
        return logs

    def settle(self) -> None:
        """Waits for the last step, whose memory the next one needs."""
        if self._last is not None:
            last, self._last = self._last, None
            jax.block_until_ready(last)

    def roll_back(self) -> None:
        """The state is still there, unless the step was handed over with it."""
        self._last = None
        if self._is_gone:
            raise BrokenUpdate(
                f"memory ran out after JAX had taken the state of {self.model.name!r} for the next step, so that it is "
                "gone. Resume from the last checkpoint: run the same script again, or run it with `memfit run`, which "
                "does that by itself."
            )

    def rebuild(self) -> None:
        """The variables get their values back meanwhile, for what changes the model may look at them."""
        self._jitted = self._request = None
        super().rebuild()

    def values(self) -> dict[str, Any] | None:
        """The state that the fit in progress holds; None between epochs."""
        if not internals.holds_jax_state(self.model) or self._state is None:
            return None
        return dict(zip(variables.GROUPS, self._state, strict=True))

    def fill(self) -> None:
        """Gives the variables, which are empty within an epoch, the values of the state."""
        for group, values in zip(variables.grouped(self.model).values(), self._state or (), strict=False):
            for variable, value in zip(group, values, strict=True):
                internals.set_tensor(variable, value)

    def load(self) -> None:
        """Takes the state from the variables, and empties them, as Keras does at the beginning of an epoch."""
        self._state = internals.take_jax_state(self.model)

    def give_back(self) -> None:
        """Keras does so only with what a whole step has left."""
        if self.values() is not None and not self._is_gone:
            self.fill()
            internals.give_jax_state(self.model)

    @property
    def _is_gone(self) -> bool:
        """Whether a step was handed over with the state and has not given it back."""
        return any(value.is_deleted() for value in jax.tree.leaves(self._state))

    def _watch_updates(self) -> None:
        """A step is one computation: there is no part of it that fails by itself."""

    def _compiled(self) -> Any:
        """The step as Keras compiles it; None where it isn't compiled or is split over devices."""
        model = self.model
        if model.run_eagerly or not model.jit_compile or keras.distribution.distribution() is not None:
            return None
        if internals.uses_nnx():
            return None
        # It lives as long as Keras's own, so that the next fit isn't compiled again.
        self._jitted = self._jitted or getattr(self._function, "memfit_jitted", None)
        if self._jitted is None:
            # A function of its own each time: JAX takes two bound methods of one model for the same, and would go on
            # with what it traced before the layers were changed.
            def train_step(state: Any, data: Any) -> Any:
                return model.train_step(state, data)

            self._jitted = self._function.memfit_jitted = jax.jit(train_step, donate_argnums=0)
        return self._jitted
