"""The training function of a Keras model, taken apart: one batch at a time, each of which can be undone.

Keras's own function draws a batch and trains on it in one. Here the batch is drawn first and kept until it has been
trained on, so that a step that runs out of memory can be run again on the same batch. What undoing needs differs by
backend: see `tensorflow_steps`, `jax_steps` and `torch_steps`.
"""

import importlib
from collections.abc import Callable
from typing import Any

import keras

from memfit.core.guarding import BrokenUpdate
from memfit.frameworks.keras.guard import variables
from memfit.frameworks.keras.model import size_of

Each = Callable[[Any], Any]
"""Trains on one batch and gives the logs."""

# Temporaries of an update, in copies of the largest variable.
_UPDATE_COPIES = 4
# Less than that isn't asked for: far more is free when the activations are gone, and from this size on the C library
# gets a block from the system and gives it back, without a trace in its heap.
_LARGE_BYTES = 32 * 2**20


class Steps:
    """The steps of one model on one backend; `each` is called with each batch that Keras draws."""

    def __init__(self, model: Any, each: Each) -> None:
        self.model = model
        self._each = each
        # Keras's own training function, which it gets back; the one that is run; and the one that Keras calls.
        self._plain: Any = None
        self._function: Any = None
        self._own: Any = None
        # The optimizer that tells of its updates; settings may put another one before it.
        self._watched: Any = None
        self._changing: dict[bool, list[Any]] = {}
        self.in_update = False
        """Whether the optimizer has begun to change variables in the step that failed."""

    # What each backend does in its own way.

    def over(self, *arguments: Any) -> Any:
        """What Keras calls in place of its training function."""
        raise NotImplementedError

    def begin(self, batch: Any) -> None:
        """Before a batch is run: keeps what undoing needs."""

    def run(self, batch: Any) -> Any:
        """Trains on one batch; the logs."""
        raise NotImplementedError

    def updating(self, gradients: list[Any]) -> Any:
        """A context in which the optimizer is applied; gives the gradients to apply."""
        raise NotImplementedError

    def roll_back(self) -> None:
        """All variables as they were at `begin`; raises BrokenUpdate where that isn't possible."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drops what `begin` kept: the batch has been trained on."""

    def settle(self) -> None:
        """Waits until the last step has really been made."""

    def values(self) -> dict[str, Any] | None:
        """The variables' values by group, where the variables themselves are empty at the moment; None: they aren't."""
        return None

    def fill(self) -> None:
        """Gives variables that are empty at the moment their values."""

    def load(self) -> None:
        """Takes the values that `fill` gave, which may have been changed since."""

    def give_back(self) -> None:
        """Gives variables that are empty at the moment their values for good: no further step follows."""

    # The same for all.

    def train_on(self, iterator: Any) -> Any:
        """Trains on as many batches as there are steps in an execution; the last logs."""
        # Keras before 3.6 gives the one batch of `train_on_batch` in a list.
        iterator, logs = iter(iterator), None
        for _ in range(self.model.steps_per_execution):
            try:
                batch = next(iterator)
            except StopIteration:
                if logs is None:
                    raise
                break
            logs = self._each(batch)
        return logs

    def install(self) -> None:
        """Takes the place of the training function that Keras has made."""
        found = self.model.train_function
        # What a fit that ended in an exception has left behind.
        self._plain = getattr(found, "memfit_function", found)
        self._watch_updates()
        self._function = self._adopted()
        self._put()

    def changing(self, *, everything: bool) -> list[Any]:
        """Variables that a step changes: all, or those that the forward pass changes; Keras is slow to collect them."""
        if everything not in self._changing:
            groups = variables.grouped(self.model)
            chosen = groups.values() if everything else (groups[variables.OTHERS], groups[variables.METRICS])
            self._changing[everything] = [variable for group in chosen for variable in group]
        return self._changing[everything]

    def rebuild(self) -> None:
        """Makes the training function anew: the model's step was replaced."""
        self._changing.clear()
        self.model.train_function = None
        self.model.make_train_function(force=True)
        self._plain = self._function = self.model.train_function
        self._put()

    def _adopted(self) -> Any:
        """The function to run in place of Keras's own, made before the first step."""
        return self._plain

    def remove(self) -> None:
        """Gives Keras its own function back."""
        if self.is_installed:
            self.model.train_function = self._plain
        if self._watched is not None:
            self._watched.__dict__.pop("apply", None)

    @property
    def is_installed(self) -> bool:
        """Whether Keras calls these steps: `compile` and other guards put others in their place."""
        return self.model.train_function is not None and self.model.train_function is self._own

    def _put(self) -> None:
        def train_function(*arguments: Any) -> Any:
            return self.over(*arguments)

        train_function.memfit_function = self._plain  # type: ignore[attr-defined]
        self._own = self.model.train_function = train_function

    def _watch_updates(self) -> None:
        """Has `updating` called with the gradients before the optimizer changes anything."""
        optimizer = self.model.optimizer
        plain = type(optimizer).apply.__get__(optimizer)

        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            with self.updating(list(grads)) as ready:
                return plain(ready, trainable_variables)

        # Not by assignment, which Keras would track.
        optimizer.__dict__["apply"] = apply
        self._watched = optimizer

    def room_bytes(self) -> int:
        """What the optimizer may need for a moment, beside its state; 0 where that is little."""
        sizes = list(map(size_of, self.model.trainable_variables))
        found = min(sum(sizes), _UPDATE_COPIES * max(sizes, default=0))
        return found if found >= _LARGE_BYTES else 0

    def broken(self) -> BrokenUpdate:
        """The error of a step that can't be undone."""
        return BrokenUpdate(
            f"memory ran out while the optimizer was changing the variables of {self.model.name!r}, so that they are "
            "between two steps. Resume from the last checkpoint: run the same script again, or run it with `memfit "
            "run`, which does that by itself."
        )


def make_steps(model: Any, each: Each) -> Steps:
    """The steps of a model on the backend that Keras runs on."""
    module = importlib.import_module(f"memfit.frameworks.keras.guard.{keras.backend.backend()}_steps")
    made: Steps = module.BackendSteps(model, each)
    return made
