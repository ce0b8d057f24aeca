"""Training loops that a script on TensorFlow writes itself: a turn of the loop becomes a graph, nothing is computed.

A `tf.function` that computes gradients is traced instead of run. A loop that runs eagerly is recorded: from its first
`tf.GradientTape` on, operators go into a graph, and what the script reads meanwhile (a loss that it prints) is a
stand-in. The turn is over when the script comes back to a tape or to a function that it has been at.
"""

import gc
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

from memfit.core.device import Device, Kind
from memfit.core.errors import StepFailed
from memfit.core.estimate import Note
from memfit.core.patching import put_in_front
from memfit.core.timeline import Category
from memfit.core.trace import Trace
from memfit.frameworks.keras import internals as keras_internals
from memfit.frameworks.keras.script.loop_state import LoopState, is_framework
from memfit.frameworks.tensorflow import internals
from memfit.frameworks.tensorflow.trace.tracing import StepVariable, trace_step

_EAGER = Note("eager", "the loop runs eagerly; an iteration is counted as a graph (a tf.function)")
_SEVERAL = Note("loop-functions", "an iteration of the loop calls several functions; the one that needs most is shown")
# What a script makes of a data set in each epoch.
_DATA = ("__iter__", "take", "skip", "shuffle", "repeat", "batch", "map", "prefetch", "shard", "cache", "enumerate")


@dataclass(frozen=True, slots=True)
class _Function:
    """One function of a turn: what it computes, and whether XLA compiles it."""

    function: Any
    jit_compile: bool = False


class TensorFlowScriptLoop:
    """Watches a script until its loop has gone through one turn; `found`, called then, ends the script."""

    def __init__(self, found: Callable[["TensorFlowScriptLoop"], None]) -> None:
        self._found = found
        self._state = LoopState()
        self._functions: dict[Any, _Function | None] = {}
        self._places: set[tuple[str, int]] = set()
        self._graph: Any = None
        self._looked_at: list[Any] = []
        self._recording = ExitStack()
        self._busy = False

    def watch(self) -> None:
        """Stands in front of tapes, functions and data sets from now until the process ends."""
        self._state.watch_updates()
        put_in_front(type(tf.function(lambda: None)), "__call__", self._call)
        put_in_front(tf.GradientTape, "__enter__", self._enter)
        for name in _DATA:
            put_in_front(tf.data.Dataset, name, self._really)
        put_in_front(type(iter(tf.data.Dataset.range(1))), "__next__", self._really)
        put_in_front(type(tf.Variable(0.0)), "numpy", self._really)

    def close(self) -> None:
        """The script has ended; a turn that was begun is all that there is."""
        if self._graph is not None or self._turns():
            self._end()

    def _call(self, plain: Callable[..., Any], function: Any, *arguments: Any, **named: Any) -> Any:
        """A `tf.function` is called: traced where it trains, run where it doesn't."""
        if self._busy or not tf.executing_eagerly():
            return plain(function, *arguments, **named)
        if function in self._functions:
            if self._functions[function] is not None:
                self._end()
            return plain(function, *arguments, **named)
        self._busy = True
        try:
            concrete = function.get_concrete_function(*arguments, **named)
            if not _has_gradients(concrete.graph):
                self._functions[function] = None
                return plain(function, *arguments, **named)
            if any(not tensor.shape.is_fully_defined() for tensor in concrete.inputs if tensor.dtype != tf.resource):
                # Its signature leaves sizes open; this batch has some.
                concrete = tf.function(function.python_function).get_concrete_function(*arguments, **named)
        finally:
            self._busy = False
        self._functions[function] = _Function(concrete, internals.is_compiled(function))
        return tf.nest.map_structure(_stand_in, concrete.structured_outputs)

    def _enter(self, plain: Callable[..., Any], tape: Any) -> Any:
        """A tape begins to record: where the script runs eagerly, so does the graph."""
        caller = inspect.stack(0)[2]
        if not self._busy and not is_framework(caller.filename):
            place = (caller.filename, caller.lineno)
            if self._graph is not None and place in self._places and _graph_now() is self._graph:
                self._end()
            if tf.executing_eagerly() and self._graph is None:
                self._record()
            self._places.add(place)
        return plain(tape)

    def _really(self, plain: Callable[..., Any], data: Any, *arguments: Any, **named: Any) -> Any:
        """Data are drawn, and values of variables read, as they are, whatever is recorded."""
        if self._graph is None or _graph_now() is not self._graph:
            return plain(data, *arguments, **named)
        with tf.init_scope():
            return plain(data, *arguments, **named)

    def _record(self) -> None:
        self._graph, self._order = internals.new_graph("turn")
        self._recording.enter_context(self._graph.as_default())
        self._recording.enter_context(self._order)
        for name in _READS:
            self._replace_read(type(tf.compat.v1.placeholder(tf.float32, ())), name)

    def _replace_read(self, kind: Any, name: str) -> None:
        plain = getattr(kind, name, None)

        def method(tensor: Any, *arguments: Any, **named: Any) -> Any:
            if tensor.graph is self._graph and _graph_now() is self._graph:
                self._looked_at.append(tensor)
                return _READS[name](_value(tensor), *arguments, **named)
            if plain is None:
                raise AttributeError(f"a tensor of a graph has no {name}")
            return plain(tensor, *arguments, **named)

        setattr(kind, name, method)

    def _end(self) -> None:
        """The turn is complete."""
        self._busy = True
        if self._graph is not None:
            graph = self._graph
            graph.outputs.extend(self._looked_at)
            self._recording.close()
            graph.control_outputs.extend(self._order.ops_which_must_run)
            # Only a traced function is told which variables it uses.
            captured = {id(outer) for outer, _ in graph.captures}
            variables = (one for one in gc.get_objects() if issubclass(type(one), tf.Variable))
            graph.variables = [one for one in variables if id(getattr(one, "handle", None)) in captured]
            if _has_gradients(graph):
                self._functions[graph] = _Function(SimpleNamespace(graph=graph, inputs=graph.inputs))
        functions = self._turns()
        if functions:
            # Models and variables of a function of the script's are gone when the script has been left.
            self._state.settle({id(v.handle): v for one in functions for v in one.function.graph.variables})
            self._found(self)

    def _turns(self) -> list[_Function]:
        return [function for function in self._functions.values() if function is not None]

    def trace(self, device: Device) -> Trace:
        """The trace of the turn on a device."""
        functions = self._turns()
        state = self._state
        held = [StepVariable(keras_internals.tensor_of(one.variable), one.category, one.module) for one in state.held]
        held += [StepVariable(one, Category.PARAMETER if one.trainable else Category.BUFFER) for one in state.rest]
        options: dict[str, Any] = {
            "on_gpu": device.kind is Kind.CUDA,
            "optimizers": [str(optimizer.name) for optimizer in state.optimizers],
            "layers": state.layers,
        }
        traces = [(trace_step(one.function, held, jit_compile=one.jit_compile, **options), one) for one in functions]
        chosen, most = max(traces, key=lambda traced: traced[0].timeline.peak()[1])
        captured = {id(variable.handle) for variable in most.function.graph.variables}
        given = [t for t in most.function.inputs if t.dtype != tf.resource and id(t) not in captured]
        notes = [*chosen.notes]
        notes += [_EAGER] if self._graph is not None else []
        notes += [_SEVERAL] if len(traces) > 1 else []
        batch_bytes = sum(int(np.prod(tensor.shape)) * tensor.dtype.size for tensor in given)
        return state.trace(replace(chosen, notes=tuple(notes), batch_bytes=batch_bytes))


def _has_gradients(graph: Any) -> bool:
    return any("gradient_tape/" in operation.name for operation in graph.get_operations())


def _graph_now() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _stand_in(tensor: Any) -> Any:
    """A tensor of the shape that a function gives."""
    return tf.constant(_value(tensor)) if isinstance(tensor, tf.Tensor | tf.TensorSpec) else tensor


def _value(tensor: Any) -> Any:
    if tensor.shape.rank is None:
        raise StepFailed(f"the script reads {tensor.name!r}, whose shape is known only when it runs.")
    sizes = [1 if size is None else int(size) for size in tensor.shape]
    return (np.ones if tensor.dtype.is_floating else np.zeros)(sizes, tensor.dtype.as_numpy_dtype)


_READS: dict[str, Callable[..., Any]] = {
    "numpy": lambda value: value,
    "__array__": lambda value, *_, **__: value,
    "__float__": float,
    "__int__": int,
    "__bool__": bool,
    "__index__": int,
    "__format__": lambda value, form: format(value.item() if value.ndim == 0 else value, form),
    "__iter__": lambda value: iter([tf.constant(part) for part in value]),
}
"""How a script gets at the values of a tensor."""
