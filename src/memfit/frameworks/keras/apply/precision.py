"""Mixed precision on a live Keras model: layers compute in 16 bits, their variables stay in float32.

Keras sets the policy when a layer is made; what a layer computes in is looked up at each call, so that a model that
exists can be switched, and switched back. Layers that make the model's outputs stay in float32, as Keras advises,
since a softmax in 16 bits loses what the loss needs; layers with a loss of their own stay as well. float16 has few
exponents, so that small gradients would vanish: its loss is scaled by Keras's own `LossScaleOptimizer`, around the
optimizer that is there, with its state.
"""

from collections.abc import Callable
from typing import Any

import keras

from memfit.core.errors import BadInput, BadModel
from memfit.core.settings import Settings
from memfit.frameworks.keras import internals

Undo = Callable[[], None]

_POLICIES = {"amp-bf16": "mixed_bfloat16", "amp-fp16": "mixed_float16"}
_OUTPUT_ACTIVATIONS = ("softmax", "sigmoid", "log_softmax")


def apply(settings: Settings, model: keras.Model) -> Undo:
    """Has a built float32 model compute in `settings.precision`, variables in float32; returns what undoes it."""
    if settings.precision is None:
        return lambda: None
    policy = _policy(settings.precision)
    layers = [layer for layer in internals.layers_of(model) if _is_plain(layer)]
    # Models are layers too, whose policy says nothing about what is in them.
    if not any(any(internals.own_variables(layer)[:2]) for layer in layers):
        names = sorted({str(layer.dtype_policy.name) for layer in internals.layers_of(model)})
        raise BadModel(
            f"the model {model.name!r} can't be switched to {policy}: its layers compute in {', '.join(names)}, and "
            "only those in float32 can be. Leave precision out."
        )
    # Losses of layers are added to the model's in float32, which TensorFlow refuses to do with 16 bits.
    kept = {id(layer) for layer in layers if layer.activity_regularizer is not None}
    kept |= {id(layer) for layer in output_layers(model)}
    before = [(layer, layer.dtype_policy) for layer in layers if id(layer) not in kept]
    for layer, _ in before:
        layer.dtype_policy = policy
    bring_back = replace_optimizer(model, _scaled if policy == "mixed_float16" else lambda optimizer: optimizer)

    def undo() -> None:
        for layer, plain in before:
            layer.dtype_policy = plain
        bring_back()

    return undo


def replace_optimizer(model: keras.Model, make: Callable[[Any], Any]) -> Undo:
    """Gives a compiled model what `make` makes of its optimizer; returns what brings its own back."""
    optimizer = model.optimizer if model.compiled else None
    if optimizer is not None:
        model.optimizer = make(optimizer)
    used = model.optimizer if optimizer is not None else None
    internals.forget_functions(model)

    def undo() -> None:
        # Another call of compile may have brought another one.
        if optimizer is not None and model.optimizer is used:
            model.optimizer = optimizer
        internals.forget_functions(model)

    return undo


def difference(settings: Settings) -> str:
    """What differs from the plain step in words, or ""."""
    if settings.precision is None:
        return ""
    name = _policy(settings.precision).removeprefix("mixed_")
    scaled = ", and steps whose gradients overflow are left out" if name == "float16" else ""
    return f"layers compute in {name}, which rounds more coarsely than float32{scaled}"


def output_layers(model: keras.Model) -> list[Any]:
    """The layers that make a model's outputs, which stay in float32."""
    graph = internals.graph_of(model)
    if graph is None:
        return [layer for layer in internals.sublayers_of(model) if _activation(layer) in _OUTPUT_ACTIVATIONS]
    made = [internals.maker_of(symbol) for symbol in graph.outputs]
    # A nested model isn't one layer: its own outputs are meant.
    return [part for one in made for part in (output_layers(one) if internals.graph_of(one) is not None else [one])]


def _activation(layer: Any) -> str:
    if isinstance(layer, keras.layers.Softmax):
        return "softmax"
    return str(getattr(getattr(layer, "activation", None), "__name__", ""))


def _policy(precision: str) -> str:
    if precision not in _POLICIES:
        raise BadInput(
            f"precision is {precision!r}, but Keras models can be switched to {' or '.join(map(repr, _POLICIES))} only."
        )
    return _POLICIES[precision]


def _is_plain(layer: Any) -> bool:
    policy = layer.dtype_policy
    is_float32 = policy.compute_dtype == "float32" and policy.variable_dtype == "float32"
    return is_float32 and policy.quantization_mode is None and not isinstance(layer, keras.layers.InputLayer)


def _scaled(optimizer: Any) -> Any:
    """The optimizer, with its state, behind one that scales the loss."""
    # One may scale the loss by itself, by a factor of the user's own.
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor is not None:
        return optimizer
    scaled = keras.optimizers.LossScaleOptimizer(optimizer, name=f"scaled_{optimizer.name}")
    if optimizer.built:
        scaled.build(internals.updated_by(optimizer))
    return scaled
