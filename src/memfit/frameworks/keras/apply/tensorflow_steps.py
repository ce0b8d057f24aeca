"""The split training step on TensorFlow: a loop in the graph, one part at a time, with one copy of the gradients.

`tf.while_loop` with one iteration at a time keeps the parts apart: unrolled parts depend on each other in nothing but
the sums of their gradients, and TensorFlow's executor would begin with all of them at once.

A graph often doesn't know how large its batch will be. Parts are then sliced by sizes that are computed when it runs.
XLA must know the sizes of slices: there the loop goes over parts of one size, and the last part follows it.

The gradient of an embedding is a list of rows (`tf.IndexedSlices`), in which a row may occur more than once. Keras
clips, and squares, each occurrence for itself, so that adding them up first would train differently: the lists of the
parts are put end to end.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from memfit.core.errors import BadModel
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.apply.split_step import SplitStep
from memfit.frameworks.keras.batch import leaves


class _FoundRows(Exception):
    """Gradients that turned out to be lists of rows."""

    def __init__(self, places: set[int]) -> None:
        super().__init__()
        self.places = places


class BackendSplitStep(SplitStep):
    """A `train_step(data)`; arguments as for `SplitStep`."""

    concrete = staticmethod(tf.init_scope)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self.model.distribute_strategy.num_replicas_in_sync > 1:
            raise BadModel(
                "a model under a tf.distribute strategy of several replicas can't be split into micro-batches. "
                "Leave one of the two out."
            )
        self._rows_at: frozenset[int] = frozenset()
        """Places of the gradients that are lists of rows."""

    def __call__(self, data: Any) -> Any:
        """Trains on a batch."""
        x, y, sample_weight, known = self.open(data)
        self._build(data)
        opened = (x, y, sample_weight)
        num_samples = known if known is not None else _length(opened)
        size = self.settings.part_size(num_samples)
        if not self.model.trainable_weights or (known is not None and known <= size):
            return self.plain(data)
        share, values, gradients, last = self._all_gradients(opened, num_samples, size)
        self.model.optimizer.apply_gradients(zip(gradients, self.model.trainable_weights, strict=True))
        self.finish_metrics(share, values, num_samples, known)
        return self.logs(last)

    def _all_gradients(self, data: Any, num_samples: Any, size: Any) -> tuple[Any, Any, list[Any], Any]:
        """Gradients by `_gradients`, which knows only after its loop has been traced what it must prepare."""
        given = data, num_samples, size
        try:
            gradients: tuple[Any, Any, list[Any], Any] = self.weighed(
                lambda: self._counted(*given), lambda weights: self._gradients(*given, weights)
            )
            return gradients
        except _FoundRows as found:
            self._rows_at = self._rows_at | found.places
        return self._all_gradients(*given)

    def _build(self, data: Any) -> None:
        """Makes variables of layers, metrics and losses, which the plain step makes on its way, before the loop."""
        if self.model.built and internals.is_loss_built(self.model):
            return

        def symbolic(leaf: Any) -> Any:
            return None if leaf is None else keras.KerasTensor(leaf.shape, keras.backend.standardize_dtype(leaf.dtype))

        with tf.init_scope():
            internals.symbolic_build(self.model, data_batch=keras.tree.map_structure(symbolic, data))

    def _gradients(self, data: Any, num_samples: Any, size: Any, weights: Any) -> tuple[Any, Any, list[Any], Any]:
        """(loss, losses of outputs, gradients, what `compute_metrics` returned for the last part)."""
        variables = [variable.value for variable in self.model.trainable_weights]
        unused: set[int] = set()
        last: list[Any] = []

        num_values = 1 + self.num_values()

        def body(sums: list[Any], index: Any, part: Any, length: Any) -> list[Any]:
            share, values, found, logs = self._part(variables, part, length, num_samples, weights)
            last[:] = [logs]
            rows = {place for place, gradient in enumerate(found) if isinstance(gradient, tf.IndexedSlices)}
            if rows - self._rows_at:
                raise _FoundRows(rows)
            unused.update(place for place, gradient in enumerate(found) if gradient is None)
            full = (tf.zeros_like(v) if g is None else g for g, v in zip(found, variables, strict=True))
            return [_added(one, other, index) for one, other in zip(sums, [share, *values, *full], strict=True)]

        zeros: list[Any] = [tf.zeros((), keras.backend.floatx()) for _ in range(num_values)]
        count = (num_samples + size - 1) // size
        for place, variable in enumerate(variables):
            has_rows = place in self._rows_at
            zeros.append(_lists(variable, count) if has_rows else tf.zeros(variable.shape, variable.dtype))
        sums = self._over_parts(body, zeros, data, num_samples, size)
        gradients: list[Any] = [
            _joined(one[0], one[1], variable) if place in self._rows_at else one
            for place, (one, variable) in enumerate(zip(sums[num_values:], variables, strict=True))
        ]
        for place in unused:
            gradients[place] = None
        return sums[0], sums[1:num_values], gradients, last[0] if self._last_apart else None

    def _part(
        self, variables: Sequence[Any], data: Any, length: Any, num_samples: Any, weights: Any
    ) -> tuple[Any, list[Any], list[Any], Any]:
        with tf.GradientTape() as tape:
            found, total, y_pred = self.part_loss(data, length, num_samples, weights)
        gradients = tape.gradient(total, variables)
        logs = self.model.compute_metrics(data[0], data[1], y_pred, sample_weight=data[2])
        return found.total, found.values, gradients, logs

    def numbers_of(self, variables: Sequence[Any]) -> list[Any]:
        """The variables' own."""
        with tf.init_scope():
            return [variable.numpy() for variable in variables]

    def _counted(self, data: Any, num_samples: Any, size: Any) -> Any:
        """The denominators of the batch. Of the forward pass, the graph keeps what these depend on."""

        def body(sums: list[Any], index: Any, part: Any, length: Any) -> list[Any]:
            counts = self.loss.count(part[1], self.call(part[0], training=False), part[2])
            return [one + tf.cast(other, one.dtype) for one, other in zip(sums, counts, strict=True)]

        zeros = [tf.zeros((), keras.backend.floatx()) for _ in range(self.loss.num_losses)]
        return self._over_parts(body, zeros, data, num_samples, size)

    @property
    def _last_apart(self) -> bool:
        """Whether the last part follows the loop in place of being in it."""
        return bool(self.model.jit_compile and not self.model.run_eagerly) or self.has_own_metrics

    def _over_parts(
        self,
        body: Callable[[list[Any], Any, Any, Any], list[Any]],
        sums: list[Any],
        data: Any,
        num_samples: Any,
        size: Any,
    ) -> list[Any]:
        count = (num_samples + size - 1) // size
        in_loop = count - 1 if self._last_apart else count

        def one(index: Any, *sums: Any) -> list[Any]:
            start = index * size
            length = size if self._last_apart else tf.minimum(size, num_samples - start)
            return [index + 1, *body(list(sums), index, _rows(data, start, length), length)]

        done = tf.while_loop(
            lambda index, *_: index < in_loop, one, [tf.constant(0), *sums], parallel_iterations=1, swap_memory=False
        )
        sums = list(done[1:])
        if self._last_apart:
            start = in_loop * size
            # Nothing else makes the last part wait for the others.
            with tf.control_dependencies([sums[0]]):
                start = tf.identity(start) if isinstance(start, tf.Tensor) else start
                sums = body(sums, in_loop, _rows(data, start, num_samples - start), num_samples - start)
        return sums


def _added(one: Any, other: Any, index: Any) -> Any:
    if isinstance(one, tuple):
        return one[0].write(index, other.values), one[1].write(index, tf.cast(other.indices, tf.int64))
    return one + tf.cast(other, one.dtype)


def _lists(variable: Any, count: Any) -> tuple[Any, Any]:
    """Room for the rows of each part's gradient, and for their places in the variable."""
    options: dict[str, Any] = {"size": count, "infer_shape": False, "clear_after_read": True}
    return (
        tf.TensorArray(variable.dtype, element_shape=[None, *variable.shape[1:]], **options),
        tf.TensorArray(tf.int64, element_shape=[None], **options),
    )


def _joined(values: Any, indices: Any, variable: Any) -> Any:
    return tf.IndexedSlices(values.concat(), indices.concat(), tf.constant(list(variable.shape), tf.int64))


def _rows(data: Any, start: Any, length: Any) -> Any:
    def taken(leaf: Any) -> Any:
        if leaf is None:
            return None
        if isinstance(leaf, tf.RaggedTensor):
            return leaf[start : start + length]
        if isinstance(leaf, tf.SparseTensor):
            shape = leaf.dense_shape[1:]
            sizes = tf.concat([tf.reshape(tf.cast(length, tf.int64), [1]), shape], axis=0)
            starts = tf.concat([tf.reshape(tf.cast(start, tf.int64), [1]), tf.zeros_like(shape)], axis=0)
            return tf.sparse.slice(leaf, starts, sizes)
        tensor = tf.convert_to_tensor(leaf)
        rest = tensor.shape.rank - 1
        part = tf.slice(tensor, [start, *[0] * rest], [length, *[-1] * rest])
        # A slice whose length is computed forgets the other dimensions too.
        part.set_shape([length if isinstance(length, int) else None, *tensor.shape[1:]])
        return part

    return keras.tree.map_structure(taken, data)


def _length(data: Any) -> Any:
    first = leaves(data)[0]
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int32)
    return tf.cast(first.dense_shape[0], tf.int32) if isinstance(first, tf.SparseTensor) else tf.shape(first)[0]
