"""The split training step on JAX: one program that goes over the parts in a loop, with one copy of the gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax import numpy as jnp

from memfit.core.errors import BadModel
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.apply.split_step import SplitStep
from memfit.frameworks.keras.apply.weights import BatchPart

_Carry = tuple[Any, Any, Any, Any, Any]
"""Gradients, other variables, metrics' variables, the loss so far, and the losses of outputs so far."""


class BackendSplitStep(SplitStep):
    """A `train_step(state, data)`; arguments as for `SplitStep`."""

    concrete = staticmethod(jax.ensure_compile_time_eval)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if keras.distribution.distribution() is not None:
            raise BadModel(
                "a model under keras.distribution can't be split into micro-batches. Leave one of the two out."
            )

    def __call__(self, state: Any, data: Any) -> Any:
        """Trains on a batch."""
        *opened, num_samples = self.open(data)
        size = self.settings.part_size(num_samples)
        if num_samples is None or num_samples <= size:
            return self.plain(state, data)
        arrays = jax.tree.map(jnp.asarray, tuple(opened))
        given = state, arrays, num_samples, size
        return self.weighed(lambda: self._counted(*given), lambda weights: self._train(*given, weights))

    def _train(self, state: Any, data: Any, num_samples: int, size: int, weights: Any) -> Any:
        trainable, others, optimizer, metrics = state

        def body(carry: _Carry, part: Any) -> tuple[_Carry, Any]:
            gradients, others, metrics, share, values = carry
            gradient = jax.grad(self._loss, has_aux=True)
            found, (own, own_values, y_pred, others, metrics) = gradient(
                trainable, others, metrics, optimizer, part, num_samples, weights
            )
            with keras.StatelessScope(list(zip(self.model.metrics_variables, metrics, strict=True))) as scope:
                last = self.model.compute_metrics(part[0], part[1], y_pred, sample_weight=part[2])
            metrics = _current(scope, self.model.metrics_variables)
            gradients = jax.tree.map(jnp.add, gradients, found)
            values = jax.tree.map(jnp.add, values, own_values)
            return (gradients, others, metrics, share + own, values), last if self.has_own_metrics else None

        dtype = keras.backend.floatx()
        zeros = [jnp.zeros((), dtype) for _ in range(self.num_values())]
        first = (jax.tree.map(jnp.zeros_like, trainable), others, metrics, jnp.zeros((), dtype), zeros)
        carry, last = self._over_parts(body, first, data, num_samples, size)
        gradients, others, metrics, share, values = carry
        trainable, optimizer = self.model.optimizer.stateless_apply(optimizer, gradients, trainable)
        with keras.StatelessScope(list(zip(self.model.metrics_variables, metrics, strict=True))) as scope:
            self.finish_metrics(share, values, num_samples, num_samples)
            logs = self.logs(last)
        metrics = _current(scope, self.model.metrics_variables)
        return logs, (trainable, others, optimizer, metrics)

    def _loss(
        self, trainable: Any, others: Any, metrics: Any, optimizer: Any, data: Any, num_samples: int, weights: Any
    ) -> Any:
        """A part's share of the loss, scaled as the optimizer asks, and what else the part leaves."""
        model = self.model
        keywords = internals.training_keyword(model, True)
        y_pred, others, losses = model.stateless_call(trainable, others, data[0], return_losses=True, **keywords)
        self.prepare(data, losses)
        mapping = [
            *zip(model.trainable_variables, trainable, strict=True),
            *zip(model.non_trainable_variables, others, strict=True),
            *zip(model.metrics_variables, metrics, strict=True),
        ]
        # Where a compute_loss of the user's own looks for them.
        with internals.losses_given(model, losses), keras.StatelessScope(mapping) as scope:
            length = int(jax.tree.leaves(data)[0].shape[0])
            found = self.share(BatchPart(length, num_samples, weights), data, y_pred, losses)
        others = _current(scope, model.non_trainable_variables)
        metrics = _current(scope, model.metrics_variables)
        total = found.total
        with keras.StatelessScope(list(zip(model.optimizer.variables, optimizer, strict=True))):
            scaled = model.optimizer.scale_loss(total)
        dtype = keras.backend.floatx()
        values = [value.astype(dtype) for value in found.values]
        return scaled, (total.astype(dtype), values, y_pred, others, metrics)

    def _counted(self, state: Any, data: Any, num_samples: int, size: int) -> Any:
        """The denominators of the batch. Of the forward pass, the compiler keeps what these depend on."""
        trainable, others = state[0], state[1]
        keywords = internals.training_keyword(self.model, False)

        def body(sums: Any, part: Any) -> tuple[Any, None]:
            y_pred, _ = self.model.stateless_call(trainable, others, part[0], **keywords)
            counts = [jnp.asarray(count, sums.dtype) for count in self.loss.count(part[1], y_pred, part[2])]
            return sums + jnp.stack(counts), None

        zeros = jnp.zeros((self.loss.num_losses,), keras.backend.floatx())
        return self._over_parts(body, zeros, data, num_samples, size)[0]

    def _over_parts(
        self, body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, data: Any, num_samples: int, size: int
    ) -> tuple[Any, Any]:
        """(what the last part left, what it returned): equal parts in a loop, then what is left of the batch."""
        count, rest = divmod(num_samples, size)
        last = None
        if self.model.run_eagerly or not self.model.jit_compile:
            for at in range(0, num_samples, size):
                carry, last = body(carry, _rows(data, at, min(size, num_samples - at)))
            return carry, last
        if count:
            carry, each = jax.lax.scan(
                lambda carry, at: body(carry, _rows(data, at, size)), carry, jnp.arange(count) * size
            )
            last = jax.tree.map(lambda stacked: stacked[-1], each)
        if rest:
            carry, last = body(carry, _rows(data, count * size, rest))
        return carry, last

    def numbers_of(self, variables: Sequence[Any]) -> list[Any]:
        """Made-up numbers: while a step is compiled, Keras has the variables' own nowhere."""
        random = np.random.default_rng(3)

        def made(variable: Any) -> Any:
            dtype = keras.backend.standardize_dtype(variable.dtype)
            if "float" not in dtype:
                return np.ones(variable.shape, dtype)
            return random.uniform(0.01, 0.1, variable.shape).astype(dtype)

        return [made(variable) for variable in variables]


def _rows(data: Any, start: Any, size: int) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size), data)


def _current(scope: Any, variables: list[Any]) -> list[Any]:
    found = [scope.get_current_value(variable) for variable in variables]
    return [variable.value if value is None else value for variable, value in zip(variables, found, strict=True)]
