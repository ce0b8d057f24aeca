"""What of a Keras model can be recomputed in the backward pass, and what each part would save and cost.

A run of layers is worth recomputing where little goes in and much is kept inside. In a model with a graph the places
between two calls are looked at: where one tensor is all that later calls take, apart from long skips such as those of
a U-Net, which are kept in any case, the model can be cut. So a residual block, a dense layer with its concatenation, or
one level of a U-Net is a unit. In chains that could be cut anywhere the narrow places are chosen. In other models the
layers that are made of layers are the units, such as the blocks of a transformer.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras

from memfit.core.errors import BadModel
from memfit.core.patching import around, replaced
from memfit.core.step_facts import StepPart
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.batch import item_bytes
from memfit.frameworks.keras.model import layer_paths

# Two, so that no dimension of 1 is taken for something else.
_BATCH = 2
_VIEWS = (keras.layers.Reshape, keras.layers.Flatten, keras.layers.InputLayer)
# The backward pass of these needs their result alone.
_BY_RESULT = ("linear", "relu", "relu6", "sigmoid", "tanh", "softmax")
# A tensor that waits for longer than this many calls, and than this part of all calls, is a skip.
_SKIP_CALLS, _SKIP_SHARE = 20, 0.25
# Chains are cut after this many calls at the latest: whatever a unit keeps is there at once in its recomputation.
_CHAIN_CALLS = 24
# A place in a chain is narrow if what follows is so many times as wide.
_WIDENS = 1.5
# A layer of layers that keeps more of the model than this is looked into rather than taken as one.
_LARGE_SHARE = 0.6
# What keeps less beside its inputs than this part of them isn't worth its time.
_LEAST_SHARE = 0.25


@dataclass(slots=True)
class LayerCall:
    """One call of a layer, or of a model."""

    layer: Any
    inputs: list[tuple[int, ...]] = field(default_factory=list)
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    made_bytes: int = 0  # per sample, of what it returned
    inner_bytes: int = 0  # per sample, of what it keeps beside inputs and outputs
    flops: int = 0  # per sample, of the forward pass; 0 where unknown
    calls: "list[LayerCall]" = field(default_factory=list)


def recorded(model: keras.Model, inputs: Any) -> LayerCall | None:
    """The call of the whole model on a batch of these inputs; None where Keras can't follow it without running it.

    The model is called on symbolic tensors, as Keras does to learn shapes, while every call of a layer is noted down.
    What a layer keeps inside is counted for the kinds whose inner tensors are large (attention, recurrent layers,
    activations); a layer of others keeps what these make. The numbers compare parts of a model with each other; what a
    step really takes is for the estimate to say.
    """

    def symbol(value: Any) -> Any:
        if value is None:
            return None
        sizes = (1 if length is None else int(length) for length in tuple(value.shape)[1:])
        return keras.KerasTensor((_BATCH, *sizes), dtype=str(keras.backend.standardize_dtype(value.dtype)))

    symbolic = keras.tree.map_structure(symbol, inputs)
    top = LayerCall(model)
    with _noting(top):
        try:
            internals.compute_output_spec(model, symbolic)
        except Exception:
            # Layers of users may do what has no symbols; the plain step shows whatever is really wrong.
            return None
    return top.calls[0] if top.calls else None


@contextmanager
def _noting(top: LayerCall) -> Iterator[None]:
    """Notes down the calls of layers while it lasts."""
    stack = [top]

    def call(plain: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
        one = LayerCall(layer)
        stack.append(one)
        try:
            outputs = plain(layer, *args, **kwargs)
        finally:
            stack.pop()
        _fill(one, (args, kwargs), outputs)
        stack[-1].calls.append(one)
        return outputs

    with replaced([around(keras.layers.Layer, "__call__", call)]):
        yield


def _fill(one: LayerCall, inputs: Any, outputs: Any) -> None:
    tensors = [value for value in keras.tree.flatten(outputs) if hasattr(value, "shape") and hasattr(value, "dtype")]
    one.inputs, one.outputs = (
        [tuple(1 if length is None else int(length) for length in value.shape) for value in given]
        for given in ((value for value in keras.tree.flatten(inputs) if hasattr(value, "shape")), tensors)
    )
    widths = [item_bytes(str(keras.backend.standardize_dtype(value.dtype))) for value in tensors]
    if not isinstance(one.layer, _VIEWS):
        sizes = zip(one.outputs, widths, strict=True)
        one.made_bytes = sum(math.prod(shape) * width for shape, width in sizes) // _BATCH
    width = widths[0] if widths else 4
    elements, operations = _own_work(one)
    if elements is None:
        one.inner_bytes = sum(part.made_bytes + part.inner_bytes for part in one.calls)
        one.flops = sum(part.flops for part in one.calls)
    else:
        one.inner_bytes, one.flops = elements * width // _BATCH, operations // _BATCH
        one.calls = []


def _own_work(one: LayerCall) -> tuple[int | None, int]:
    """(elements that a layer of a known kind keeps inside, operations), of the whole batch; None for other kinds."""
    layer, layers = one.layer, keras.layers
    if not one.inputs or not one.outputs:
        return None, 0
    given, made = math.prod(one.inputs[0]), math.prod(one.outputs[0])
    if isinstance(layer, layers.MultiHeadAttention | layers.GroupQueryAttention):
        return _attention(one)
    if isinstance(layer, layers.RNN):
        return _recurrent(one)
    kernel = getattr(layer, "kernel", None)
    if isinstance(layer, layers.EinsumDense):
        # Terms of each sum: the sizes of the kernel's letters that the result lacks.
        sides, _, result = layer.equation.replace("...", "").partition("->")
        sizes = zip(sides.split(",")[1], layer.kernel.shape, strict=False)
        return _activation(layer, made), 2 * made * math.prod(size for letter, size in sizes if letter not in result)
    if isinstance(layer, layers.Dense):
        return _activation(layer, made), 2 * made * one.inputs[0][-1]
    if kernel is None:
        return (None, 0) if one.calls else (_activation(layer, made) if hasattr(layer, "activation") else 0, 0)
    window = math.prod(kernel.shape[:-2])
    if "Transpose" in type(layer).__name__:
        return _activation(layer, made), 2 * given * window * kernel.shape[-2]
    if "Depthwise" in type(layer).__name__:
        return _activation(layer, made), 2 * made * window
    if "Conv" in type(layer).__name__:
        return _activation(layer, made), 2 * made * window * kernel.shape[-2]
    return (None, 0) if one.calls else (0, 0)


def _activation(layer: Any, made: int) -> int:
    """What an activation function inside of a layer keeps beside its result."""
    name = getattr(getattr(layer, "activation", None), "__name__", "linear")
    return 0 if name in _BY_RESULT else made


def _attention(one: LayerCall) -> tuple[int, int]:
    """Query, key, value and context, and twice the scores: before and after the softmax."""
    layer = one.layer
    query, key = one.inputs[0], one.inputs[min(1, len(one.inputs) - 1)]
    heads = int(getattr(layer, "num_heads", 0) or getattr(layer, "num_query_heads", 1))
    width = int(getattr(layer, "key_dim", 0) or getattr(layer, "head_dim", 1))
    here, there = math.prod(query[:-1]), math.prod(key[:-1])
    scores = heads * here * (there // query[0])
    projected = heads * width * (2 * here + 2 * there)
    operations = 2 * projected * query[-1] + 4 * scores * width
    return projected + 2 * scores, operations


def _recurrent(one: LayerCall) -> tuple[int, int]:
    """The gates of every step before and after their functions, and the states."""
    layer, given = one.layer, one.inputs[0]
    units = int(getattr(layer, "units", 0) or getattr(getattr(layer, "cell", None), "units", 0) or 0)
    gates = {"LSTM": 4, "GRU": 3}.get(type(layer).__name__, 1)
    steps = given[0] * given[1]
    return steps * units * (2 * gates + 2), 2 * steps * gates * units * (given[-1] + units)


def units(model: keras.Model, inputs: Any = None) -> tuple[StepPart, ...]:
    """What can be recomputed, in the order of execution; no two overlap. Their work is in floating-point operations.

    Subclassed models and unknown sizes need a batch of inputs: arrays, or anything with `shape` and `dtype`.
    """
    graph = internals.graph_of(model)
    if inputs is None and graph is None:
        raise BadModel(
            f"the model {model.name!r} doesn't say what it takes, since it is no Functional or Sequential model. "
            "Give a batch of its inputs."
        )
    call = recorded(model, internals.structure_of(graph)[0] if inputs is None else inputs)
    if call is None and graph is None:
        raise BadModel(
            f"the parts of {model.name!r} can't be found: Keras can't follow the model without running it. "
            "Name layers to recompute yourself, or leave recomputation out."
        )
    return tuple(unit for unit in _UnitFinder(model, call).inside(model, call) if unit.kept_bytes > 0)


@dataclass(frozen=True, slots=True)
class _Step:
    """One call of a graph."""

    node: Any
    call: LayerCall | None  # what was noted down of it; None for operations that aren't layers
    made_bytes: int  # per sample, of what it returns
    inner_bytes: int  # per sample, of what it keeps beside inputs and outputs
    flops: int  # per sample, of its forward pass


class _UnitFinder:
    """Finds the units of one model."""

    def __init__(self, model: keras.Model, call: LayerCall | None) -> None:
        self._paths = layer_paths(model)
        self._large_bytes = 0 if call is None else _LARGE_SHARE * call.inner_bytes
        # Layers that are part of a unit: a second call of a shared layer belongs to no other one.
        self._used: set[int] = set()

    def inside(self, layer: Any, call: LayerCall | None) -> Iterator[StepPart]:
        """The units inside of a layer."""
        graph = internals.graph_of(layer)
        if graph is not None:
            steps, start = _steps(graph, call), 0
            for end in _cuts(steps, graph):
                yield from self._of_run(steps, start, end, graph)
                start = end
        elif call is not None:
            for part in call.calls:
                yield from self._of_call(part)

    def _of_call(self, call: LayerCall) -> Iterator[StepPart]:
        """A layer that is called by one that isn't a graph: as one, or what is inside."""
        if id(call.layer) in self._used or id(call.layer) not in self._paths or not call.inner_bytes:
            return
        if call.inner_bytes > self._large_bytes and (call.calls or internals.graph_of(call.layer) is not None):
            found = list(self.inside(call.layer, call))
            if len(found) > 1:
                yield from found
                return
        self._used.add(id(call.layer))
        width = item_bytes(str(getattr(call.layer, "compute_dtype", None) or "float32"))
        taken = sum(math.prod(shape[1:]) for shape in call.inputs) * width
        if call.inner_bytes >= _LEAST_SHARE * taken:
            yield StepPart(self._paths[id(call.layer)], call.inner_bytes, call.flops)

    def _of_run(self, steps: list[_Step], start: int, end: int, graph: Any) -> Iterator[StepPart]:
        """The unit that calls from `start` to `end` make; none where it would save little."""
        # Embeddings keep little: what they give on is kept anyway, and their table is a weight.
        embeddings = [i for i in range(start, end) if isinstance(steps[i].node.operation, keras.layers.Embedding)]
        start = embeddings[-1] + 1 if embeddings else start
        if start == end:
            return
        run = steps[start:end]
        only = run[0].call if len(run) == 1 and run[0].inner_bytes else None
        if only is not None and only.calls and only.inner_bytes > self._large_bytes:
            found = list(self.inside(run[0].node.operation, only))
            if len(found) > 1:
                yield from found
                return
        called = {id(step.node.operation): step.node.operation for step in run}
        layers = [operation for operation in called.values() if isinstance(operation, keras.layers.Layer)]
        if any(id(layer) in self._used for layer in layers) or not all(id(layer) in self._paths for layer in layers):
            return
        kept, taken = _kept(run, steps[end:], graph)
        if kept < max(1, _LEAST_SHARE * taken) or not layers:
            return
        self._used.update(map(id, layers))
        path = self._paths[id(layers[0])]
        if len(run) > 1:
            prefix = path.rpartition(".")[0]
            ends = [step.node.operation.name for step in (run[0], run[-1])]
            names = [step.node.operation.name for step in steps]
            if any(names.count(name) > 1 for name in ends):
                # A run that begins or ends with a further call of a shared layer has no name.
                return
            path = ":".join(f"{prefix}.{name}".lstrip(".") for name in ends)
        yield StepPart(path, kept, sum(step.flops for step in run))


def _steps(graph: Any, call: LayerCall | None) -> list[_Step]:
    """The calls of a graph with what was noted down of each."""
    noted: dict[int, list[LayerCall]] = {}
    for part in [] if call is None else call.calls:
        noted.setdefault(id(part.layer), []).append(part)
    steps = []
    for node in internals.nodes_of(graph):
        calls = noted.get(id(node.operation), [])
        one = calls.pop(0) if calls else None
        made = sum(_symbol_bytes(symbol) for symbol in node.outputs) if one is None else one.made_bytes
        inner, flops = (0, 0) if one is None else (one.inner_bytes, one.flops)
        steps.append(_Step(node, one, made, inner, flops))
    return steps


def _symbol_bytes(symbol: Any) -> int:
    sizes = [1 if length is None else int(length) for length in symbol.shape[1:]]
    return math.prod(sizes) * item_bytes(str(symbol.dtype))


def _kept(run: Sequence[_Step], later: Sequence[_Step], graph: Any) -> tuple[int, int]:
    """Bytes that the plain step keeps inside of a run, and bytes that the run takes from before."""
    made = {id(symbol) for step in run for symbol in step.node.outputs}
    needed = {id(symbol) for step in later for symbol in step.node.input_tensors}
    needed |= {id(symbol) for symbol in graph.outputs}
    kept = 0
    for step in run:
        given_on = all(id(symbol) in needed for symbol in step.node.outputs)
        kept += step.inner_bytes + (0 if given_on else step.made_bytes)
    taken = {id(s): s for step in run for s in step.node.input_tensors if id(s) not in made}
    return kept, sum(map(_symbol_bytes, taken.values()))


def _cuts(steps: list[_Step], graph: Any) -> list[int]:
    """Ends of the runs that a graph is cut into."""
    last_use = {id(symbol): index for index, step in enumerate(steps) for symbol in step.node.input_tensors}
    alive: dict[int, int] = {id(symbol): _symbol_bytes(symbol) for symbol in graph.inputs}
    born = dict.fromkeys(alive, -1)
    limit = max(_SKIP_CALLS, _SKIP_SHARE * len(steps))
    narrow: list[tuple[int, int]] = []
    for index, step in enumerate(steps):
        # Masks are small and go all the way.
        for symbol in (one for one in step.node.outputs if str(one.dtype) != "bool"):
            alive[id(symbol)] = max(step.made_bytes // max(1, len(step.node.outputs)), 1)
            born[id(symbol)] = index
        alive = {key: size for key, size in alive.items() if last_use.get(key, -1) > index}
        short = [size for key, size in alive.items() if last_use[key] - born[key] <= limit]
        # Where nothing but skips is alive the branch begins anew.
        if len(short) <= 1:
            narrow.append((index + 1, sum(short)))
    ends = _chosen(narrow, steps)
    return ends if ends[-1:] == [len(steps)] else [*ends, len(steps)]


def _chosen(narrow: list[tuple[int, int]], steps: list[_Step]) -> list[int]:
    """Of the places where a graph can be cut: the narrow ones of each chain, and those around layers of layers."""
    chosen: list[int] = []
    chain = 0
    for number, (place, size) in enumerate(narrow):
        before = narrow[number - 1] if number else (0, -1)
        after = narrow[number + 1] if number + 1 < len(narrow) else (len(steps) + 1, -1)
        ends_chain = after[0] != place + 1
        # The last of equally narrow places: what follows is wider.
        is_narrow = ends_chain or (_WIDENS * size < after[1] and (before[0] != place - 1 or size <= before[1]))
        # Next to a call that is worth recomputing by itself.
        is_heavy = any(step.inner_bytes > 2 * step.made_bytes > 0 for step in steps[place - 1 : place + 1])
        chain = 1 + chain if before[0] == place - 1 else 1
        if is_narrow or is_heavy or chain >= _CHAIN_CALLS:
            chosen.append(place)
            chain = 0
    return chosen
