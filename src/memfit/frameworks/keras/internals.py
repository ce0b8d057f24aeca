"""What is used of Keras beyond its public interface; seen in 3.5 to 3.15.

Masks travel as attributes of tensors; whether a layer trains, and the dtype that variables are cast to, are global
state of a thread while a model is called. Attributes of models and layers that begin with an underscore are read here.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras

from memfit.core.patching import Replacement, replaced
from memfit.core.private_names import PrivateNames

NAMES = PrivateNames("keras", "3.5 to 3.15")

# Name here: path in Keras. `Variable` is the class of all variables; `keras.Variable` is a subclass of it before 3.6.
_PATHS = {
    "apply_mask": "keras.src.losses.loss:apply_mask",
    "base_optimizer": "keras.src.optimizers.base_optimizer",
    "compute_output_spec": "keras.src.backend:compute_output_spec",
    "make_variables": "keras.src.backend.common.variables:initialize_all_variables",
    "model_supports_jit": "keras.src.trainers.trainer:model_supports_jit",
    "torch_dtype": "keras.src.backend.torch.core:to_torch_dtype",
    "Tracker": "keras.src.utils.tracking:Tracker",
    "Variable": "keras.src.backend:Variable",
}
__getattr__ = NAMES.table(_PATHS, globals())
_get_global = NAMES.find("keras.src.backend.common.global_state:get_global_attribute")
_set_global = NAMES.find("keras.src.backend.common.global_state:set_global_attribute")
_CALL, _AUTOCAST = "current_call_ctx", "autocast_scope"


class Surroundings:
    """What a layer that is called sees of the calls around it; entered again wherever the same call is repeated."""

    def __init__(self) -> None:
        self._call = copy.copy(_get_global(_CALL))
        self._autocast = _get_global(_AUTOCAST)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Restores Keras's call context and autocast scope of the time when this object was made, on any thread."""
        before = {name: _get_global(name) for name in (_CALL, _AUTOCAST)}
        # A copy: layers write into it, and what they write is not for later calls.
        _set_global(_CALL, copy.copy(self._call))
        _set_global(_AUTOCAST, self._autocast)
        try:
            yield
        finally:
            for name, value in before.items():
                _set_global(name, value)


# Tensors and variables.


def get_mask(tensor: Any) -> Any:
    """The mask that travels with a tensor, or None; before 3.6 it is a plain attribute."""
    get = getattr(keras.src.backend, "get_keras_mask", None)
    return getattr(tensor, "_keras_mask", None) if get is None else get(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Has a mask travel with a tensor."""
    put = getattr(keras.src.backend, "set_keras_mask", None)
    if put is None:
        tensor._keras_mask = mask
    else:
        put(tensor, mask)


def value_of(variable: Any) -> Any:
    """The value of a Keras variable as it is stored, whatever the surrounding layers cast to."""
    with NAMES.find("keras.src.backend.common.variables:AutocastScope")(None):
        return variable.value


def tensor_of(variable: Any) -> Any:
    """The tensor or variable of the backend inside of a variable of Keras; None of one without a value."""
    return NAMES.of(variable, "_value")


def set_tensor(variable: Any, tensor: Any) -> None:
    """Puts a tensor or variable of the backend, or none, into a variable of Keras as it is."""
    variable._value = tensor


def initialize(variable: Any, value: Any) -> None:
    """Gives a variable without a value one, without TensorFlow's noting down that it is frozen, which is for good."""
    trainable, variable._trainable = variable._trainable, True
    try:
        NAMES.of(variable, "_initialize")(value)
    finally:
        variable._trainable = trainable


def tracked(layer: Any) -> dict[str, set[int]]:
    """What a layer keeps under each name, by the numbers of the objects; the sets are its own."""
    return NAMES.of(layer, "_tracker").stored_ids  # type: ignore[no-any-return]


def track_variables(layer: Any) -> None:
    """On torch, makes the variables of a layer PyTorch's parameters of it."""
    if hasattr(layer, "_track_variables"):
        layer._track_variables()


def global_seed_generator() -> Any:
    """The seeds that layers without their own draw from; None where none has been drawn yet."""
    return _get_global("global_seed_generator")


def forget_new_variables() -> None:
    """Leaves variables that were made in a stateless scope without values."""
    waiting = _get_global("uninitialized_variables")
    if waiting is not None:
        waiting.clear()


def layers_of(model: Any) -> list[Any]:
    """A model and all layers in it, each once."""
    return list({id(layer): layer for layer in NAMES.of(model, "_flatten_layers")()}.values())


def sublayers_of(layer: Any) -> list[Any]:
    """The layers directly inside of a layer, in the order in which they were added."""
    return [part for part in getattr(layer, "_layers", ()) if isinstance(part, keras.layers.Layer)]


def own_variables(layer: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """(trainable variables, others, states of seed generators) of a layer itself, without those of layers in it."""
    seeds = [generator.state for generator in NAMES.of(layer, "_seed_generators")]
    return list(NAMES.of(layer, "_trainable_variables")), list(NAMES.of(layer, "_non_trainable_variables")), seeds


def metrics_of(layer: Any) -> list[Any]:
    """Metrics that a layer keeps itself."""
    return list(NAMES.of(layer, "_metrics"))


def training_keyword(model: Any, training: bool) -> dict[str, bool]:
    """The keyword by which a model is told whether it trains, where its `call` takes it."""
    return {"training": training} if NAMES.of(model, "_call_has_training_arg") else {}


def symbolic_build(model: Any, **data: Any) -> None:
    """Makes the variables of layers, metrics, loss and optimizer: for a `data_batch` of symbols, or an `iterator`."""
    NAMES.of(model, "_symbolic_build")(**data)


def begin_at(model: Any, epoch: int | None) -> None:
    """Has the next `fit` begin with this epoch; None: with the one that it is told."""
    model._initial_epoch = epoch


# Of the iterator of a `fit`, what makes one pass, and TensorFlow's data; of a graph, what calls its layers.
GET_ITERATOR, DISTRIBUTED_DATASET, RUN_THROUGH_GRAPH = "_get_iterator", "_distributed_dataset", "_run_through_graph"


def count_steps(iterator: Any, num_steps: int) -> None:
    """Has the iterator of a `fit` take so many steps for drawn."""
    iterator._steps_seen = NAMES.of(iterator, "_steps_seen") + num_steps


def arrays_of(adapter: Any) -> tuple[int, Any]:
    """(number of samples, arrays) that Keras's adapter of arrays was given."""
    return int(NAMES.of(adapter, "_num_samples")), NAMES.of(adapter, "_inputs")


def holds_jax_state(model: Any) -> bool:
    """Whether a `fit` on JAX holds the values of the variables, which are empty meanwhile."""
    return not NAMES.of(model, "_jax_state_synced")


def take_jax_state(model: Any) -> Any:
    """The values of the variables by groups; those of the model are empty then."""
    groups = ("trainable", "non_trainable", "optimizer", "metrics", "purge_model")
    return NAMES.of(model, "_get_jax_state")(**{f"{name}_variables": True for name in groups})


def give_jax_state(model: Any) -> None:
    """Tells a `fit` on JAX that the variables have their values."""
    model._jax_state_synced = True


def leave_shardings(model: Any) -> None:
    """Has a step on JAX leave its results where they are; before 3.7 it puts them where `fit` has noted down.

    Call it inside of `restoring`, which puts the model back.
    """

    def enforce(
        trainable_variables: Any = None,
        non_trainable_variables: Any = None,
        optimizer_variables: Any = None,
        metrics_variables: Any = None,
    ) -> Any:
        groups = trainable_variables, non_trainable_variables, optimizer_variables, metrics_variables
        return tuple(group or [] for group in groups)

    if hasattr(model, "_enforce_jax_state_sharding") and not hasattr(model, "_trainable_variable_shardings"):
        model._enforce_jax_state_sharding = enforce


@contextmanager
def layers_as_scopes(scope: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    """Has every layer that is called open a scope of the backend, as Keras does by itself; 3.5 doesn't on JAX."""
    plain = NAMES.of(keras.layers.Layer, "_open_name_scope")
    own = NAMES.find("keras.src.backend:name_scope")
    if keras.backend.backend() != "jax" or not own.__module__.endswith("common.name_scope"):
        yield
        return

    @contextmanager
    def opened(layer: Any) -> Iterator[None]:
        with plain(layer), scope(layer.name):
            yield

    with replaced([Replacement(keras.layers.Layer, "_open_name_scope", opened)]):
        yield


def collects_losses() -> bool:
    """Whether losses that layers add are wanted by those who call."""
    scope = NAMES.find("keras.src.backend:get_stateless_scope", "keras.src.backend.common:get_stateless_scope")()
    return scope is None or bool(scope.collect_losses)


def uses_nnx() -> bool:
    """Whether layers of Keras are modules of flax; versions before 3.11 have no such thing."""
    return bool(getattr(keras.src.backend.config, "is_nnx_enabled", lambda: False)())


def graph_of(layer: Any) -> Any:
    """The Functional whose graph this layer runs: itself, or the one inside of a Sequential; None if there is none."""
    inner = getattr(layer, "_functional", None)
    graph = layer if inner is None else inner
    return graph if hasattr(graph, RUN_THROUGH_GRAPH) and hasattr(graph, "_nodes_by_depth") else None


def nodes_of(graph: Any) -> list[Any]:
    """The calls of a Functional in the order in which it makes them, inputs left out."""
    by_depth = NAMES.of(graph, "_nodes_by_depth")
    nodes = (node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth])
    return [node for node in nodes if node.operation is not None and not node.is_input]


def structure_of(graph: Any) -> tuple[Any, Any]:
    """The nestings of a Functional's inputs and outputs."""
    return NAMES.of(graph, "_inputs_struct"), NAMES.of(graph, "_outputs_struct")


def operation_of(graph: Any, node: Any) -> Any:
    """What a node calls; versions before 3.9 always call the node's own operation."""
    find = getattr(graph, "_get_operation_for_node", None)
    return node.operation if find is None else find(node)


def maker_of(symbol: Any) -> Any:
    """The operation that makes a symbol of a graph."""
    return NAMES.of(symbol, "_keras_history").operation


def forget_functions(model: Any) -> None:
    """Has Keras trace its functions anew, those of `evaluate` and `predict` too: other variables, other types."""
    model.train_function = model.test_function = model.predict_function = None


def forget_call(layer: Any, losses: list[Any]) -> None:
    """Takes back what layers note down of a call: that these losses are theirs, and their dropout masks.

    Cells keep such masks through all steps of a call, and beyond it where the call fails.
    """
    for part in layers_of(layer):
        NAMES.of(part, "_loss_ids").difference_update(map(id, losses))
        for name in ("reset_dropout_mask", "reset_recurrent_dropout_mask"):
            getattr(part, name, lambda: None)()


def weight_of(layer: Any) -> Any:
    """The variable under an adapter of a Dense, EinsumDense, convolution or Embedding."""
    return NAMES.of(layer, "_embeddings" if hasattr(layer, "_embeddings") else "_kernel")


# Losses and optimizers.


def updated_by(optimizer: Any) -> list[Any]:
    """Variables that an optimizer was built for."""
    return list(getattr(optimizer, "_trainable_variables", ()))


def compiled_loss(model: Any) -> Any:
    """What Keras makes of the losses of `compile`; None without any."""
    return NAMES.of(model, "_compile_loss")


def losses_of(model: Any) -> list[Any]:
    """The losses that those of `compile` consist of, which is known once they are built."""
    compiled = compiled_loss(model)
    if compiled is None:
        return []
    # Before 3.7 they are a plain list, with None for outputs without a loss.
    flat = getattr(compiled, "_flat_losses", None)
    return [loss for loss in compiled.flat_losses if loss] if flat is None else [one.loss for one in flat]


def copied(loss: Any) -> Any:
    """A loss with the same contents; `copy.copy` would save and load it, which the compiled loss refuses."""
    other = object.__new__(type(loss))
    other.__dict__.update(loss.__dict__)
    return other


def with_losses(compiled: Any, losses: list[Any], metrics: list[Any]) -> Any:
    """A copy of what Keras makes of the losses of `compile` with others in their places."""
    other, rest = copied(compiled), iter(losses)
    if getattr(compiled, "_flat_losses", None) is None:
        other.flat_losses = [next(rest) if loss else loss for loss in compiled.flat_losses]
    else:
        other._flat_losses = [one._replace(loss=next(rest)) for one in compiled._flat_losses]
    other._metrics = metrics
    return other


def is_loss_built(model: Any) -> bool:
    """Whether the losses and metrics of `compile` have made their variables."""
    parts = (NAMES.of(model, "_compile_loss"), NAMES.of(model, "_compile_metrics"))
    return all(part is None or part.built for part in parts)


def loss_tracker(model: Any) -> Any:
    """The metric that keeps the mean of the loss."""
    return NAMES.of(model, "_loss_tracker")


def compute_loss(model: Any, **arguments: Any) -> Any:
    """The loss by the model's own `compute_loss`, which may take `training` or not."""
    return NAMES.of(model, "_compute_loss")(**arguments)


def added_loss(model: Any, loss: Any) -> Any:
    """The number that a loss of a layer adds to that of the model."""
    aggregate = getattr(model, "_aggregate_additional_loss", None)
    # Before 3.6 there was no such method, and nothing to change about it.
    return keras.ops.sum(keras.ops.cast(loss, keras.backend.floatx())) if aggregate is None else aggregate(loss)


def losses_given(model: Any, losses: list[Any]) -> AbstractContextManager[None]:
    """Has a `compute_loss` find these among `model.losses`."""
    NAMES.of(model, "_losses_override")
    return replaced([Replacement(model, "_losses_override", list(losses))])
