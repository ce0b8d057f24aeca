"""What a training loop of a script's own keeps from turn to turn: the variables of its models and optimizers.

Nothing says which models a loop trains. Optimizers are seen when they are applied; models are found among the objects
of the process by the variables that a step touches.
"""

import gc
import os
from collections.abc import Callable, Mapping
from typing import Any

import keras

from memfit.core.patching import put_in_front
from memfit.core.timeline import Category
from memfit.core.trace import Trace
from memfit.core.user_code import INSTALLED_FOLDERS, PACKAGE_FOLDER
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.model import HeldVariable, owner_of, paths_of, trace_of, variables_of


def is_framework(filename: str) -> bool:
    """Whether a file is part of an installed package, not of the script, which may have been given as text."""
    return os.path.abspath(filename).startswith((*INSTALLED_FOLDERS, PACKAGE_FOLDER)) or filename.startswith("<frozen")


class LoopState:
    """The variables of a loop."""

    def __init__(self) -> None:
        self.optimizers: list[Any] = []
        self.held: list[HeldVariable] = []
        self.layers: tuple[str, ...] = ()
        self.rest: list[Any] = []
        """Variables of the backend's own kind that belong to no model and no optimizer of Keras."""
        self._updated: list[Any] = []

    def watch_updates(self, instead: Callable[..., Any] | None = None) -> None:
        """Notes every optimizer of Keras that is applied, until the process ends.

        `instead` is called in place of `stateless_apply`, with that, the optimizer and its arguments.
        """

        def applied(plain: Callable[..., Any], optimizer: Any, *arguments: Any, **named: Any) -> Any:
            if all(known is not optimizer for known in self.optimizers):
                self.optimizers.append(optimizer)
            return plain(optimizer, *arguments, **named)

        base = internals.base_optimizer.BaseOptimizer
        if instead is not None:
            put_in_front(base, "stateless_apply", instead)
        for name in ("apply", "stateless_apply"):
            put_in_front(base, name, applied)

    def settle(self, touched: Mapping[int, Any]) -> None:
        """Says what each variable is for; `touched` are the backend's own that the turn uses, by `handle_of`."""
        self._updated = [one for optimizer in self.optimizers for one in internals.updated_by(optimizer)]
        models = self._models({*touched, *map(handle_of, self._updated)})
        found: list[HeldVariable] = []
        layers: list[str] = []
        for model in models:
            prefix = f"{model.name}." if len(models) > 1 else ""
            layers += [f"{prefix}{path}" for path in paths_of(model)] + ([str(model.name)] if prefix else [])
            for one in variables_of(model, training=False):
                path = f"{prefix}{one.module}" if one.module else prefix.rstrip(".")
                found.append(HeldVariable(one.variable, one.category, path))
        owners = {str(one.variable.path).replace("/", "_"): one.module for one in found}
        for optimizer in self.optimizers:
            for variable in optimizer.variables:
                found.append(HeldVariable(variable, Category.OPTIMIZER_STATE, owner_of(str(variable.name), owners)))
        unique: dict[int, HeldVariable] = {}
        for one in found:
            unique.setdefault(id(one.variable), one)
        self.held = list(unique.values())
        known = {handle_of(one.variable) for one in self.held}
        self.rest = [variable for key, variable in touched.items() if key not in known]
        self.layers = tuple(layers)

    def described(self, arrays: list[Any]) -> list[tuple[Category, str]]:
        """(category, module) of each argument of a step; what is no variable is the batch.

        Those of a later step of the turn are stand-ins, which their shapes tell.
        """
        known = {handle_of(one.variable): one for one in self.held}
        given = {id(array) for array in arrays}
        waiting: dict[tuple[tuple[int, ...], str], list[HeldVariable]] = {}
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
        inner = {id(layer) for one in used for layer in internals.layers_of(one) if layer is not one}
        # What a sequential model makes of itself.
        inner |= {id(graph) for one in used if (graph := internals.graph_of(one)) is not one}
        return [one for one in used if id(one) not in inner]

    def trace(self, step: Trace) -> Trace:
        """The trace of a step of the turn with the sizes of its variables."""
        return trace_of(step, self.held, self._updated)


def handle_of(variable: Any) -> int:
    """What tells a variable of Keras among those of its backend: the id of its handle, or of its array."""
    value = internals.tensor_of(variable) if isinstance(variable, internals.Variable) else None
    return id(getattr(value, "handle", value))


def _form(array: Any) -> tuple[tuple[int, ...], str]:
    return tuple(getattr(array, "shape", ())), str(getattr(array, "dtype", ""))
