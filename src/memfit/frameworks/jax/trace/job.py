"""Opens a job of JAX: a training step and its arguments, compiled for shapes at any batch size."""

import gc
import inspect
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memfit.core.device import Device, Kind
from memfit.core.errors import BadBatch, BadInput, MemfitError, StepFailed
from memfit.core.estimate import Note
from memfit.core.job import Job
from memfit.core.settings import Settings
from memfit.core.step_facts import forward_seconds
from memfit.core.timeline import Category, Phase
from memfit.core.trace import Trace
from memfit.core.user_code import user_line
from memfit.frameworks.jax import internals
from memfit.frameworks.jax.apply import training
from memfit.frameworks.jax.apply.marked import BlockCall, num_bytes
from memfit.frameworks.jax.trace import arguments as roles
from memfit.frameworks.jax.trace.arguments import is_array
from memfit.frameworks.jax.trace.compiled import compile_step, read

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
_KINDS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)
SIMULATED = (
    Note(
        "xla-cpu-layout",
        "simulated from XLA's layout for this machine's CPU. On a GPU, XLA fuses and orders instructions "
        "differently, which changes temporaries; arguments and results are the same",
    ),
    Note("xla-library-workspaces", "workspaces of cuDNN and cuBLAS, which XLA picks on the GPU itself, aren't counted"),
    Note(
        "xla-preallocation",
        "JAX takes 75% of a GPU's memory when it starts (XLA_PYTHON_CLIENT_PREALLOCATE and "
        "XLA_PYTHON_CLIENT_MEM_FRACTION change that); what is shown is what the step needs of it",
    ),
)
_WIDENED = Note(
    "xla-cpu-bfloat16",
    "XLA for CPU widens some bfloat16 and float16 arithmetic to float32; on a GPU such temporaries are half as large",
)
_ARGUMENTS = (Category.PARAMETER, Category.BUFFER, Category.OPTIMIZER_STATE, Category.BATCH)
_RESULTS = (Category.PARAMETER, Category.OPTIMIZER_STATE, Category.TEMPORARY)
"""What a step takes and gives, in order."""


def name_of(step: Any) -> str:
    """The name of a step in reports."""
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
    """A step, plain or jitted by jax, flax.nnx or equinox, lowered by JAX for these arguments.

    `jax.jit` and flax's `nnx.jit` lower themselves; a plain function and one of equinox's `filter_jit`, which takes
    shapes for constants, are lowered from outside, with everything that is no array held fixed.
    """
    with explained(), quiet():
        if hasattr(step, "lower") and not _is_equinox(step):
            lowered = step.lower(*arguments)
            return getattr(lowered, "lowered", lowered)
        nnx = sys.modules.get("flax.nnx")
        if nnx is not None and not _is_equinox(step) and any(_is_nnx(argument) for argument in arguments):
            lowered = nnx.jit(step).lower(*arguments)
            return getattr(lowered, "lowered", lowered)
        run, arrays = _on_arrays(step, arguments)
        first = sum(map(is_array, jax.tree.leaves(arguments[0]))) if arguments else 0
        donated = [
            number
            for number in range(len(arrays))
            if getattr(step, "donate_first" if number < first else "donate_rest", False) is True
        ]
        return jax.jit(run, donate_argnums=tuple(donated)).lower(*arrays)


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


def is_step(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
    """Whether a function and its arguments are a step of JAX: it is jitted, or there are arrays or shapes in them."""
    if hasattr(function, "lower") and hasattr(function, "trace"):
        return True
    return any(isinstance(leaf, _KINDS) for leaf in jax.tree.leaves(arguments))


def open_job(job: Job, device: Device, batch_size: int | None = None) -> Any:
    """The step, checked and ready to be compiled, at its own batch size or the given one.

    A loss function with an optimizer of optax is one whose step is made here.
    """
    if hasattr(job.optimizer, "init") and hasattr(job.optimizer, "update"):
        return OpenTraining(job, device, batch_size)
    return OpenStep(job, device, batch_size)


class OpenStep:
    """A training step whose arguments are at hand: the job's model is the step, its batch the tuple of arguments."""

    def __init__(self, job: Job, device: Device, batch_size: int | None = None) -> None:
        self._step = job.model
        self._device = device
        self._arguments = _checked_arguments(job)
        self.name = job.name or name_of(self._step)
        self._is_simulated_gpu = device.kind is Kind.CUDA and jax.default_backend() == "cpu"
        self._lowered: dict[int | None, Any] = {}
        self._traces: dict[int | None, Trace] = {}
        if batch_size is not None and batch_size < 1:
            raise BadBatch(f"a batch size must be at least 1, but {batch_size} was given.")
        check_leaks(self._step, self._arguments)
        lowered = self._lower(self._arguments)
        self._leaves = roles.assign(self._arguments, lowered.out_info)
        roles.check_batch(self._leaves)
        self.batch_size = roles.batch_size_of(self._leaves)
        self._lowered[self.batch_size] = lowered
        if batch_size is not None and batch_size != self.batch_size:
            if self.batch_size is None:
                raise BadBatch(
                    "the arrays of the batch share no first dimension, so no batch size can be set. "
                    "Give arguments whose arrays do."
                )
            self._arguments, self._leaves = self._at(batch_size)
            self._lowered.clear()
            self.batch_size = batch_size
        names = argument_names(self._step, len(self._arguments))
        is_narrow = any(str(leaf.dtype) in ("bfloat16", "float16") for leaf in self._leaves)
        remarks = (*SIMULATED, *((_WIDENED,) if is_narrow else ())) if self._is_simulated_gpu else ()
        self.notes = (roles.classified(self._leaves, names), *remarks)

    def trace(self, batch_size: int | None, settings: Settings | None = None) -> Trace:
        """The trace at `batch_size`, or with the arguments as they were given when None."""
        if settings is not None and settings != Settings():
            raise BadInput(
                "a step of JAX runs as it is written, so a plan can't change it; "
                "give the loss function and the optimizer of optax instead of the step."
            )
        size = batch_size if batch_size is not None else self.batch_size
        if size not in self._traces:
            self._traces[size] = self._traced(size)
        return self._traces[size]

    def _at(self, size: int | None) -> tuple[tuple[Any, ...], list[roles.Leaf]]:
        """The arguments for a batch of another size, and their leaves."""
        if size is None or self.batch_size is None or size == self.batch_size:
            return self._arguments, self._leaves
        arguments = roles.resized(self._arguments, self._leaves, self.batch_size, size)
        return arguments, roles.same_roles(arguments, self._leaves)

    def _traced(self, size: int | None) -> Trace:
        arguments, leaves = self._at(size)
        lowered = self._lowered.pop(size, None) or self._lower(arguments)
        with explained(), quiet(), self._place():
            compiled = read(lowered, as_on_gpu=self._is_simulated_gpu)

        def described(leaf: roles.Leaf | None, otherwise: Category) -> tuple[Category, str]:
            return (otherwise, "") if leaf is None else (leaf.category, leaf.module)

        kept = [leaf for leaf in leaves if leaf.category is not Category.BATCH]
        taken = roles.matched(jax.tree.leaves(lowered.in_avals), leaves)
        given = roles.matched(jax.tree.leaves(lowered.out_info), kept)
        timeline = compiled.timeline(
            lambda number: described(taken[number], Category.BUFFER),
            lambda number: described(given[number], Category.TEMPORARY),
        )
        sums = {
            category: sum(leaf.size_bytes for leaf in leaves if leaf.category is category)
            for category in (Category.PARAMETER, Category.BUFFER, Category.OPTIMIZER_STATE, Category.BATCH)
        }
        batch_bytes = sums.pop(Category.BATCH)
        if any(mark.phase is Phase.BACKWARD for mark in timeline.marks):
            sums[Category.GRADIENT] = sums[Category.PARAMETER]
        notes: tuple[Note, ...] = ()
        if compiled.num_devices > 1:
            words = (
                f"{compiled.num_devices} devices run the step together (shard_map, pmap or shardings): the peak is "
                "that of one of them, while parameters, gradients and optimizer state are counted as they were given, "
                "of all"
            )
            notes = (Note("xla-devices", words),)
        num_parameters = sum(math.prod(leaf.shape) for leaf in leaves if leaf.category is Category.PARAMETER)
        return compiled.trace(timeline, notes, batch_bytes, sums, num_parameters)

    def _lower(self, arguments: tuple[Any, ...]) -> Any:
        with self._place():
            return lower(self._step, arguments)

    def _place(self) -> AbstractContextManager[Any]:
        """Compiles for the host where the step is to run there, whatever JAX runs on by default."""
        if self._device.kind is Kind.HOST and jax.default_backend() != "cpu":
            placed: AbstractContextManager[Any] = jax.default_device(jax.local_devices(backend="cpu")[0])
            return placed
        return nullcontext()


def _checked_arguments(job: Job) -> tuple[Any, ...]:
    """The arguments, after everything that can be said about them without JAX."""
    if not callable(job.model):
        raise BadInput(
            f"a training step of JAX must be a function, but {type(job.model).__name__} was given: "
            "memfit.estimate(step, *arguments)."
        )
    for name in ("optimizer", "precision"):
        if getattr(job, name) is not None:
            raise BadInput(
                f"a step of JAX brings its own {name}, but {name}={getattr(job, name)!r} was given. Leave it out; "
                "a plan, which makes the step itself, takes an optimizer of optax, such as optax.adam(1e-3)."
            )
    given = () if job.batch is None else job.batch if isinstance(job.batch, tuple) else (job.batch,)
    check_call(job.model, given)
    if not any(roles.is_array(leaf) for leaf in jax.tree.leaves(given)):
        raise BadInput(
            f"there are no arrays among the {len(given)} arguments of {name_of(job.model)}. Give what the "
            "step takes, as arrays or as jax.ShapeDtypeStruct: memfit.estimate(step, parameters, state, batch)."
        )
    return given


class OpenTraining:
    """A training step of a loss function, (params, batch) and an optimizer of optax, which can be traced."""

    def __init__(self, job: Job, device: Device, batch_size: int | None = None) -> None:
        given = job.batch
        if not isinstance(given, tuple | list) or len(given) != 2:
            count = len(given) if isinstance(given, tuple | list) else 1
            raise BadInput(
                f"a loss function of JAX is followed by its parameters and one batch, but {count} things were given: "
                "memfit.plan(loss, params, batch, optimizer=optax.adam(1e-3), budget='8GiB')."
            )
        self.loss: Callable[[Any, Any], Any] = job.model
        self.optimizer = job.optimizer
        self.device = device
        # Refuses what can't be a step before anything is traced.
        training.TrainStep(self.loss, self.optimizer, Settings())
        self.params, batch = given
        self.batch = training.shapes(batch)
        own = training.check_batch(self.batch)
        if batch_size is not None:
            if own is None:
                raise BadBatch(f"the batch has no dimension of samples, so that it can't have {batch_size} of them.")
            self.batch = training.resized(self.batch, batch_size)
        self.batch_size = own if batch_size is None else batch_size
        self._precision = job.precision
        self.name = job.name or getattr(self.loss, "__name__", None) or type(self.loss).__name__
        self.notes: tuple[Note, ...] = ()

    def look(self) -> tuple[float, tuple[BlockCall, ...]]:
        """(operations of the forward pass, calls of marked blocks)."""
        with explained():
            return training.look(self.loss, self.params, self.batch)

    def trace(self, batch_size: int | None, settings: Settings | None = None) -> Trace:
        """The step, compiled as settings run it, for the batch as it was given or one of another size."""
        batch = self.batch if batch_size in (None, self.batch_size) else training.resized(self.batch, batch_size or 1)
        settings = settings or Settings()
        if settings.precision is None:
            settings = replace(settings, precision=self._precision)
        as_on_gpu = self.device.kind is Kind.CUDA
        with explained(), quiet():
            step = training.TrainStep(self.loss, self.optimizer, settings)
            function, arguments, donated = step.to_compile(self.params, batch)
            compiled = compile_step(function, arguments, donate_argnums=donated, as_on_gpu=as_on_gpu)
        trained, fixed, state, _ = arguments
        given = _named(_ARGUMENTS, arguments)
        made = _named(_RESULTS, (trained, state, 0.0))
        sizes = {
            Category.PARAMETER: num_bytes(trained),
            Category.BUFFER: num_bytes(fixed),
            Category.GRADIENT: num_bytes(trained),
            Category.OPTIMIZER_STATE: num_bytes(state),
        }
        timeline = compiled.timeline(given.__getitem__, made.__getitem__)
        num_parameters = sum(leaf.size for leaf in jax.tree.leaves(trained))
        return compiled.trace(timeline, self.notes, num_bytes(batch), sizes, num_parameters)

    def time_forward(self) -> tuple[float, float]:
        """(seconds of one sample, seconds of a call however small) of the forward pass, on the device in hand."""
        trained, fixed, structure = training.split_params(self.params)
        run = jax.jit(lambda own, other, data: self.loss(training.join_params(own, other, structure), data))

        def forward(size: int) -> Callable[[], object]:
            zeros = jax.tree.map(_zeros, (trained, fixed, training.resized(self.batch, size)))
            return lambda: jax.block_until_ready(run(*zeros))

        return forward_seconds(forward, self.batch_size or 1)


def _named(categories: tuple[Category, ...], trees: tuple[Any, ...]) -> list[tuple[Category, str]]:
    """Category and dotted place of each leaf, such as "layers.0.kernel"."""
    return [
        (category, ".".join(map(roles.name_of_key, path)))
        for category, tree in zip(categories, trees, strict=True)
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _zeros(leaf: Any) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), leaf.shape)
    return jnp.zeros(leaf.shape, leaf.dtype)
