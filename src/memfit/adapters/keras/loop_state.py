"""What a training loop of a script's own keeps from turn to turn: the variables of its models and optimizers.

Nothing says which models a loop trains. Optimizers are seen when they are applied; models are found among the objects
of the process by the variables that a step touches.
"""

import functools
import gc
import os
import sysconfig
from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras.src.optimizers import base_optimizer

from memfit.adapters.keras.model import Held, held, layer_paths, number_of, owner_of
from memfit.core.timeline import Category

_INSTALLED = tuple(
    {os.path.abspath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep


def is_framework(filename: str) -> bool:
    """Whether a file is part of an installed package, not of the script."""
    return os.path.abspath(filename).startswith((*_INSTALLED, _PACKAGE)) or filename.startswith("<frozen")


class LoopState:
    """The variables of a loop."""

    def __init__(self) -> None:
        self.optimizers: list[Any] = []
        self.held: list[Held] = []
        self.layers: tuple[str, ...] = ()
        self.rest: list[Any] = []
        """Variables of the backend's own kind that belong to no model and no optimizer of Keras."""
        self._updated: set[int] = set()

    def watch_updates(self, instead: Callable[..., Any] | None = None) -> None:
        """Notes every optimizer of Keras that is applied, from now until the process ends.

        Args:
            instead: called with Keras's method, the optimizer and its arguments, in place of the method.
        """
        for name in ("apply", "stateless_apply"):
            plain = getattr(base_optimizer.BaseOptimizer, name)
            setattr(base_optimizer.BaseOptimizer, name, self._noting(plain, instead if name != "apply" else None))

    def _noting(self, plain: Callable[..., Any], instead: Callable[..., Any] | None) -> Callable[..., Any]:
        @functools.wraps(plain)
        def update(optimizer: Any, *arguments: Any, **named: Any) -> Any:
            if all(one is not optimizer for one in self.optimizers):
                self.optimizers.append(optimizer)
            if instead is not None:
                return instead(plain, optimizer, *arguments, **named)
            return plain(optimizer, *arguments, **named)

        return update

    def settle(self, touched: Mapping[int, Any]) -> None:
        """Says what each variable is for.

        Args:
            touched: the variables of the backend's own kind that the turn uses, by an id that `handle_of` gives.
        """
        updated = [one for optimizer in self.optimizers for one in getattr(optimizer, "_trainable_variables", ())]
        self._updated = {id(variable) for variable in updated}
        models = self._models({*touched, *map(handle_of, updated)})
        prefixes = {id(model): f"{model.name}." if len(models) > 1 else "" for model in models}
        found: list[Held] = []
        layers: list[str] = []
        for model in models:
            prefix = prefixes[id(model)]
            paths = [path for path in layer_paths(model).values() if path]
            layers += [f"{prefix}{path}" for path in paths] + ([str(model.name)] if prefix else [])
            for one in held(model, training=False):
                path = f"{prefix}{one.module}" if one.module else prefix.rstrip(".")
                found.append(Held(one.variable, one.category, path))
        owners = {str(one.variable.path).replace("/", "_"): one.module for one in found}
        for optimizer in self.optimizers:
            for variable in optimizer.variables:
                found.append(Held(variable, Category.OPTIMIZER_STATE, owner_of(str(variable.name), owners)))
        seen: set[int] = set()
        self.held = []
        for one in found:
            if id(one.variable) not in seen:
                seen.add(id(one.variable))
                self.held.append(one)
        known = {handle_of(one.variable) for one in self.held}
        self.rest = [variable for key, variable in touched.items() if key not in known]
        self.layers = tuple(layers)

    def described(self, arrays: list[Any]) -> list[tuple[Category, str]]:
        """(category, module) of each argument of a step; what is no variable is the batch.

        Those of a later step of the turn are stand-ins, which their shapes tell.
        """
        known = {handle_of(one.variable): one for one in self.held}
        given = {id(array) for array in arrays}
        waiting: dict[tuple[tuple[int, ...], str], list[Held]] = {}
        for key, one in reversed(known.items()):
            if key not in given:
                waiting.setdefault(_form(one.variable), []).append(one)
        found = []
        for array in arrays:
            same = waiting.get(_form(array))
            held_by = known.get(id(array)) or (same.pop() if same else None)
            found.append((Category.BATCH, "") if held_by is None else (held_by.category, held_by.module))
        return found

    @staticmethod
    def _models(touched: set[int]) -> list[Any]:
        """The outermost models whose variables a turn uses."""
        known = [one for one in gc.get_objects() if issubclass(type(one), keras.Model)]
        used = [one for one in known if any(handle_of(variable) in touched for variable in one.variables)]
        inner = {id(layer) for one in used for layer in one._flatten_layers(include_self=False)}
        # What a sequential model makes of itself.
        inner |= {id(getattr(one, "_functional", None)) for one in used}
        return [one for one in used if id(one) not in inner]

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(number_of(one.variable) for one in self.held if one.category is Category.PARAMETER)

    def state_bytes(self) -> dict[Category, int]:
        """Parameters, buffers, gradients and optimizer state in full."""
        sizes: dict[Category, int] = {}
        for one in self.held:
            sizes[one.category] = sizes.get(one.category, 0) + one.size_bytes
            if id(one.variable) in self._updated:
                sizes[Category.GRADIENT] = sizes.get(Category.GRADIENT, 0) + one.size_bytes
        return {category: size for category, size in sizes.items() if size}


def handle_of(variable: Any) -> int:
    """What tells a variable of Keras among those of its backend: the id of its handle, or of its array."""
    value = getattr(variable, "_value", None)
    return id(getattr(value, "handle", value))


def _form(array: Any) -> tuple[tuple[int, ...], str]:
    return tuple(getattr(array, "shape", ())), str(getattr(array, "dtype", ""))
