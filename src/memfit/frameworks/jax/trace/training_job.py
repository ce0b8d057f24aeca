"""Opens a loss function, its parameters and an optimizer as a job: their step is compiled as any settings run it."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from memfit.core.device import Device, Kind
from memfit.core.errors import BadBatch, BadInput
from memfit.core.estimate import Note
from memfit.core.job import Job
from memfit.core.settings import Settings
from memfit.core.timeline import Category
from memfit.core.trace import Serving, Trace
from memfit.frameworks.jax.apply.marked import num_bytes
from memfit.frameworks.jax.apply.training import Look, TrainStep, check_batch, divided, joined, look, resized, shapes
from memfit.frameworks.jax.trace import arguments as roles
from memfit.frameworks.jax.trace import lowering
from memfit.frameworks.jax.trace.compiled import compile_step

_TIMED_SAMPLES = 8
_NUM_TIMED = 3


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
        TrainStep(self.loss, self.optimizer, Settings())
        self.params, batch = given
        self.batch = shapes(batch)
        own = check_batch(self.batch)
        if batch_size is not None:
            if own is None:
                raise BadBatch(f"the batch has no dimension of samples, so that it can't have {batch_size} of them.")
            self.batch = resized(self.batch, batch_size)
        self.batch_size = own if batch_size is None else batch_size
        self._precision = job.precision
        self.name = job.name or getattr(self.loss, "__name__", None) or type(self.loss).__name__
        self.notes: tuple[Note, ...] = ()

    def look(self) -> Look:
        """What the loss looks like."""
        with lowering.explained():
            return look(self.loss, self.params, self.batch)

    def trace(self, batch_size: int | None, settings: Settings | None = None) -> Trace:
        """The step, compiled as settings run it, for the batch as it was given or one of another size."""
        batch = self.batch if batch_size in (None, self.batch_size) else resized(self.batch, batch_size or 1)
        settings = settings or Settings()
        if settings.precision is None:
            settings = replace(settings, precision=self._precision)
        as_on_gpu = self.device.kind is Kind.CUDA
        with lowering.explained(), lowering.quiet():
            step = TrainStep(self.loss, self.optimizer, settings)
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
        return Trace(
            compiled.timeline(given.__getitem__, made.__getitem__),
            self.notes,
            sum(leaf.size for leaf in jax.tree.leaves(trained)),
            sizes[Category.PARAMETER],
            num_bytes(batch),
            serving=Serving.BEST_FIT,
            assigned_bytes=compiled.assigned_bytes,
            spread=compiled.spread,
            state_bytes={category: size for category, size in sizes.items() if size},
        )

    def time_forward(self) -> tuple[float, float]:
        """(seconds of one sample, seconds of a call however small) of the forward pass, on the device in hand."""
        if self.batch_size is None or self.batch_size == 1:
            return self._timed(self.batch), 0.0
        few, many = 1, min(self.batch_size, max(_TIMED_SAMPLES, self.batch_size // _TIMED_SAMPLES))
        short, long = (self._timed(resized(self.batch, count)) for count in (few, many))
        sample = max(long - short, 0.1 * long) / (many - few)
        return sample, max(0.0, short - sample)

    def _timed(self, batch: Any) -> float:
        trained, fixed, structure = divided(self.params)
        zeros = jax.tree.map(_zeros, (trained, fixed, batch))
        run = jax.jit(lambda own, other, data: self.loss(joined(own, other, structure), data))
        jax.block_until_ready(run(*zeros))
        times = []
        for _ in range(_NUM_TIMED):
            started = time.perf_counter()
            jax.block_until_ready(run(*zeros))
            times.append(time.perf_counter() - started)
        return min(times)


_ARGUMENTS = (Category.PARAMETER, Category.BUFFER, Category.OPTIMIZER_STATE, Category.BATCH)
_RESULTS = (Category.PARAMETER, Category.OPTIMIZER_STATE, Category.TEMPORARY)
"""What a step takes and gives, in order."""


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
