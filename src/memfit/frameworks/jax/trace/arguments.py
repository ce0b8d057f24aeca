"""What each argument of a training step is for: parameters, optimizer state, the batch.

JAX knows arrays, not roles. What tells them apart: a step gives back what it updates, in the same form as it took it;
optimizers of optax keep their state in tuples with names of their own; and the batch is what comes last, is not given
back, and has one first dimension throughout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memfit.core.errors import BadBatch
from memfit.core.estimate import Note
from memfit.core.timeline import Category

_OPTIMIZER_NAMES = frozenset({"opt_state", "optimizer_state", "mu", "nu", "trace", "momentum", "ema", "slots"})
_BUFFER_NAMES = frozenset({"batch_stats", "rngs", "rng", "count", "step", "mean", "var"})
_PARAMETER_TYPES = ("flax.nnx", "equinox", "flax.training", "flax.core")

_Form = tuple[Any, tuple[tuple[tuple[int, ...], str], ...]]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array among the arguments."""

    argument: int  # place of the argument that it is in
    path: tuple[str, ...]  # names on the way to it
    shape: tuple[int, ...]
    dtype: Any
    size_bytes: int
    is_optimizer: bool  # lies in a state of optax
    category: Category = Category.BUFFER

    @property
    def module(self) -> str:
        """Dotted path of the module that the array belongs to."""
        names = list(self.path[:-1])
        if self.path and self.path[-1] == "value" and names:
            # flax.nnx wraps each array in a variable.
            names.pop()
        last = max((place for place, name in enumerate(names) if name in _OPTIMIZER_NAMES), default=-1)
        names = names[last + 1 :]
        if self.is_optimizer and last < 0:
            # The places of the parts of a chain.
            names = [name for name in names if not name.isdigit()]
        names = [name for name in names if name != "params"]
        return ".".join(names)


def is_array(value: Any) -> bool:
    """True for an array, and for the shape and dtype of one."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type)


def leaves_of(arguments: Sequence[Any]) -> list[Leaf]:
    """The arrays of all arguments, in JAX's order, their roles not told yet."""
    found = []
    for place, argument in enumerate(arguments):
        states = _optimizer_leaves(argument)
        for keys, value in jax.tree_util.tree_flatten_with_path(argument)[0]:
            if is_array(value):
                path = tuple(map(name_of_key, keys))
                is_optimizer = id(value) in states or bool(_OPTIMIZER_NAMES & set(path))
                found.append(Leaf(place, path, tuple(value.shape), _own_dtype(value), size_of(value), is_optimizer))
    return found


def size_of(value: Any) -> int:
    """Bytes of an array; keys of random generators count as what they hold."""
    dtype = _own_dtype(value)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        value = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(value.shape, dtype))
        dtype = value.dtype
    return int(np.prod(value.shape, dtype=np.int64)) * int(np.dtype(dtype).itemsize)


def _own_dtype(value: Any) -> Any:
    """What JAX makes of a dtype: without its 64-bit mode an array of numpy's loses half of its bits."""
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return value.dtype
    return jax.dtypes.canonicalize_dtype(value.dtype)


def assign(arguments: Sequence[Any], results: Any) -> list[Leaf]:
    """The arrays of all arguments of a step with their roles, which depend on the shapes that it gives back."""
    leaves = leaves_of(arguments)
    batch = batch_arguments(arguments, results)
    state = [leaf for leaf in leaves if leaf.argument not in batch and not leaf.is_optimizer]
    first = state[0].argument if state else 0
    weights = {leaf.shape for leaf in state if leaf.argument == first}
    # Another argument of the same shapes throughout is what an optimizer keeps.
    others = {leaf.argument for leaf in leaves if leaf.shape and leaf.shape not in weights}
    repeats = {leaf.argument for leaf in leaves} - others - {first} if weights else set()
    roles = []
    for leaf in leaves:
        if leaf.argument in batch:
            category = Category.BATCH
        elif leaf.is_optimizer:
            category = Category.OPTIMIZER_STATE
        elif not jnp.issubdtype(leaf.dtype, np.inexact) or _BUFFER_NAMES & set(leaf.path):
            category = Category.BUFFER
        else:
            category = Category.OPTIMIZER_STATE if leaf.argument in repeats else Category.PARAMETER
        roles.append(replace(leaf, category=category))
    return roles


def batch_arguments(arguments: Sequence[Any], results: Any) -> set[int]:
    """Places of the arguments that are the batch."""
    # The forms of the results and of their parts, down to containers' elements.
    kept = set()
    waiting = [(results, 0)]
    while waiting:
        tree, depth = waiting.pop()
        if not jax.tree.leaves(tree) or is_array(tree):
            continue
        kept.add(_form(tree))
        if depth < 2 and isinstance(tree, tuple | list | dict):
            waiting.extend((part, depth + 1) for part in (tree.values() if isinstance(tree, dict) else tree))
    found = set()
    rest = []
    for place, argument in enumerate(arguments):
        arrays = [leaf for leaf in jax.tree.leaves(argument) if is_array(leaf)]
        sized = [leaf for leaf in arrays if leaf.shape]
        if not sized or _is_key(sized) or _optimizer_leaves(argument) or _is_model(argument):
            continue
        if _form(argument) in kept:
            continue
        rest.append(place)
        if len({leaf.shape[0] for leaf in sized}) == 1:
            found.add(place)
    if not any(_form(a) in kept or _is_model(a) or _optimizer_leaves(a) for a in arguments) and len(rest) > 1:
        # Nothing is given back: the first argument is what a loss is computed with.
        found.discard(rest[0])
    if not found and rest:
        found.add(rest[-1])
    return found


def batch_size_of(leaves: Sequence[Leaf]) -> int | None:
    """The first dimension that the arrays of the batch share; None where they share none."""
    sizes = {leaf.shape[0] for leaf in leaves if leaf.category is Category.BATCH and leaf.shape}
    return sizes.pop() if len(sizes) == 1 else None


def resized(arguments: Sequence[Any], leaves: Sequence[Leaf], old: int, new: int) -> tuple[Any, ...]:
    """The arguments with another number of samples in the batch."""
    places = {leaf.argument for leaf in leaves if leaf.category is Category.BATCH}

    def other(value: Any) -> Any:
        if is_array(value) and value.shape and value.shape[0] == old:
            return jax.ShapeDtypeStruct((new, *value.shape[1:]), value.dtype)
        return value

    return tuple(jax.tree.map(other, one) if place in places else one for place, one in enumerate(arguments))


def same_roles(arguments: Sequence[Any], leaves: Sequence[Leaf]) -> list[Leaf]:
    """The arrays of resized arguments, with the roles that they had."""
    return [replace(new, category=old.category) for new, old in zip(leaves_of(arguments), leaves, strict=True)]


def matched(values: Sequence[Any], leaves: Sequence[Leaf]) -> list[Leaf | None]:
    """For each array of a program the leaf of the arguments that it is, or looks like.

    A program leaves out what is static and what two modules share, so that they are told by their shapes, in order.
    """
    waiting: dict[tuple[tuple[int, ...], str], list[Leaf]] = {}
    for leaf in reversed(leaves):
        waiting.setdefault((leaf.shape, str(leaf.dtype)), []).append(leaf)
    found = []
    for value in values:
        same = waiting.get((tuple(value.shape), str(value.dtype)))
        found.append(same.pop() if same else None)
    return found


def check_batch(leaves: Sequence[Leaf]) -> None:
    """Refuses arguments without anything to compute on."""
    for leaf in leaves:
        if leaf.category is Category.BATCH and 0 in leaf.shape:
            raise BadBatch(f"the batch has an array of shape {leaf.shape}, which is empty. Give at least one sample.")


def classified(leaves: Sequence[Leaf], names: Sequence[str]) -> Note:
    """What each argument was taken for."""
    parts = []
    for category in (Category.PARAMETER, Category.OPTIMIZER_STATE, Category.BUFFER, Category.BATCH):
        places = sorted({leaf.argument for leaf in leaves if leaf.category is category})
        if places:
            parts.append(f"{category}: {', '.join(names[place] for place in places)}")
    return Note("arguments", f"how the step's arguments were classified: {'; '.join(parts)}")


def _optimizer_leaves(argument: Any) -> set[int]:
    """Identities of the arrays that lie in a state of optax."""
    nodes = jax.tree.leaves(argument, is_leaf=_is_optax)
    return {id(value) for node in nodes if _is_optax(node) for value in jax.tree.leaves(node)}


def _is_optax(value: Any) -> bool:
    return isinstance(value, tuple) and type(value).__module__.partition(".")[0] == "optax"


def _is_model(argument: Any) -> bool:
    return any(kind.__module__.startswith(_PARAMETER_TYPES) for kind in type(argument).__mro__)


def _is_key(arrays: Sequence[Any]) -> bool:
    """Whether these are keys of random generators, of JAX's new or old form."""
    return all(
        jnp.issubdtype(a.dtype, jax.dtypes.prng_key) or (a.dtype == np.uint32 and tuple(a.shape) == (2,))
        for a in arrays
    )


def _form(tree: Any) -> _Form:
    values = [value for value in jax.tree.leaves(tree) if is_array(value)]
    return jax.tree.structure(tree), tuple((tuple(value.shape), str(value.dtype)) for value in values)


def name_of_key(key: Any) -> str:
    """The name of a step on the way to a leaf of a tree."""
    return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))
