"""A training step of JAX made from a loss function and an optimizer of optax: one that settings can change.

    step = TrainStep(loss, optax.adam(1e-3), Settings(micro_batches=4))
    params, state, value = step(params, state, batch)

Parts of the batch go one after the other through a loop of XLA's, which computes one at a time; their gradients add up
with the weights that make them those of the whole batch, and the optimizer updates once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from memfit.core.errors import BadBatch, BadInput, BadLoss, BadOptimizer
from memfit.core.settings import Settings
from memfit.frameworks.jax.apply.marked import BlockCall, count_flops, recomputing, recording

_DONATING = Settings(donate=True)
_WEIGHTINGS = ("samples", "sum", "given")


@dataclass(frozen=True, slots=True)
class _Structure:
    """What of the parameters is no array, as a constant of a compiled program."""

    tree: Any
    constants: tuple[Any, ...]


class TrainStep:
    """A step of training that updates once, jitted: `step(params, state, batch) -> (params, state, loss)`.

    Args:
        loss: takes (params, batch), returns the scalar mean over the batch, or (loss, weight), where the weight is the
            mean's true denominator, such as the number of tokens.
        optimizer: of optax, or anything with its `init` and `update`.
        settings: how to run it; by default plainly, but for parameters and state, which are updated in place.
    """

    def __init__(self, loss: Callable[[Any, Any], Any], optimizer: Any, settings: Settings = _DONATING) -> None:
        _check(loss, optimizer, settings)
        self.loss = loss
        self.optimizer = optimizer
        self.settings = settings
        # The structure is static, and a program of its own is compiled for each.
        self._jitted = jax.jit(self._run, static_argnums=0, donate_argnums=(1, 3) if settings.donate else ())

    def init(self, params: Any) -> Any:
        """The optimizer's state for these parameters."""
        trained, _, _ = split_params(params)
        return jax.jit(self.optimizer.init)(trained)

    def __call__(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        """One update.

        The batch has samples along the first dimension of its arrays; scalars and random keys go to every part. What is
        no array among the parameters (functions of equinox modules), or no real number, stays.
        """
        check_batch(batch)
        trained, fixed, structure = split_params(params)
        trained, state, value = self._jitted(structure, trained, fixed, state, batch)
        return join_params(trained, fixed, structure), state, value

    def to_compile(self, params: Any, batch: Any) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
        """(the step as a function, shapes of its arguments, places of those whose memory the results take).

        The arguments are what is trained, other arrays among the parameters, the optimizer's state and the batch.
        """
        trained, fixed, structure = split_params(shapes(params))
        state = jax.eval_shape(self.optimizer.init, trained)

        def step(trained: Any, fixed: Any, state: Any, batch: Any) -> Any:
            return self._run(structure, trained, fixed, state, batch)

        return step, (trained, fixed, state, shapes(batch)), (0, 2) if self.settings.donate else ()

    def gradients(self, structure: _Structure, trained: Any, fixed: Any, batch: Any) -> tuple[Any, Any]:
        """(loss of the whole batch, gradients of the trained parameters)."""
        of_part = partial(self._part, structure, trained, fixed)
        size = check_batch(batch)
        length = 1 if size is None else self.settings.part_size(size)
        if size is None or length >= size:
            (value, _), gradients = of_part(batch)
            return value, gradients
        # The sum over parts, each with its weight, over the sum of weights. 16 bits are too few for sums.
        wide = jax.tree.map(lambda own: jnp.zeros(own.shape, jnp.promote_types(own.dtype, jnp.float32)), trained)
        # The value's type is the loss's own: a sum in another would not fit the loop.
        one = jax.eval_shape(lambda: of_part(_taken(batch, 0, length))[0])
        nothing = (jnp.zeros((), one[0].dtype), jnp.zeros((), one[1].dtype), wide)

        def add(total: Any, start: Any, length: int) -> Any:
            (value, weight), gradients = of_part(_taken(batch, start, length))
            summed = jax.tree.map(lambda own, new: own + _weighed(new, weight).astype(own.dtype), total[2], gradients)
            return total[0] + _weighed(value, weight).astype(total[0].dtype), total[1] + weight, summed

        whole = size // length
        starts = jnp.arange(whole) * length
        total, _ = jax.lax.scan(lambda total, start: (add(total, start, length), None), nothing, starts)
        if size % length:
            total = add(total, whole * length, size % length)
        value, weight, gradients = total
        if self.settings.weighting.kind == "sum":
            weight = jnp.ones_like(weight)
        return value / weight, jax.tree.map(lambda own, new: (new / weight).astype(own.dtype), trained, gradients)

    def _part(self, structure: _Structure, trained: Any, fixed: Any, batch: Any) -> tuple[tuple[Any, Any], Any]:
        """((loss, its weight), gradients) of one part."""
        size = check_batch(batch)
        narrow = self.settings.precision == "amp-bf16"

        def narrowed(leaf: Any) -> Any:
            return leaf.astype(jnp.bfloat16) if getattr(leaf, "dtype", None) == jnp.float32 else leaf

        def of_trained(trained: Any) -> tuple[Any, Any]:
            given = (trained, fixed, batch)
            own, other, batched = jax.tree.map(narrowed, given) if narrow else given
            # Calls of blocks are counted anew each time that the loss is traced.
            with recomputing(self.settings.checkpoint):
                result = self.loss(join_params(own, other, structure), batched)
            value, weight = _loss_and_weight(result)
            if narrow:
                value = value.astype(jnp.float32)
            if weight is None:
                weight = jnp.asarray(1.0 if self.settings.weighting.kind == "sum" else size or 1, value.dtype)
            return value, jax.lax.stop_gradient(jnp.asarray(weight, value.dtype))

        return jax.value_and_grad(of_trained, has_aux=True)(trained)

    def update(self, trained: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        """(parameters after the update, state after it)."""
        changes, state = self.optimizer.update(gradients, state, trained)
        return jax.tree.map(lambda own, change: (own + change).astype(own.dtype), trained, changes), state

    def _run(self, structure: _Structure, trained: Any, fixed: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        value, gradients = self.gradients(structure, trained, fixed, batch)
        return *self.update(trained, state, gradients), value


def split_params(params: Any) -> tuple[Any, Any, _Structure]:
    """(what is trained, other arrays, the rest): trees of the same shape, with None where a leaf is in another."""
    leaves, tree = jax.tree.flatten(params)
    trained, fixed, constants = [], [], []
    for leaf in leaves:
        is_array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
        is_trained = is_array and jnp.issubdtype(leaf.dtype, jnp.inexact)
        trained.append(leaf if is_trained else None)
        fixed.append(leaf if is_array and not is_trained else None)
        constants.append(None if is_array else leaf)
    if not any(leaf is not None for leaf in trained):
        raise BadInput("there is nothing to train: no leaf of the parameters is an array of real numbers.")
    return jax.tree.unflatten(tree, trained), jax.tree.unflatten(tree, fixed), _Structure(tree, tuple(constants))


def join_params(trained: Any, fixed: Any, structure: _Structure) -> Any:
    """The parameters that `split_params` took apart."""
    parts = [structure.tree.flatten_up_to(tree) for tree in (trained, fixed)]
    leaves = [
        constant if own is None and other is None else other if own is None else own
        for own, other, constant in zip(*parts, structure.constants, strict=True)
    ]
    return jax.tree.unflatten(structure.tree, leaves)


def check_batch(batch: Any) -> int | None:
    """Samples of a batch, from the first dimension that its arrays share; None where there is no such array."""
    sizes: dict[int, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            continue
        if leaf.shape and not _is_key(leaf):
            sizes.setdefault(int(leaf.shape[0]), f"{jax.tree_util.keystr(path) or 'the batch'} {list(leaf.shape)}")
    if len(sizes) > 1:
        raise BadBatch(
            f"arrays of a batch must have samples along their first dimension, but {' and '.join(sizes.values())} "
            "disagree. Put what is the same for every sample into the parameters; scalars and keys of jax.random.key "
            "are given to every part."
        )
    if 0 in sizes:
        raise BadBatch("the batch is empty: its first dimension is 0.")
    return next(iter(sizes), None)


def resized(batch: Any, size: int) -> Any:
    """Shapes of a batch with another number of samples."""

    def shape(leaf: Any) -> Any:
        first = (size, *leaf.shape[1:]) if leaf.shape and not _is_key(leaf) else leaf.shape
        return jax.ShapeDtypeStruct(first, leaf.dtype)

    return jax.tree.map(shape, shapes(batch))


def shapes(tree: Any) -> Any:
    """Shapes in place of arrays; what is no array stays."""

    def shape(leaf: Any) -> Any:
        if isinstance(leaf, bool | int | float | complex):
            leaf = jnp.asarray(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf

    return jax.tree.map(shape, tree)


def look(loss: Callable[[Any, Any], Any], params: Any, batch: Any) -> tuple[float, tuple[BlockCall, ...]]:
    """(operations of a loss's forward pass, its calls of marked blocks in order); nothing is computed.

    Refuses a loss that returns anything else than a scalar, or (loss, weight).
    """
    trained, fixed, structure = split_params(shapes(params))
    results: list[Any] = []

    def run(own: Any, other: Any, data: Any) -> Any:
        results[:] = [loss(join_params(own, other, structure), data)]
        return results[0]

    with recording() as found:
        program = jax.make_jaxpr(run)(trained, fixed, shapes(batch))
    _loss_and_weight(results[0])
    return count_flops(program.jaxpr), tuple(found)


def _taken(batch: Any, start: Any, length: int) -> Any:
    """A part of a batch; a random key differs from part to part."""

    def take(leaf: Any) -> Any:
        if _is_key(leaf):
            return jax.random.fold_in(leaf, start) if not leaf.shape else leaf
        if not hasattr(leaf, "shape") or not leaf.shape:
            return leaf
        return jax.lax.dynamic_slice_in_dim(leaf, start, length)

    return jax.tree.map(take, batch)


def _weighed(value: Any, weight: Any) -> Any:
    """The mean times its denominator; a mean over nothing is no number, and counts for nothing."""
    product = value * weight.astype(value.dtype)
    return jnp.where(weight > 0, product, jnp.zeros_like(product))


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _loss_and_weight(result: Any) -> tuple[Any, Any]:
    """(loss, its weight or None) of what a loss function returned."""
    value, weight = result if isinstance(result, tuple | list) and len(result) == 2 else (result, None)
    wrong = [one for one in (value, weight) if one is not None and getattr(one, "shape", ()) != ()]
    if wrong or not hasattr(value, "dtype"):
        shown = [list(leaf.shape) for leaf in jax.tree.leaves(result) if hasattr(leaf, "shape")]
        raise BadLoss(
            "a loss function of JAX returns its scalar mean, or (loss, weight), two scalars, but this one returned "
            f"{type(result).__name__} with shapes {shown}. State that it changes must go through the parameters."
        )
    return value, weight


def _check(loss: Any, optimizer: Any, settings: Settings) -> None:
    if not callable(loss):
        raise BadInput(f"loss must be a function of (params, batch), but {type(loss).__name__} was given.")
    if not callable(getattr(optimizer, "init", None)) or not callable(getattr(optimizer, "update", None)):
        raise BadOptimizer(
            f"the optimizer must be one of optax, such as optax.adam(1e-3), with init and update, "
            f"but {type(optimizer).__name__} was given."
        )
    if settings.precision not in (None, "amp-bf16"):
        raise BadInput(
            f"a step of JAX can use amp-bf16, but {settings.precision!r} was asked for. "
            "float16 needs loss scaling, which belongs into the optimizer (optax.apply_if_finite)."
        )
    if settings.weighting.kind not in _WEIGHTINGS:
        raise BadInput(
            f"losses of parts are weighted by {', '.join(_WEIGHTINGS)}, but {settings.weighting.kind!r} was asked for. "
            "Let the loss return (loss, weight)."
        )
    known = ("micro_batches", "micro_batch_size", "weighting", "precision", "checkpoint", "donate", "jit_compile")
    if replace(settings, **{name: getattr(Settings(), name) for name in known}) != Settings():
        raise BadInput(
            "these settings are for another framework: a step of JAX has micro-batches, recomputed blocks, "
            "amp-bf16 and donation."
        )
