"""Recomputation in Keras: what a part of a model keeps is computed again in the backward pass.

`keras.RematScope` has to be there when layers are made and works on each layer by itself, whose input is then kept: of
a run of layers everything stays but what single layers hold inside. Here a layer with all that is in it, or a run of
layers of a Functional or Sequential model, is recomputed as one, on a model that exists, on all backends: the layer's
`call`, or the way in which the model runs through its graph, is replaced on the instance.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras

from memfit.core.errors import BadInput, BadModel
from memfit.core.patching import Replacement, replaced
from memfit.core.settings import Settings
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.model import layer_paths

# Non-trainable variables up to this size are taken for state: statistics and seeds, as opposed to frozen weights.
_STATE_ELEMENTS = 65_536
Recompute = Callable[..., list[Any]]
_TENSOR = object()
"""Stands where a tensor belongs."""
Undo = Callable[[], None]


class _UnknownVariable(BaseException):
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
                raise _UnknownVariable(variable)
        return value

    def add_update(self, update: tuple[Any, Any]) -> None:
        """A variable was assigned."""
        variable, value = update
        if id(variable) in self._fixed or (
            id(variable) not in self._given and internals.tensor_of(variable) is not None
        ):
            raise _UnknownVariable(variable)
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


class StatelessCall:
    """Layers whose call can be repeated, as a pure function of weights, state and inputs to outputs, state and losses.

    Layers change state while they run: batch norms count, seed generators move on, losses are added. A call that is
    made twice must do all of this once, and its second time must see the state of the first. So the layers run in a
    `keras.StatelessScope`; what they changed is put into practice afterwards, by whoever asked for the call, once.
    Other layers whose variables are used are found out.
    """

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
            except _UnknownVariable as unknown:
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
        places = [index for index, value in enumerate(flat) if keras.ops.is_tensor(value)]
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


def _flattened(outputs: Any, scope: _Scope, shape: _Shape) -> list[Any]:
    flat = keras.tree.flatten(outputs)
    are_tensors = [keras.ops.is_tensor(value) for value in flat]
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


def apply(settings: Settings, model: keras.Model) -> Undo:
    """Has the parts of `settings.checkpoint` computed again in the backward pass; returns what undoes it.

    Gradients, batch norms' statistics, dropout masks and added losses are those of the plain step. Parts are dotted
    paths of layers, or "first:last" for a run of layers of a Functional or Sequential model, in the order in which the
    model runs them.
    """
    recompute = _backend_recompute(model)
    stand_ins = []
    runs: dict[int, list[_RecomputedPart]] = {}
    parts = [part_at(model, path) for path in settings.checkpoint]
    _check_apart(parts)
    for part in parts:
        if part.graph is not None:
            runs.setdefault(id(part.graph), []).append(part)
        else:
            (layer,) = part.layers
            stand_ins.append(Replacement(layer, "call", _recomputed_call(layer, recompute)))
    for chosen in runs.values():
        graph = chosen[0].graph
        stand_ins.append(Replacement(graph, internals.RUN_THROUGH_GRAPH, _GraphRun(graph, chosen, recompute)))
    undo = ExitStack()
    undo.enter_context(replaced(stand_ins))
    return undo.close


@dataclass(frozen=True, slots=True)
class _RecomputedPart:
    """What is recomputed as one: a layer with all in it, or the calls `start` to `end` of a Functional `graph`."""

    path: str
    layers: list[Any]
    graph: Any = None
    start: int = 0
    end: int = 0


def part_at(model: keras.Model, path: str) -> _RecomputedPart:
    """What an entry of `Settings.checkpoint` names in the model; refuses what isn't there."""
    first, colon, last = path.partition(":")
    if not path:
        raise BadInput(
            "checkpoint names '' (the whole model), which would save nothing: its own recomputation needs as much as "
            "the plain step. Name layers inside of it."
        )
    if not colon:
        return _RecomputedPart(path, [_layer_at(model, path)])
    prefix, _, first_name = first.rpartition(".")
    last_prefix, _, last_name = last.rpartition(".")
    if prefix != last_prefix:
        raise BadInput(
            f"checkpoint names {path!r}, whose ends belong to different models ({prefix or 'the model itself'!r} and "
            f"{last_prefix or 'the model itself'!r}). Name two layers of one Functional or Sequential model."
        )
    graph = internals.graph_of(_layer_at(model, prefix) if prefix else model)
    if graph is None:
        raise BadInput(
            f"checkpoint names {path!r}, a run of layers, but {prefix or model.name!r} is no Functional or Sequential "
            "model, so that the order of its layers isn't known. Name single layers."
        )
    names = [node.operation.name for node in internals.nodes_of(graph)]
    for name in (first_name, last_name):
        if name not in names:
            raise BadInput(_nothing_at(path, name, names))
    start = names.index(first_name)
    if last_name not in names[start:]:
        raise BadInput(f"checkpoint names {path!r}, but {last_name!r} runs before {first_name!r}. Name them in order.")
    end = names.index(last_name, start) + 1
    called = {id(node.operation): node.operation for node in internals.nodes_of(graph)[start:end]}
    layers = [operation for operation in called.values() if isinstance(operation, keras.layers.Layer)]
    return _RecomputedPart(path, layers, graph, start, end)


def _layer_at(model: keras.Model, path: str) -> Any:
    paths = layer_paths(model)
    layer = next((one for one in internals.layers_of(model) if paths.get(id(one)) == path), None)
    if layer is None:
        parent = path.rpartition(".")[0]
        near = [other for other in paths.values() if other and other.rpartition(".")[0] == parent]
        raise BadInput(_nothing_at(path, path, near or [other for other in paths.values() if other]))
    return layer


def _nothing_at(path: str, name: str, names: list[str]) -> str:
    return (
        f"checkpoint names {path!r}, but there is no layer {name!r}. There are, for example: "
        f"{', '.join(names[:8]) or 'none'}. Was the plan made for another model?"
    )


def _check_apart(parts: Sequence[_RecomputedPart]) -> None:
    """Refuses parts that share layers or calls: what is recomputed inside of a recomputation runs three times."""
    owners: dict[int, str] = {}
    seen: set[str] = set()
    for part in parts:
        if part.path in seen:
            raise BadInput(f"checkpoint names {part.path!r} twice. Name each part once.")
        seen.add(part.path)
        for layer in part.layers:
            for inner in internals.layers_of(layer):
                other = owners.setdefault(id(inner), part.path)
                if other != part.path:
                    raise BadInput(
                        f"checkpoint names {other!r} and {part.path!r}, which share the layer {inner.name!r}. "
                        "Name only one of them, or runs that don't overlap."
                    )


def _recomputed_call(layer: Any, recompute: Callable[..., list[Any]]) -> Callable[..., Any]:
    plain = layer.call
    stateless = StatelessCall([layer])

    def call(*args: Any, **kwargs: Any) -> Any:
        return stateless(lambda given: plain(*given[0], **given[1]), (args, kwargs), recompute)

    with suppress(AttributeError, TypeError):
        # For those who look at the names of its arguments.
        call.__wrapped__ = plain  # type: ignore[attr-defined]
    return call


class _GraphRun:
    """Runs a graph, some of its calls as one that is recomputed."""

    def __init__(self, graph: Any, runs: Sequence[_RecomputedPart], recompute: Callable[..., list[Any]]) -> None:
        self._graph = graph
        self._plain = getattr(graph, internals.RUN_THROUGH_GRAPH)
        self._recompute = recompute
        nodes = internals.nodes_of(graph)
        self._steps: list[Any] = []
        position = 0
        for run in sorted(runs, key=lambda one: one.start):
            self._steps += nodes[position : run.start]
            self._steps.append(_Segment(graph, nodes, run))
            position = run.end
        self._steps += nodes[position:]

    def __call__(self, inputs: Any, operation_fn: Any = lambda op: op, call_fn: Any = None) -> Any:
        """Stands in for the graph's own method."""
        flat = keras.tree.flatten(inputs)
        if call_fn is not None or any(isinstance(value, keras.KerasTensor) for value in flat):
            return self._plain(inputs, operation_fn=operation_fn, call_fn=call_fn)
        values = {id(symbol): value for symbol, value in zip(self._graph.inputs, flat, strict=False)}
        call = partial(_called, self._graph, operation_fn)
        for step in self._steps:
            if isinstance(step, _Segment):
                step(values, call, self._recompute)
            else:
                call(step, values)
        missing = [symbol.name for symbol in self._graph.outputs if id(symbol) not in values]
        if missing:
            raise BadModel(f"the outputs {', '.join(missing)} of {self._graph.name!r} don't depend on its inputs.")
        outputs = [values[id(symbol)] for symbol in self._graph.outputs]
        return keras.tree.pack_sequence_as(internals.structure_of(self._graph)[1], outputs)


def _called(graph: Any, operation_fn: Any, node: Any, values: dict[int, Any]) -> None:
    """Makes one call of a graph, if all that it takes is there."""
    if any(id(symbol) not in values for symbol in node.input_tensors):
        return
    args, kwargs = node.arguments.fill_in(values)
    outputs = operation_fn(internals.operation_of(graph, node))(*args, **kwargs)
    for symbol, value in zip(node.outputs, keras.tree.flatten(outputs), strict=False):
        values[id(symbol)] = value


class _Segment:
    """Calls of a graph that are recomputed as one: what they take from before, and what those after them take."""

    def __init__(self, graph: Any, nodes: list[Any], run: _RecomputedPart) -> None:
        self._nodes = nodes[run.start : run.end]
        made = {id(symbol) for node in self._nodes for symbol in node.outputs}
        later = {id(symbol) for node in nodes[run.end :] for symbol in node.input_tensors}
        later |= {id(symbol) for symbol in graph.outputs}
        self._takes = list({id(s): s for node in self._nodes for s in node.input_tensors if id(s) not in made})
        self._gives = list({id(s): s for node in self._nodes for s in node.outputs if id(s) in later})
        self._stateless = StatelessCall(run.layers)

    def __call__(self, values: dict[int, Any], call: Callable[..., None], recompute: Callable[..., list[Any]]) -> None:
        """Adds what the calls make to `values`."""
        if any(key not in values for key in self._takes):
            for node in self._nodes:
                call(node, values)
            return

        def run(taken: list[Any]) -> list[Any]:
            inner = dict(zip(self._takes, taken, strict=True))
            for node in self._nodes:
                call(node, inner)
            return [inner[key] for key in self._gives]

        given = self._stateless(run, [values[key] for key in self._takes], recompute)
        values.update(zip(self._gives, given, strict=True))


def _backend_recompute(model: keras.Model) -> Callable[..., list[Any]]:
    """How the backend repeats a pure function in the backward pass."""
    name = keras.backend.backend()
    if name == "jax":
        from memfit.frameworks.jax.apply.recomputation import recomputed as recomputed_by_jax

        return recomputed_by_jax
    if name == "tensorflow":
        from memfit.frameworks.tensorflow.apply.recomputation import recomputed as recomputed_by_tensorflow

        def recompute(*args: Any) -> list[Any]:
            return recomputed_by_tensorflow(*args, compiled=bool(model.jit_compile) and not model.run_eagerly)

        return recompute
    return _recomputed_by_torch


def _recomputed_by_torch(
    function: Callable[..., list[Any]], weights: list[Any], trained: list[bool], inputs: list[Any]
) -> list[Any]:
    import torch.utils.checkpoint

    del trained
    # State is changed in place after the first computation; the second one must see what was there before.
    inputs = [value.clone() if isinstance(value, torch.nn.Parameter) else value for value in inputs]
    if not torch.is_grad_enabled():
        return function(weights, inputs)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    before = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
    try:
        results: list[Any] = torch.utils.checkpoint.checkpoint(function, weights, inputs, use_reentrant=False)
    except BaseException:
        # Tried again, it draws the same numbers.
        torch.set_rng_state(before[0])
        for device, state in zip(devices, before[1], strict=True):
            torch.cuda.set_rng_state(state, device)
        raise
    return results
