"""Training loops that a script on JAX writes itself: the step is compiled for the shapes of a turn, and nothing is run.

A jitted function that computes gradients is a step, or a part of one; it gives stand-ins instead of being run. Where
the gradients and the update of Keras's optimizer are called one after the other, the two together are the step. The
turn is over when the script comes back to a step that it has been at.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from types import MethodType
from typing import Any

import jax

from memfit.core.device import Device, Kind
from memfit.core.errors import StepFailed
from memfit.core.estimate import Note
from memfit.core.timeline import Category
from memfit.core.trace import Trace
from memfit.frameworks.jax.trace.arguments import leaves_of, size_of
from memfit.frameworks.jax.trace.compiled import read
from memfit.frameworks.jax.trace.job import SIMULATED, explained
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.script.loop_state import LoopState, is_framework
from memfit.frameworks.keras.trace.jax_backend import step_timeline

_EAGER = Note("eager", "the loop isn't compiled; an iteration is counted as if it were (jax.jit)")
_SEVERAL = Note("loop-functions", "an iteration of the loop calls several steps; the one that needs most is shown")


@dataclass(frozen=True, slots=True)
class _WatchedCall:
    """A function of the script and what it was called with."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def key(self) -> Any:
        """A key that stays equal when a loop makes the same function anew in each turn."""
        inner = inspect.unwrap(self.function)
        return getattr(inner, "__code__", None) or id(inner)


class JaxScriptLoop:
    """Watches a script until its loop has gone through one turn; `found`, called then, ends the script."""

    def __init__(self, found: Callable[["JaxScriptLoop"], None]) -> None:
        self._found = found
        self._state = LoopState()
        self._steps: dict[Any, _WatchedCall] = {}
        # Gradients that no update has used yet, and the leaves that stand in for them.
        self._waiting: tuple[_WatchedCall, list[Any]] | None = None
        self._kinds: dict[Any, tuple[bool, bool]] = {}
        self._is_eager = False
        self._num_gradients = 0
        self._num_updates = 0

    def watch(self) -> None:
        """Stands in front of `jax.jit`, `jax.grad` and the updates of optimizers until the process ends."""
        self._state.watch_updates(self._update)
        jax.jit = _transformation(jax.jit, self._jitted)
        for name in ("grad", "value_and_grad"):
            setattr(jax, name, _transformation(getattr(jax, name), self._gradient))

    def close(self) -> None:
        """The script has ended; what it has computed is all that there is."""
        if self._waiting is not None:
            self._steps.setdefault(self._waiting[0].key, self._waiting[0])
        if self._steps:
            # Models of a function of the script's are gone when the script has been left.
            given = jax.tree.leaves([(call.arguments, call.named) for call in self._steps.values()])
            self._state.settle({id(leaf): leaf for leaf in given})
            self._found(self)

    def _jitted(self, call: _WatchedCall) -> Any:
        """A jitted function is called: a step, a part of one, or anything else, which runs."""
        function = call.function
        if _is_traced((call.arguments, call.named)):
            return function(*call.arguments, **call.named)
        gradients, updates = self._num_gradients, self._num_updates
        shapes = function.eval_shape(*call.arguments, **call.named)  # type: ignore[attr-defined]
        kind = self._num_gradients > gradients, self._num_updates > updates
        has_gradients, has_update = self._kinds.setdefault(call.key, kind)
        if not has_gradients:
            return function(*call.arguments, **call.named)
        if not has_update:
            return self._kept_waiting(call, shapes)
        self._add(call)
        return jax.tree.map(_stand_in, shapes)

    def _gradient(self, call: _WatchedCall) -> Any:
        """What `jax.grad` and `jax.value_and_grad` made is called."""
        self._num_gradients += 1
        if _is_traced((call.arguments, call.named)):
            return call.function(*call.arguments, **call.named)
        self._is_eager = True
        call = _WatchedCall(call.function, _values(call.arguments), _values(call.named))
        return self._kept_waiting(call, jax.eval_shape(call.function, *call.arguments, **call.named))

    def _kept_waiting(self, call: _WatchedCall, shapes: Any) -> Any:
        if call.key in self._steps:
            self.close()
        if self._waiting is not None:
            # No update of Keras's has used them: the script updates by hand, or by another library.
            self._add(self._waiting[0])
            if call.key in self._steps:
                self.close()
        result = jax.tree.map(_stand_in, shapes)
        self._waiting = call, jax.tree.leaves(result)
        return result

    def _update(self, plain: Callable[..., Any], optimizer: Any, state: Any, gradients: Any, weights: Any) -> Any:
        """An optimizer is applied to gradients."""
        self._num_updates += 1
        if self._waiting is None or _is_traced((state, gradients, weights)):
            return plain(optimizer, state, gradients, weights)
        (call, made), self._waiting = self._waiting, None
        places = _places(jax.tree.leaves(gradients), made)
        structure = jax.tree.structure(gradients)
        state, weights = _values(state), _values(weights)
        leaves, whole = jax.tree.flatten((state, weights, call.arguments, call.named))
        # An array that is given twice is there once.
        unique = list({id(leaf): leaf for leaf in leaves}.values())
        order = {id(leaf): number for number, leaf in enumerate(unique)}
        chosen = [order[id(leaf)] for leaf in leaves]

        @wraps(call.function)
        def step(*given: Any) -> Any:
            state, weights, arguments, named = jax.tree.unflatten(whole, [given[number] for number in chosen])
            results = jax.tree.leaves(call.function(*arguments, **named))
            wanted = jax.tree.unflatten(structure, [results[place] for place in places])
            return results, plain(optimizer, state, wanted, weights)

        self._is_eager = True
        self._add(_WatchedCall(step, tuple(unique), {}))
        return weights, state

    def _add(self, call: _WatchedCall) -> None:
        if call.key in self._steps:
            self.close()
        self._steps[call.key] = call

    def trace(self, device: Device) -> Trace:
        """The trace of the turn on a device."""
        traces = [self._traced(call, device) for call in self._steps.values()]
        chosen = max(traces, key=lambda trace: trace.assigned_bytes or 0)
        return replace(chosen, notes=(*chosen.notes, _SEVERAL)) if len(traces) > 1 else chosen

    def _traced(self, call: _WatchedCall, device: Device) -> Trace:
        on_gpu = device.kind is Kind.CUDA
        function = call.function if hasattr(call.function, "lower") else jax.jit(call.function)
        with explained():
            lowered = function.lower(*call.arguments, **call.named)
            compiled = read(lowered, as_on_gpu=on_gpu)
        leaves = jax.tree.leaves((call.arguments, call.named))
        taken = jax.tree.leaves(lowered.in_avals)
        if len(leaves) != len(taken):
            # What is static is no argument of the program.
            leaves = [leaf for leaf in leaves if hasattr(leaf, "shape")]
        described = self._state.described(leaves)[: len(taken)]
        if len(known := leaves_of((*call.arguments, *call.named.values()))) == len(described):
            # An optimizer of optax keeps no variables.
            described = [
                (Category.OPTIMIZER_STATE, leaf.module) if leaf.is_optimizer else one
                for leaf, one in zip(known, described, strict=True)
            ]
        results = self._state.described(jax.tree.leaves(lowered.out_info))
        batch = (leaf for leaf, (kind, _) in zip(leaves, described, strict=False) if kind is Category.BATCH)
        notes = (_EAGER,) if self._is_eager else ()
        timeline = step_timeline(compiled, self._state.layers, described, results)
        step = compiled.trace(timeline, (*notes, *SIMULATED) if on_gpu else notes, sum(map(size_of, batch)))
        return self._state.trace(step)


class _WatchedFunction:
    """A transformed function, whose calls are watched; all else is its own."""

    def __init__(self, function: Callable[..., Any], watched: Callable[[_WatchedCall], Any]) -> None:
        self._function = function
        self._watched = watched

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._watched(_WatchedCall(self._function, arguments, named))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def _transformation(plain: Callable[..., Any], watched: Callable[[_WatchedCall], Any]) -> Callable[..., Any]:
    """A transformation of JAX that has the functions of the script watched, not those of libraries."""

    @wraps(plain)
    def transform(*given: Any, **options: Any) -> Any:
        if is_framework(inspect.stack(0)[1].filename):
            return plain(*given, **options)
        # Without a function it is a decorator with options.
        return _WatchedFunction(plain(*given, **options), watched) if given else partial(transform, **options)

    return transform


def _is_traced(tree: Any) -> bool:
    """Whether a function is called inside of one that is being traced."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _values(tree: Any) -> Any:
    """Arrays instead of variables of Keras."""
    return jax.tree.map(lambda leaf: leaf.value if isinstance(leaf, internals.Variable) else leaf, tree)


def _stand_in(shape: Any) -> Any:
    is_scalar = not shape.shape and jax.numpy.issubdtype(shape.dtype, jax.numpy.floating)
    return (jax.numpy.ones if is_scalar else jax.numpy.zeros)(shape.shape, shape.dtype)


def _places(gradients: list[Any], made: list[Any]) -> list[int]:
    """Where gradients are among the results that they come from: those of the same shape where they were changed."""
    numbers = {id(leaf): number for number, leaf in enumerate(made)}
    free = [number for number in range(len(made)) if all(leaf is not made[number] for leaf in gradients)]
    found = []
    for leaf in gradients:
        number = numbers.get(id(leaf))
        if number is None:
            number = next((one for one in free if made[one].shape == leaf.shape), None)
            if number is None:
                raise StepFailed("the gradients that are applied aren't those that were computed last.")
            free.remove(number)
        found.append(number)
    return found
