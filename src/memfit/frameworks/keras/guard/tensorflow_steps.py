"""Guarded steps of Keras on TensorFlow.

A graph runs its operations as soon as their inputs are there: some variables have been updated when a later operation
finds no memory, the count of steps first of all. So a barrier is put before the optimizer: it waits for all gradients
and asks for the room that the update needs. Before the barrier only statistics of batch norms, seeds and metrics
change, which are small and kept.

A step compiled by XLA is one operation, which takes its memory before it computes. But it is given the memory of the
variables to write into, and when it then fails, TensorFlow has freed what the variables still point to. As long as
somebody else holds the values they aren't given away, and the step needs memory for both, old and new. So they are held
whenever a step is run for the first times with its shapes, after which the same step needs the same memory; and always
once memory has run out.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from memfit.frameworks.keras.guard.steps import Each, Steps
from memfit.frameworks.keras.model import has_own_step

# Steps with the same shapes during which values are held.
_NUM_HELD = 3


class BackendSteps(Steps):
    """See the module."""

    def __init__(self, model: Any, each: Each) -> None:
        super().__init__(model, each)
        self._kept: list[tuple[Any, Any]] = []
        self._spec: Any = None
        self._step: Any = None
        # How often batches of these shapes went well with the step in use, and whether memory has run out.
        self._known: Counter[Any] = Counter()
        self._is_short = self._holds_all = False
        self._key: Any = None
        # Updates that were begun, behind the barrier.
        with tf.init_scope():
            self._updates = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._updates_before: Any = None

    def over(self, *arguments: Any) -> Any:
        """An iterator; as many batches as there are steps in an execution."""
        (iterator,) = arguments
        if self.model.distribute_strategy.num_replicas_in_sync > 1:
            return self._function(iterator)
        spec = iterator.element_spec if isinstance(iterator, tf.data.Iterator) else None
        if self._spec != spec:
            self._spec, self._step = spec, None
        return self.train_on(iterator)

    def begin(self, batch: Any) -> None:
        """Holds the values of what the step may have changed when it fails."""
        self.in_update = False
        if self._is_compiled:
            self._key = tuple([tuple(part.shape) for part in keras.tree.flatten(batch) if hasattr(part, "shape")])
            self._holds_all = self._is_short or self._known[self._key] < _NUM_HELD
        else:
            self._holds_all = has_own_step(self.model)
        changing = [] if self._is_compiled and not self._holds_all else self.changing(everything=self._holds_all)
        # Reading gives the value that the variable has, not a copy of it.
        self._kept = [(variable, _read(variable.value)) for variable in changing]
        if not self._is_compiled:
            self._updates_before = _read(self._updates)

    def run(self, batch: Any) -> Any:
        """The step, traced for batches of any size where Keras traces it so."""
        if self.model.run_eagerly or self._spec is None:
            return self._function(iter([batch]))
        function = self._function
        spec, step = getattr(function, "memfit_step", (None, None))
        if self._step is None and spec == self._spec:
            self._step = step
        if self._step is None:

            @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator,unused-ignore]
            def one_step(data: Any) -> Any:
                return function([data])

            # A concrete function finds its graph without looking at the types of its arguments at each call.
            self._step = tf.function(one_step, input_signature=(self._spec,)).get_concrete_function()
            function.memfit_step = self._spec, self._step
        return self._step(batch)

    def forget(self) -> None:
        """Drops what was held."""
        self._kept = []
        self._known[self._key] += 1

    def roll_back(self) -> None:
        """Gives the variables the values that were held."""
        self._is_short = True
        was_begun = not self._is_compiled and int(self._updates.numpy()) > int(self._updates_before.numpy())
        if not self._holds_all and (self._is_compiled or was_begun or self.in_update):
            raise self.broken()
        for variable, value in self._kept:
            variable.value.assign(value)

    def _adopted(self) -> Any:
        """A function that is traced with the barrier: Keras's own may have been traced without.

        It lives as long as Keras's own, so that the next fit isn't traced again.
        """
        plain = self._plain
        if self._is_compiled or self.model.run_eagerly:
            return plain
        kept = getattr(plain, "memfit_kept", None)
        if kept is None:
            self.model.make_train_function(force=True)
            kept = plain.memfit_kept = self.model.train_function, self._updates
        function, self._updates = kept
        return function

    def rebuild(self) -> None:
        """Another step needs other memory."""
        self._step = None
        self._known.clear()
        super().rebuild()

    @contextmanager
    def updating(self, gradients: list[Any]) -> Iterator[list[Any]]:
        """The barrier."""
        if tf.executing_eagerly():
            self.in_update = True
            yield gradients
        elif self._is_compiled:
            yield gradients
        else:
            given = [one for one in gradients if one is not None]
            room_bytes = self.room_bytes()
            if room_bytes:
                with tf.control_dependencies(given):
                    given = [tf.raw_ops.Empty(shape=[room_bytes], dtype=tf.uint8, init=False).op]
            with tf.control_dependencies(given):
                begun = self._updates.assign_add(1, read_value=False)
            with tf.control_dependencies([begun]):
                yield tf.tuple(gradients)

    @property
    def _is_compiled(self) -> bool:
        return bool(self.model.jit_compile) and not self.model.run_eagerly


def _read(variable: Any) -> Any:
    """The value of a variable of TensorFlow, by the one operation that it takes."""
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
