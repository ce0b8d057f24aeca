"""A call of Keras layers as a pure function: of weights, state and inputs, to outputs, new state and losses.

Layers change state while they run: batch norms count, seed generators move on, losses are added. A call that is made
twice must do all of this once, and its second time must see the state of the first. So the layers run in a
`keras.StatelessScope`; what they changed is put into practice afterwards, by whoever asked for the call, once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from memfit.frameworks.keras import internals

# Non-trainable variables up to this size are taken for state: statistics and seeds, as opposed to frozen weights.
_STATE_ELEMENTS = 65_536


class _Unknown(BaseException):
    """A variable, given as argument, was used that isn't among the layers', or changed that is taken for a weight.

    Not an `Exception`: Keras makes others of these on their way.
    """


class _Scope(keras.StatelessScope):  # type: ignore[misc,unused-ignore]
    """A scope that knows which state was changed in it, and refuses variables that it has no value for."""

    def __init__(self, weights: Sequence[Any], state: Sequence[Any], values: Sequence[Any]) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        for variable, value in zip((*weights, *state), values, strict=True):
            self.state_mapping[id(variable)] = value
        self._fixed = {id(variable) for variable in weights}
        self._given = dict(self.state_mapping)
        self.changed: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> Any:
        """The value of a variable here."""
        value = super().get_current_value(variable)
        if value is None:
            # Keras draws from a shared generator where no seed is given, which is made when first drawn from.
            shared = internals.global_seed_generator()
            if internals.tensor_of(variable) is not None or (shared is not None and shared.state is variable):
                raise _Unknown(variable)
        return value

    def add_update(self, update: tuple[Any, Any]) -> None:
        """A variable was assigned."""
        variable, value = update
        if id(variable) in self._fixed or (
            id(variable) not in self._given and internals.tensor_of(variable) is not None
        ):
            raise _Unknown(variable)
        if variable.trainable and id(variable) in self._given and keras.backend.backend() != "jax":
            # What is assigned there has no past: gradients of what is computed with it are the variable's own.
            given, stop = self._given[id(variable)], keras.ops.stop_gradient
            value = stop(value) + (given - stop(given))
        super().add_update((variable, value))
        self.changed[id(variable)] = variable


@dataclass(slots=True)
class _Shape:
    """How a flat list of results is to be read; known after a first call."""

    structure: Any = None
    masked: list[int] = field(default_factory=list)
    changed: list[Any] = field(default_factory=list)
    num_losses: int = 0


Recompute = Callable[..., list[Any]]


class StatelessCall:
    """Layers whose call can be repeated; others whose variables are used are found out."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = list(layers)
        self._found: list[Any] = []
        # Variables that are changed although they look like weights.
        self._changing: set[int] = set()

    def __call__(self, run: Callable[[Any], Any], inputs: Any, recompute: Recompute) -> Any:
        """Calls `run(inputs)`, by way of `recompute`, with its effects on the layers' state and losses once.

        `recompute(function, weights, trained, inputs)` is as in the backends' modules.
        """
        while True:
            try:
                return self._call(run, inputs, recompute)
            except _Unknown as unknown:
                (variable,) = unknown.args
            if id(variable) in {id(known) for group in self._variables() for known in group}:
                self._changing.add(id(variable))
                continue
            if internals.tensor_of(variable) is None:
                internals.make_variables()
            self._found.append(variable)

    def _variables(self) -> tuple[list[Any], list[Any]]:
        """Weights and state, each variable once."""
        every = [variable for layer in self._layers for variable in layer.variables] + self._found
        groups: tuple[list[Any], list[Any]] = ([], [])
        for variable in {id(variable): variable for variable in every}.values():
            looks_like_weight = variable.trainable or math.prod(variable.shape) > _STATE_ELEMENTS
            groups[0 if looks_like_weight and id(variable) not in self._changing else 1].append(variable)
        return groups

    def _call(self, run: Callable[[Any], Any], inputs: Any, recompute: Recompute) -> Any:
        weights, state = self._variables()
        surroundings = internals.Surroundings()
        flat = keras.tree.flatten(inputs)
        places = [index for index, value in enumerate(flat) if internals.is_tensor(value)]
        masks = [(index, mask) for index in places if (mask := internals.get_mask(flat[index])) is not None]
        shape = _Shape()

        def function(weight_values: list[Any], rest: list[Any]) -> list[Any]:
            scope = _Scope(weights, state, (*weight_values, *rest[: len(state)]))
            tensors = rest[len(state) :]
            filled: list[Any] = list(flat)
            for index, tensor in zip(places, tensors, strict=False):
                filled[index] = tensor
            for (index, _), mask in zip(masks, tensors[len(places) :], strict=True):
                internals.set_mask(filled[index], mask)
            try:
                with surroundings.entered(), scope:
                    outputs = run(keras.tree.pack_sequence_as(inputs, filled))
            finally:
                # PyTorch leaves a second computation as soon as it has what it needs.
                for layer in self._layers:
                    internals.forget_call(layer, scope.losses)
            return _flattened(outputs, scope, shape)

        values = [internals.value_of(variable) for variable in weights]
        trained = [bool(variable.trainable) for variable in weights]
        given = [internals.value_of(variable) for variable in state]
        given += [flat[index] for index in places] + [mask for _, mask in masks]
        return self._unflattened(recompute(function, values, trained, given), shape)

    def _unflattened(self, results: list[Any], shape: _Shape) -> Any:
        """Puts into practice what a call has changed; returns its outputs."""
        flat = keras.tree.flatten(shape.structure)
        places = [index for index, value in enumerate(flat) if value is _TENSOR]
        rest = iter(results)
        for index in places:
            flat[index] = next(rest)
        for index in shape.masked:
            internals.set_mask(flat[index], next(rest))
        for variable in shape.changed:
            variable.assign(next(rest))
        losses = [next(rest) for _ in range(shape.num_losses)]
        if losses and internals.collects_losses():
            # Models made of a graph refuse to have losses of their own.
            keras.layers.Layer.add_loss(self._layers[0], losses)
        return keras.tree.pack_sequence_as(shape.structure, flat)


_TENSOR = object()
"""Stands where a tensor belongs."""


def _flattened(outputs: Any, scope: _Scope, shape: _Shape) -> list[Any]:
    flat = keras.tree.flatten(outputs)
    are_tensors = [internals.is_tensor(value) for value in flat]
    shape.structure = keras.tree.pack_sequence_as(
        outputs, [_TENSOR if tensor else value for value, tensor in zip(flat, are_tensors, strict=True)]
    )
    masks = [internals.get_mask(value) if tensor else None for value, tensor in zip(flat, are_tensors, strict=True)]
    shape.masked = [index for index, mask in enumerate(masks) if mask is not None]
    shape.changed = list(scope.changed.values())
    shape.num_losses = len(scope.losses)
    return [
        *(value for value, tensor in zip(flat, are_tensors, strict=True) if tensor),
        *(mask for mask in masks if mask is not None),
        *(scope.state_mapping[id(variable)] for variable in shape.changed),
        *scope.losses,
    ]
