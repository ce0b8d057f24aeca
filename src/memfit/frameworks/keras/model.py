"""A compiled Keras model: checked, built for a batch, its layers named, its variables sorted by what they are for."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import keras

from memfit.core.errors import BadBatch, BadInput, BadModel, MissingDependency, StepFailed, how_to_install
from memfit.core.printing import text_of
from memfit.core.timeline import Category
from memfit.core.trace import Trace
from memfit.core.user_code import user_line
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.batch import Batch, item_bytes, leaves, mapped

IS_SPLIT = "memfit_is_split"
"""What the training step of Keras has as an attribute where it is run in parts."""
OPTIMIZER = "(optimizer)"
METRICS = "(metrics)"
_BACKENDS = ("torch", "jax", "tensorflow")
_HOW_TO_BUILD = "call each of them on a batch first, or give it an Input."
_FOR_A_GUARD = "A guard has to know all variables before the first step"


@dataclass(frozen=True, slots=True)
class HeldVariable:
    """One variable of a model."""

    variable: Any
    category: Category
    module: str  # dotted path of the layer that holds it, or that it keeps state for

    @property
    def size_bytes(self) -> int:
        """Bytes of its numbers."""
        return size_of(self.variable)


def number_of(variable: Any) -> int:
    """Elements of a variable."""
    return math.prod(int(size) for size in variable.shape)


def size_of(variable: Any) -> int:
    """Bytes of a variable, as Keras declares it."""
    return number_of(variable) * item_bytes(str(variable.dtype))


def has_own_step(model: Any) -> bool:
    """Whether a model brings its own `train_step`, which may take any batch, and call its parts as it likes."""
    own = vars(model).get("train_step")
    return type(model).train_step is not keras.Model.train_step or (own is not None and not hasattr(own, IS_SPLIT))


def optimizers_of(model: Any) -> list[Any]:
    """The optimizer of `compile`, then those that the model and its layers keep for a training step of their own."""
    found: dict[int, Any] = {}
    waiting = [model.optimizer, *(vars(layer) for layer in internals.layers_of(model))]
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, keras.optimizers.Optimizer):
            found.setdefault(id(value), value)
        elif isinstance(value, dict):
            waiting.extend(part for part in value.values() if isinstance(part, (keras.optimizers.Optimizer, list)))
        elif isinstance(value, list):
            waiting.extend(part for part in value if isinstance(part, keras.optimizers.Optimizer))
    return list(found.values())


def check_model(model: Any, *, training: bool) -> None:
    """Refuses a model that has no training step, or a backend on which none runs."""
    _check_backend()
    if not training:
        return
    if not isinstance(model, keras.Model):
        raise BadModel(
            f"a compiled keras.Model was expected, but {type(model).__name__} was given. PyTorch modules and functions "
            "of JAX are given with a loss and an optimizer; memfit.Guard trains PyTorch modules."
        )
    if not getattr(model, "compiled", False):
        raise BadModel(
            f"the model {model.name!r} isn't compiled, so that it has neither loss nor optimizer. "
            "Compile it first: model.compile(optimizer=..., loss=...)."
        )
    if not isinstance(model.optimizer, keras.optimizers.Optimizer) and not has_own_step(model):
        raise BadModel(
            f"the model {model.name!r} was compiled with the optimizer {model.optimizer!r}. "
            "Compile it with one of Keras: model.compile(optimizer='adam', loss=...)."
        )


def _check_backend() -> None:
    """Refuses a backend that doesn't train, or isn't there."""
    name = str(keras.backend.backend())
    if name not in _BACKENDS:
        raise BadInput(
            f"Keras runs on {name}, which doesn't train. Set KERAS_BACKEND to one of {', '.join(_BACKENDS)} "
            "before Keras is imported."
        )
    if find_spec(name) is None:
        raise MissingDependency(f"Keras runs on {name}, which isn't installed. Install it with {how_to_install(name)}.")


def check_inputs(model: Any, batch: Batch) -> None:
    """Refuses a batch whose arrays don't have the shapes of the model's inputs; both are shown."""
    inputs = getattr(model, "inputs", None)
    if not inputs or has_own_step(model):
        # A training step of the model's own decides which part of a batch goes where.
        return
    given = leaves(batch.x)
    if isinstance(batch.x, dict):
        names = [tensor.name for tensor in inputs]
        missing = set(names) - set(batch.x)
        is_flat = not any(isinstance(part, dict | list | tuple) for part in batch.x.values())
        if missing and is_flat and len(batch.x) != len(names):
            raise BadBatch(
                f"the model's inputs are {', '.join(names)}, but the batch's x has {', '.join(batch.x)}: "
                f"{', '.join(sorted(missing))} is missing. Give x an array for each input."
            )
        # Models made with a dictionary of inputs sort it by its keys.
        given = [batch.x[name] for name in (sorted(batch.x) if missing else names)]
    if len(given) != len(inputs):
        shapes = ", ".join(f"{tensor.name!r} of shape {_shape(tensor)}" for tensor in inputs)
        raise BadBatch(
            f"the model {model.name!r} has {len(inputs)} inputs, {shapes}, but the batch's x holds "
            f"{len(given)}: {', '.join(str(spec.shape) for spec in given)}. Give as many arrays: ([a, b], y)."
        )
    for tensor, spec in zip(inputs, given, strict=True):
        wanted, real = tuple(tensor.shape), spec.shape
        if len(wanted) == len(real) + 1 and wanted[-1] in (None, 1):
            # Keras adds a last dimension of 1 where it is missing, and takes away one that is too much.
            wanted = wanted[:-1]
        elif len(real) == len(wanted) + 1 and real[-1] == 1:
            real = real[:-1]
        # A model whose batch size is fixed is traced at others all the same; Keras checks that itself.
        sizes = zip(wanted[1:], real[1:], strict=False)
        if len(wanted) != len(real) or any(size not in (None, own) for size, own in sizes):
            raise BadBatch(
                f"the batch doesn't match the model's inputs: {tensor.name!r} of {model.name!r} takes arrays of shape "
                f"{_shape(tensor)}, but {spec.shape} was given. Give arrays of that shape."
            )


def _shape(tensor: Any) -> str:
    first, *rest = tensor.shape
    sizes = ["batch" if first is None else str(first), *("any" if size is None else str(size) for size in rest)]
    return f"({', '.join(sizes)}{'' if rest else ','})"


def build(model: Any, batch: Batch, *, training: bool) -> None:
    """Makes the variables that the first step would make: of layers, metrics and loss; not those of the optimizer.

    Call it inside of `restoring`, which puts the model back.
    """
    if training and has_own_step(model) and _is_built_by_its_step(model):
        return
    symbolic = mapped(lambda spec: keras.KerasTensor(spec.shape, spec.dtype), batch.data)
    # Keras then leaves the optimizer alone: each backend has its own way to build it.
    optimizer = model.optimizer if training else None
    was_built = optimizer is not None and optimizer.built
    try:
        if optimizer is not None:
            optimizer.built = True
            internals.symbolic_build(model, data_batch=symbolic)
        elif not all(layer.built for layer in internals.layers_of(model)):
            x = symbolic[0] if isinstance(symbolic, tuple) else symbolic
            internals.compute_output_spec(model, x, training=False)
    except Exception as error:
        shapes = ", ".join(str(spec.shape) for spec in batch.specs())
        raise StepFailed(
            f"Keras can't build the model {model.name!r} for a batch of the shapes {shapes}{user_line(error)[0]}: "
            f"{type(error).__name__}: {text_of(error)}\nGive x and y that fit the model and its loss. A model that "
            "Keras can't build by itself is built by calling it on one batch."
        ) from error
    finally:
        if optimizer is not None:
            optimizer.built = was_built


def _is_built_by_its_step(model: Any) -> bool:
    """Whether the training step itself makes what is missing, or nothing is.

    TensorFlow makes variables while it traces a step. Where a model has no `call`, there is nothing to build it by.
    """
    if keras.backend.backend() == "tensorflow":
        return True
    if has_call(model):
        return False
    missing = _unbuilt(model)
    if missing:
        raise StepFailed(f"{missing}. Keras can't fit it either: {_HOW_TO_BUILD}")
    return True


def has_call(model: Any) -> bool:
    """Whether a model can be called; one that can't is trained by a step of its own, which calls its layers."""
    return type(model).call is not keras.Model.call


def _unbuilt(model: Any) -> str:
    missing = [layer.name for layer in internals.layers_of(model) if layer is not model and not layer.built]
    if not missing:
        return ""
    return f"the model {model.name!r} has no call(), and these of its layers aren't built: {', '.join(missing[:5])}"


def check_known(model: Any) -> None:
    """Refuses a model whose variables come to be in its first step: a guard could not put them back."""
    missing = "" if has_call(model) else _unbuilt(model)
    if missing:
        raise BadModel(f"{missing}. {_FOR_A_GUARD}: {_HOW_TO_BUILD}")
    unknown = [one.name for one in optimizers_of(model) if one is not model.optimizer and not one.built]
    if unknown:
        raise BadModel(
            f"the model {model.name!r} has optimizers of its own that aren't built yet: {', '.join(unknown)}. "
            f"{_FOR_A_GUARD}: call optimizer.build(variables) of each with the variables that it trains."
        )


def layer_paths(model: Any) -> dict[int, str]:
    """The dotted path of each layer by its `id`, in the order of the model: names of the layers from the outside in."""
    paths: dict[int, str] = {id(model): ""}

    def name(layer: Any, prefix: str) -> None:
        taken: Counter[str] = Counter()
        parts = [part for part in internals.sublayers_of(layer) if id(part) not in paths]
        for part in parts:
            taken[part.name] += 1
            # Nothing keeps the parts of a layer of the user's own from having one name.
            number = f"#{taken[part.name]}" if taken[part.name] > 1 else ""
            paths.setdefault(id(part), f"{prefix}{part.name}{number}")
        for part in parts:
            name(part, f"{paths[id(part)]}.")

    name(model, "")
    return paths


def paths_of(model: Any) -> list[str]:
    """The dotted paths of a model's layers."""
    return [path for path in layer_paths(model).values() if path]


def variables_of(model: Any, *, training: bool) -> list[HeldVariable]:
    """Every variable of a model that is built, each once: layers, metrics, then the optimizer's."""
    paths = layer_paths(model)
    seen: set[int] = set()
    found: list[HeldVariable] = []

    def add(variable: Any, category: Category, module: str) -> None:
        if id(variable) not in seen:
            seen.add(id(variable))
            found.append(HeldVariable(variable, category, module))

    for layer in internals.layers_of(model):
        path = paths.get(id(layer), "")
        trained, others, seeds = internals.own_variables(layer)
        for variable in trained:
            add(variable, Category.PARAMETER, path)
        for variable in (*others, *seeds):
            add(variable, Category.BUFFER, path)
        for metric in internals.metrics_of(layer):
            for variable in metric.variables:
                add(variable, Category.BUFFER, METRICS)
    if training:
        for variable in model.metrics_variables:
            add(variable, Category.BUFFER, METRICS)
        owners = {str(one.variable.path).replace("/", "_"): one.module for one in found}
        for optimizer in optimizers_of(model):
            for variable in optimizer.variables:
                add(variable, Category.OPTIMIZER_STATE, owner_of(str(variable.name), owners))
    return found


def owner_of(name: str, owners: dict[str, str]) -> str:
    """The layer that an optimizer's variable keeps state for: its name begins with the path of that one's variable."""
    while name:
        if name in owners:
            return owners[name]
        name = name.rpartition("_")[0]
    return OPTIMIZER


def state_bytes(variables: Sequence[HeldVariable], trained: Iterable[Any]) -> dict[Category, int]:
    """Parameters, buffers, gradients and optimizer state in full.

    Counters and seeds count with 4 bytes a number: how wide they are is the one thing in which the backends differ.
    """
    with_gradient = {id(variable) for variable in trained}
    sizes: Counter[Category] = Counter()
    for one in variables:
        variable = one.variable
        is_counter = len(variable.shape) == 0 or "seed_generator_state" in str(variable.name)
        is_narrowed = is_counter and "int" in str(variable.dtype)
        sizes[one.category] += 4 * number_of(variable) if is_narrowed else one.size_bytes
        if id(variable) in with_gradient:
            sizes[Category.GRADIENT] += one.size_bytes
    return {category: size for category, size in sizes.items() if size}


def trace_of(step: Trace, variables: Sequence[HeldVariable], trained: Iterable[Any]) -> Trace:
    """The trace of a step with the sizes of its variables, of which `trained` have gradients."""
    sizes = state_bytes(variables, trained)
    count = sum(number_of(one.variable) for one in variables if one.category is Category.PARAMETER)
    parameter_bytes = sizes.get(Category.PARAMETER, 0)
    return replace(step, num_parameters=count, parameter_bytes=parameter_bytes, state_bytes=sizes)
