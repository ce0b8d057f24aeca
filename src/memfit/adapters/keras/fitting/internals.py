"""What is used of Keras beyond its public interface, in one place, so that another version of Keras fails in one place.

Masks travel as attributes of tensors; whether a layer trains, and the dtype that variables are cast to, are global
state of a thread while a model is called.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from memfit.core.errors import MissingDependency

try:
    from keras.src import backend as _backend
    from keras.src.backend.common import global_state as _global_state
    from keras.src.backend.common.variables import AutocastScope as _AutocastScope
    from keras.src.backend.common.variables import initialize_all_variables as _initialize_all_variables

    get_mask: Callable[[Any], Any] = _backend.get_keras_mask
    set_mask: Callable[[Any, Any], None] = _backend.set_keras_mask
except (ImportError, AttributeError) as error:  # pragma: no cover - another version of Keras
    raise MissingDependency(
        f"memfit can't recompute layers with keras {keras.__version__}: {error}. Install keras 3.15, or a later memfit."
    ) from error

_CALL, _AUTOCAST, _SEED = "current_call_ctx", "autocast_scope", "global_seed_generator"


class Surroundings:
    """What a layer that is called sees of the calls around it; entered again wherever the same call is repeated."""

    def __init__(self) -> None:
        self._call = copy.copy(_global_state.get_global_attribute(_CALL))
        self._autocast = _global_state.get_global_attribute(_AUTOCAST)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """As at the time when this was made, on any thread."""
        before = {name: _global_state.get_global_attribute(name) for name in (_CALL, _AUTOCAST)}
        # A copy: layers write into it, and what they write is not for later calls.
        _global_state.set_global_attribute(_CALL, copy.copy(self._call))
        _global_state.set_global_attribute(_AUTOCAST, self._autocast)
        try:
            yield
        finally:
            for name, value in before.items():
                _global_state.set_global_attribute(name, value)


def value_of(variable: Any) -> Any:
    """The value of a Keras variable as it is stored, whatever the surrounding layers cast to."""
    with _uncast():
        return variable.value


def is_shared_seed(variable: Any) -> bool:
    """Whether it belongs to the generator that Keras draws from where no seed is given, made when first drawn from."""
    generator = _global_state.get_global_attribute(_SEED)
    return generator is not None and generator.state is variable


def make_variables() -> None:
    """Gives variables that were made in a stateless scope their first values."""
    _initialize_all_variables()


def collects_losses() -> bool:
    """Whether losses that layers add are wanted by those who call."""
    scope = _backend.get_stateless_scope()
    return scope is None or bool(scope.collect_losses)


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor of the backend."""
    return bool(_backend.is_tensor(value))


def graph_of(layer: Any) -> Any:
    """The Functional whose graph this layer runs: itself, or the one inside of a Sequential; None if there is none."""
    inner = getattr(layer, "_functional", None)
    graph = layer if inner is None else inner
    return graph if hasattr(graph, "_run_through_graph") and hasattr(graph, "_nodes_by_depth") else None


def nodes_of(graph: Any) -> list[Any]:
    """The calls of a Functional in the order in which it makes them, inputs left out."""
    by_depth = graph._nodes_by_depth
    return [
        node
        for depth in sorted(by_depth, reverse=True)
        for node in by_depth[depth]
        if node.operation is not None and not node.is_input
    ]


def sublayers_of(layer: Any) -> list[Any]:
    """The layers directly inside of a layer, in the order in which they were added."""
    return [part for part in getattr(layer, "_layers", ()) if isinstance(part, keras.layers.Layer)]


def operation_of(graph: Any, node: Any) -> Any:
    """What a node calls."""
    find = getattr(graph, "_get_operation_for_node", None)
    return node.operation if find is None else find(node)


def forget_functions(model: Any) -> None:
    """Has Keras trace its functions anew, those of `evaluate` and `predict` too: other variables, other types."""
    model.train_function = model.test_function = model.predict_function = None


def forget_call(layer: Any, losses: list[Any]) -> None:
    """Takes back what layers note down of a call: that these losses are theirs, and their dropout masks."""
    for part in layer._flatten_layers():
        part._loss_ids.difference_update(map(id, losses))
    forget_dropout(layer)


def forget_dropout(layer: Any) -> None:
    """Drops the masks that cells keep through all steps of a call, and beyond it where the call fails."""
    for part in layer._flatten_layers():
        for name in ("reset_dropout_mask", "reset_recurrent_dropout_mask"):
            getattr(part, name, lambda: None)()


@contextmanager
def _uncast() -> Iterator[None]:
    with _AutocastScope(None):
        yield
