"""A compiled Keras model: checked, built for a batch, its layers named, its variables sorted by what they are for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras

from memfit.adapters.keras.batch import Batch, Spec, flatten, item_bytes, mapped
from memfit.core.errors import BadBatch, BadModel, StepFailed
from memfit.core.settings import Settings
from memfit.core.timeline import Category

OPTIMIZER = "(optimizer)"
METRICS = "(metrics)"


@dataclass(frozen=True, slots=True)
class Held:
    """One variable of a model.

    Args:
        variable: Keras's.
        category: what it is for.
        module: dotted path of the layer that holds it, or of the one that it keeps state for.
    """

    variable: Any
    category: Category
    module: str

    @property
    def size_bytes(self) -> int:
        """Bytes of its numbers, as Keras declares them."""
        return number_of(self.variable) * item_bytes(str(self.variable.dtype))


def number_of(variable: Any) -> int:
    """Elements of a variable."""
    count = 1
    for size in variable.shape:
        count *= int(size)
    return count


def has_own_step(model: Any) -> bool:
    """Whether a model brings its own `train_step`, which may take any batch, and call its parts as it likes."""
    return type(model).train_step is not keras.Model.train_step or "train_step" in vars(model)


def optimizers_of(model: Any) -> list[Any]:
    """The optimizer of `compile`, then those that the model and its layers keep for a training step of their own."""
    found: dict[int, Any] = {}
    waiting = [model.optimizer, *(vars(layer) for layer in _layers(model))]
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
    """Refuses a model that has no training step."""
    if not training:
        return
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


def check_inputs(model: Any, batch: Batch) -> None:
    """Refuses a batch whose arrays don't have the shapes of the model's inputs; both are shown."""
    inputs = getattr(model, "inputs", None)
    if not inputs or has_own_step(model):
        # A training step of the model's own decides which part of a batch goes where.
        return
    given = _ordered(batch.x, inputs)
    if len(given) != len(inputs):
        raise BadBatch(
            f"the model {model.name!r} has {len(inputs)} inputs, {_shapes(inputs)}, but the batch's x holds "
            f"{len(given)}: {', '.join(str(spec.shape) for spec in given)}. Give as many arrays: ([a, b], y)."
        )
    for wanted, spec in zip(inputs, given, strict=True):
        if not _matches(tuple(wanted.shape), spec.shape):
            raise BadBatch(
                f"the batch doesn't match the model's inputs: {wanted.name!r} of {model.name!r} takes arrays of shape "
                f"{_shape(wanted)}, but {spec.shape} was given. Give arrays of that shape."
            )


def _ordered(x: Any, inputs: Any) -> list[Spec]:
    """The arrays of x in the order of the model's inputs."""
    if isinstance(x, dict):
        names = [tensor.name for tensor in inputs]
        if set(names) <= set(x):
            return [x[name] for name in names]
        missing = ", ".join(sorted(set(names) - set(x)))
        if not any(isinstance(part, dict | list | tuple) for part in x.values()) and len(x) != len(names):
            raise BadBatch(
                f"the model's inputs are {', '.join(names)}, but the batch's x has {', '.join(x)}: {missing} is "
                "missing. Give x an array for each input."
            )
        # Models made with a dictionary of inputs sort it by its keys.
        return [x[name] for name in sorted(x)]
    return [spec for spec in flatten(x) if spec is not None]


def _matches(wanted: tuple[Any, ...], given: tuple[int, ...]) -> bool:
    if len(wanted) == len(given) + 1 and wanted[-1] in (None, 1):
        # Keras adds a last dimension of 1 where it is missing, and takes away one that is too much.
        wanted = wanted[:-1]
    elif len(given) == len(wanted) + 1 and given[-1] == 1:
        given = given[:-1]
    if len(wanted) != len(given):
        return False
    # A model whose batch size is fixed is traced at others all the same; Keras checks that itself.
    return all(size is None or size == real for size, real in zip(wanted[1:], given[1:], strict=True))


def _shape(tensor: Any) -> str:
    sizes = ["batch" if size is None else str(size) for size in tensor.shape[:1]]
    sizes += ["any" if size is None else str(size) for size in tensor.shape[1:]]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def _shapes(inputs: Any) -> str:
    return ", ".join(f"{tensor.name!r} of shape {_shape(tensor)}" for tensor in inputs)


def build(model: Any, batch: Batch, *, training: bool) -> None:
    """Makes the variables that the first step would make: of layers, metrics and loss; not those of the optimizer.

    Call it where the model is kept `untouched`.
    """
    if training and has_own_step(model) and _is_built_by_its_step(model):
        return
    symbolic = mapped(lambda spec: None if spec is None else keras.KerasTensor(spec.shape, spec.dtype), batch.data)
    try:
        if training:
            with _said_to_be_built(model.optimizer):
                model._symbolic_build(data_batch=symbolic)
        elif not all(layer.built for layer in model._flatten_layers()):
            x = symbolic[0] if isinstance(symbolic, tuple) else symbolic
            keras.src.backend.compute_output_spec(model, x, training=False)
    except Exception as error:
        shapes = ", ".join(str(spec.shape) for spec in batch.specs())
        text = " ".join(str(error).split())
        raise StepFailed(
            f"Keras can't build the model {model.name!r} for a batch of the shapes {shapes}: "
            f"{type(error).__name__}: {text}\nGive x and y that fit the model and its loss. A model that Keras can't "
            "build by itself is built by calling it on one batch."
        ) from error


def _is_built_by_its_step(model: Any) -> bool:
    """Whether the training step itself makes what is missing, or nothing is.

    TensorFlow makes variables while it traces a step. Where a model has no `call`, there is nothing to build it by.
    """
    if keras.backend.backend() == "tensorflow":
        return True
    if type(model).call is not keras.Model.call:
        return False
    missing = [layer.name for layer in _layers(model) if layer is not model and not layer.built]
    if missing:
        raise StepFailed(
            f"the model {model.name!r} has no call(), and these of its layers aren't built: {', '.join(missing[:5])}. "
            "Keras can't fit it either: call each of them on a batch first, or give it an Input."
        )
    return True


@contextmanager
def fitted(model: Any, settings: Settings | None, *, training: bool) -> Iterator[None]:
    """Runs the model as settings say while it lasts, whether or not its numbers stay what they are."""
    if settings is None:
        yield
        return
    if training:
        from memfit.adapters.keras.fitting.fitted import FittedModel

        undo = FittedModel(settings, model, approximate=True).undo
    else:
        from memfit.adapters.keras.fitting import precision

        undo = precision.apply(settings, model)
    try:
        yield
    finally:
        undo()


@contextmanager
def _said_to_be_built(optimizer: Any) -> Iterator[None]:
    """Keras leaves the optimizer alone while this lasts: each backend has its own way to build it."""
    before = optimizer.built
    optimizer.built = True
    try:
        yield
    finally:
        optimizer.built = before


def layer_paths(model: Any) -> dict[int, str]:
    """The dotted path of each layer by its `id`, in the order of the model: names of the layers from the outside in."""
    paths: dict[int, str] = {id(model): ""}
    _name(model, "", paths)
    return paths


def _name(layer: Any, prefix: str, paths: dict[int, str]) -> None:
    taken: dict[str, int] = {}
    named = []
    for part in layer._layers:
        if id(part) in paths:
            continue
        name = part.name
        # Nothing keeps the parts of a layer of the user's own from having one name.
        taken[name] = taken.get(name, 0) + 1
        if taken[name] > 1:
            name = f"{name}#{taken[name]}"
        paths[id(part)] = f"{prefix}.{name}" if prefix else name
        named.append(part)
    for part in named:
        _name(part, paths[id(part)], paths)


class LayerNames:
    """Finds layers by the names that backends give to operators: the scopes of the layers around them.

    Args:
        model: whose layers are meant; None where there are several.
        paths: of the layers of several models.
    """

    def __init__(self, model: Any, paths: Sequence[str] = ()) -> None:
        self._root = "" if model is None else str(model.name)
        self.paths = tuple(paths if model is None else (path for path in layer_paths(model).values() if path))
        self._known = frozenset(self.paths)
        self._found: dict[str, str] = {}

    def of(self, scopes: str) -> str:
        """The dotted path of the innermost layer among dotted scopes, "" outside of all."""
        if scopes not in self._found:
            parts = scopes.split(".") if scopes else []
            if self._root in parts:
                parts = parts[parts.index(self._root) + 1 :]
            self._found[scopes] = self._innermost(parts)
        return self._found[scopes]

    def _innermost(self, parts: list[str]) -> str:
        for start in range(len(parts)):
            for end in range(len(parts), start, -1):
                path = ".".join(parts[start:end])
                if path in self._known:
                    return path
        return ""


def held(model: Any, *, training: bool) -> list[Held]:
    """Every variable of a model that is built, each once: layers, metrics, then the optimizer's."""
    paths = layer_paths(model)
    seen: set[int] = set()
    found: list[Held] = []

    def add(variable: Any, category: Category, module: str) -> None:
        if id(variable) not in seen:
            seen.add(id(variable))
            found.append(Held(variable, category, module))

    for layer in _layers(model):
        path = paths.get(id(layer), "")
        for variable in layer._trainable_variables:
            add(variable, Category.PARAMETER, path)
        for variable in layer._non_trainable_variables:
            add(variable, Category.BUFFER, path)
        for generator in layer._seed_generators:
            add(generator.state, Category.BUFFER, path)
        for metric in layer._metrics:
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


def _layers(model: Any) -> Iterator[Any]:
    seen: set[int] = set()
    for layer in model._flatten_layers():
        if id(layer) not in seen:
            seen.add(id(layer))
            yield layer


def owner_of(name: str, owners: dict[str, str]) -> str:
    """The layer that an optimizer's variable keeps state for: its name begins with the path of that one's variable."""
    while name:
        if name in owners:
            return owners[name]
        name = name.rpartition("_")[0]
    return OPTIMIZER


def state_bytes(model: Any, variables: list[Held], *, training: bool) -> dict[Category, int]:
    """Parameters, buffers, gradients and optimizer state in full.

    Counters and seeds count with 4 bytes a number: how wide they are is the one thing in which the backends differ.
    """
    trained = {id(variable) for variable in model.trainable_variables} if training else set()
    sizes: dict[Category, int] = {}
    for one in variables:
        sizes[one.category] = sizes.get(one.category, 0) + _common_bytes(one)
        if id(one.variable) in trained:
            sizes[Category.GRADIENT] = sizes.get(Category.GRADIENT, 0) + one.size_bytes
    return {category: size for category, size in sizes.items() if size}


def _common_bytes(one: Held) -> int:
    variable = one.variable
    is_counter = len(variable.shape) == 0 or "seed_generator_state" in str(variable.name)
    if is_counter and "int" in str(variable.dtype):
        return 4 * number_of(variable)
    return one.size_bytes
