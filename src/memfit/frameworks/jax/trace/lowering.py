"""Lowers a training step for shapes, however it is jitted, and tells its failures in one message.

`jax.jit` and flax's `nnx.jit` lower themselves; a plain function and one of equinox's `filter_jit`, which takes shapes
for constants, are lowered from outside, with everything that is no array held fixed.
"""

import gc
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from memfit.core.errors import BadInput, MemfitError, StepFailed
from memfit.core.user_code import user_line
from memfit.frameworks.jax import internals
from memfit.frameworks.jax.trace.arguments import is_array

_VALUE_NEEDED = (
    "Under jit the values of arrays aren't known: use jnp.where or jax.lax.cond instead of `if`, "
    "and jax.debug.print instead of float(), .item() or numpy."
)
_LEAKED = (
    "Under jit a step must not keep arrays anywhere but in its results: return them, instead of "
    "appending them to a list or setting an attribute."
)
_HINTS = (
    (jax.errors.UnexpectedTracerError, _LEAKED),
    (jax.errors.ConcretizationTypeError, _VALUE_NEEDED),
    (jax.errors.TracerArrayConversionError, _VALUE_NEEDED),
    (jax.errors.TracerIntegerConversionError, _VALUE_NEEDED),
)


def name_of(step: Any) -> str:
    """What to call a step."""
    inner = getattr(step, "__wrapped__", None) or getattr(step, "fn", None) or getattr(step, "func", None) or step
    return str(getattr(inner, "__name__", type(step).__name__))


def argument_names(step: Any, count: int) -> list[str]:
    """Names of a step's arguments."""
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
    return plain + [f"argument {place + 1}" for place in range(len(plain), count)]


def check_call(step: Any, arguments: Sequence[Any]) -> None:
    """Refuses arguments that the step doesn't take."""
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise BadInput(
            f"the step {name_of(step)}{signature} can't be called with the {len(arguments)} arguments given: {error}. "
            f"Give them in order: memfit.estimate({name_of(step)}, *arguments)."
        ) from None


def lower(step: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """A step, plain or jitted by jax, flax.nnx or equinox, lowered by JAX for these arguments."""
    with explained(), quiet():
        if hasattr(step, "lower") and not _is_equinox(step):
            lowered = step.lower(*arguments)
            return getattr(lowered, "lowered", lowered)
        nnx = sys.modules.get("flax.nnx")
        if nnx is not None and not _is_equinox(step) and any(_is_nnx(argument) for argument in arguments):
            lowered = nnx.jit(step).lower(*arguments)
            return getattr(lowered, "lowered", lowered)
        return _from_outside(step, arguments)


def check_leaks(step: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Refuses a step that keeps arrays beyond its end: JAX would find out only when it runs for the second time."""
    if any(_is_nnx(argument) for argument in arguments) or _is_equinox(step):
        return
    run, arrays = _on_arrays(getattr(step, "__wrapped__", step), arguments)
    traces: list[weakref.ref[Any]] = []

    def watched(*values: Any) -> Any:
        traces.extend(weakref.ref(trace) for trace in map(internals.trace_of, values[:1]) if trace is not None)
        return run(*values)

    try:
        with quiet():
            jax.eval_shape(watched, *arrays)
    except Exception:
        # Numbers stay numbers here, which jit makes arrays of; what fails there too is told by `lower`.
        return
    # The trace itself may stay in caches of JAX: only its arrays tell.
    over = {id(trace()) for trace in traces if trace() is not None}
    if over:
        gc.collect()
        tracers = (one for one in gc.get_objects() if issubclass(type(one), jax.core.Tracer))
        if any(id(internals.trace_of(tracer)) in over for tracer in tracers):
            raise StepFailed(f"the step {name_of(step)} keeps an array that it computed. {_LEAKED}")


def _from_outside(step: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    run, arrays = _on_arrays(step, arguments)
    first = sum(map(is_array, jax.tree.leaves(arguments[0]))) if arguments else 0
    donated = [
        number
        for number in range(len(arrays))
        if getattr(step, "donate_first" if number < first else "donate_rest", False) is True
    ]
    return jax.jit(run, donate_argnums=tuple(donated)).lower(*arrays)


def _on_arrays(step: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """(the step as a function of arrays alone, those among its arguments)."""
    leaves, structure = jax.tree.flatten(tuple(arguments))
    places = [place for place, leaf in enumerate(leaves) if is_array(leaf)]

    def run(*arrays: Any) -> Any:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        result = step(*jax.tree.unflatten(structure, filled))
        # Functions among the leaves of a module of equinox are no results.
        return jax.tree.map(lambda value: value if is_array(value) or isinstance(value, int | float) else None, result)

    return run, [leaves[place] for place in places]


def _is_equinox(step: Any) -> bool:
    return type(step).__module__.partition(".")[0] == "equinox"


def _is_nnx(argument: Any) -> bool:
    return any(kind.__module__.startswith("flax.nnx") for kind in type(argument).__mro__)


@contextmanager
def quiet() -> Iterator[None]:
    """Without JAX's remarks about arguments whose memory no result could take: the figures show it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield


@contextmanager
def explained() -> Iterator[None]:
    """Turns any exception of the user's code into `StepFailed` with the line that raised it."""
    try:
        yield
    except MemfitError:
        raise
    except Exception as error:
        where, line = user_line(error)
        text = " ".join(str(error).split("\n\n")[0].split()) or "no message"
        hint = next((hint for kind, hint in _HINTS if isinstance(error, kind)), "")
        message = f"the step failed as JAX traced it{where}: {type(error).__name__}: {text}"
        raise StepFailed(message + (f"\n    {line}" if line else "") + (f"\n{hint}" if hint else "")) from error
