"""Small models, data and ways to compile them, on which micro-batched `fit` is held against plain `fit`.

They are chosen for what a mean over a batch depends on: sample weights, class weights, masks, several outputs with
losses of their own, losses that layers add, regularizers, reductions, and a `compute_loss` of the user's own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers, ops

NUM_SAMPLES, BATCH_SIZE, MICRO_BATCH_SIZE, NUM_EPOCHS = 26, 10, 4, 3


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its data and how it is compiled.

    Args:
        model: built or not.
        x: inputs.
        y: targets.
        compiled: arguments of `compile` besides the optimizer.
        fitted: arguments of `fit` besides the data.
    """

    model: Any
    x: Any
    y: Any
    compiled: dict[str, Any]
    fitted: dict[str, Any] = field(default_factory=dict)


def optimizer(seed: int) -> Any:
    """Adam with a cosine schedule, moving averages, weight decay, and one way of clipping for each seed."""
    clipping = ({"global_clipnorm": 0.1}, {"clipnorm": 0.05}, {"clipvalue": 0.01})[seed % 3]
    schedule = keras.optimizers.schedules.CosineDecay(0.01, 9, warmup_target=0.02, warmup_steps=3)
    return keras.optimizers.Adam(
        schedule, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=4, weight_decay=0.004, **clipping
    )


def _dense(random: np.random.Generator) -> Case:
    model = keras.Sequential([layers.Input((7,)), layers.Dense(16, "gelu"), layers.Dense(3)])
    x, y = random.normal(size=(NUM_SAMPLES, 7)), random.normal(size=(NUM_SAMPLES, 3))
    return Case(model, x, y, {"loss": "mse", "metrics": ["mae"]}, {"sample_weight": random.uniform(0, 3, NUM_SAMPLES)})


def _cnn(random: np.random.Generator) -> Case:
    inputs = layers.Input((8, 8, 3))
    hidden = layers.Conv2D(6, 3, activation="relu", kernel_regularizer=keras.regularizers.L2(0.01))(inputs)
    hidden = layers.GroupNormalization(2)(layers.Conv2D(8, 3, strides=2)(hidden))
    outputs = layers.Dense(4, "softmax")(layers.GlobalAveragePooling2D()(layers.Activation("relu")(hidden)))
    x, y = random.normal(size=(NUM_SAMPLES, 8, 8, 3)), random.integers(0, 4, NUM_SAMPLES)
    compiled = {"loss": "sparse_categorical_crossentropy", "weighted_metrics": ["accuracy"]}
    return Case(keras.Model(inputs, outputs), x, y, compiled, {"class_weight": {0: 1.0, 1: 0.3, 2: 2.0, 3: 5.0}})


def _tokens(random: np.random.Generator, length: int = 9) -> Any:
    """Sequences of unequal lengths, filled up with zeros."""
    tokens = random.integers(1, 20, (NUM_SAMPLES, length))
    tokens[np.arange(length)[None, :] >= random.integers(1, length + 1, NUM_SAMPLES)[:, None]] = 0
    return tokens


def _lstm(random: np.random.Generator) -> Case:
    model = keras.Sequential(
        [
            layers.Input((9,), dtype="int32"),
            layers.Embedding(20, 6, mask_zero=True),
            layers.LSTM(8, return_sequences=True),
            layers.Dense(20, "softmax"),
        ]
    )
    tokens = _tokens(random)
    return Case(model, tokens, tokens[:, ::-1], {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]})


def _transformer(random: np.random.Generator) -> Case:
    tokens = layers.Input((9,), dtype="int32")
    hidden = layers.Embedding(20, 8, mask_zero=True)(tokens)
    attended = layers.MultiHeadAttention(2, 4, use_bias=False)(hidden, hidden, use_causal_mask=True)
    hidden = layers.LayerNormalization()(layers.Add()([hidden, attended]))
    hidden = layers.Add()([hidden, layers.Dense(8)(layers.Dense(16, "gelu")(hidden))])
    model = keras.Model(tokens, layers.Dense(20)(layers.LayerNormalization()(hidden)))
    x = _tokens(random)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Case(model, x, np.roll(x, -1, 1), {"loss": loss, "weighted_metrics": ["accuracy"]})


def _outputs(random: np.random.Generator) -> Case:
    """Two inputs by name, three outputs: a masked sequence, a class and a number, each with a loss of its own."""
    tokens, numbers = layers.Input((9,), dtype="int32", name="tokens"), layers.Input((5,), name="numbers")
    hidden = layers.Embedding(20, 6, mask_zero=True)(tokens)
    sequence = layers.LSTM(6, return_sequences=True)(hidden)
    both = layers.Concatenate()([layers.GlobalAveragePooling1D()(sequence), layers.Dense(6, "tanh")(numbers)])
    outputs = {
        "next": layers.Dense(20, "softmax", name="next")(sequence),
        "kind": layers.Dense(3, "softmax", name="kind", activity_regularizer=keras.regularizers.L1(0.1))(both),
        "size": layers.Dense(2, name="size", kernel_regularizer="l2")(both),
    }
    x = {"tokens": _tokens(random), "numbers": random.normal(size=(NUM_SAMPLES, 5))}
    y = {
        "next": random.integers(0, 20, (NUM_SAMPLES, 9)),
        "kind": np.eye(3)[random.integers(0, 3, NUM_SAMPLES)],
        "size": random.normal(size=(NUM_SAMPLES, 2)),
    }
    losses = {
        "next": "sparse_categorical_crossentropy",
        "kind": keras.losses.CategoricalCrossentropy(reduction="mean_with_sample_weight"),
        "size": keras.losses.Huber(reduction="sum"),
    }
    weights = {"next": 1.0, "kind": 0.5, "size": 0.01}
    compiled = {"loss": losses, "loss_weights": weights, "metrics": {"kind": ["accuracy"], "size": ["mse"]}}
    by_sample = {name: random.uniform(0.1, 2, NUM_SAMPLES) for name in ("next", "kind", "size")}
    by_sample["next"] = random.uniform(0.1, 2, (NUM_SAMPLES, 9))
    return Case(keras.Model([tokens, numbers], outputs), x, y, compiled, {"sample_weight": by_sample})


def _masked_outputs(random: np.random.Generator) -> Case:
    """The least that has a mask, several outputs, and weights of samples."""
    tokens = layers.Input((9,), dtype="int32")
    hidden = layers.Embedding(20, 4, mask_zero=True)(tokens)
    outputs = [
        layers.Dense(3, name="each")(hidden),
        layers.Dense(2, name="all")(layers.GlobalAveragePooling1D()(hidden)),
    ]
    y = [random.normal(size=(NUM_SAMPLES, 9, 3)), random.normal(size=(NUM_SAMPLES, 2))]
    weights = [random.uniform(0.1, 2, (NUM_SAMPLES, 9)), random.uniform(0.1, 2, NUM_SAMPLES)]
    compiled = {"loss": ["mse", keras.losses.Huber(reduction="mean_with_sample_weight")], "loss_weights": [1.0, 0.3]}
    return Case(keras.Model(tokens, outputs), _tokens(random), y, compiled, {"sample_weight": weights})


@keras.saving.register_keras_serializable("memfit")
class Encoder(keras.Model):
    """A subclass whose layers add losses: one a mean over samples, one a sum over them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = layers.Dense(4, "tanh")
        self.decoder = layers.Dense(6)

    def call(self, inputs: Any) -> Any:
        """Adds both losses on its way."""
        code = self.encoder(inputs)
        self.add_loss(0.1 * ops.mean(ops.square(code)))
        self.add_loss(0.01 * ops.sum(ops.abs(code)))
        return self.decoder(code)


def _subclass(random: np.random.Generator) -> Case:
    x = random.normal(size=(NUM_SAMPLES, 6))
    return Case(Encoder(), x, x, {"loss": "mae", "metrics": ["mse"]})


@keras.saving.register_keras_serializable("memfit")
class OwnLoss(keras.Model):
    """A subclass with a `compute_loss` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(8, "relu")
        self.out = layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        """Two layers."""
        return self.out(self.hidden(inputs))

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
        """A mean over samples, and a term of the weights alone, which counts once."""
        return ops.mean(ops.log(ops.cosh(y_pred - y))) + 0.01 * ops.sum(ops.square(self.hidden.kernel))


def _own_loss(random: np.random.Generator) -> Case:
    x, y = random.normal(size=(NUM_SAMPLES, 6)), random.normal(size=(NUM_SAMPLES, 2))
    return Case(OwnLoss(), x, y, {"metrics": ["mse"]})


def _own_function(random: np.random.Generator) -> Case:
    """A loss function that returns a single number, of which Keras doesn't know what it divided by."""
    model = keras.Sequential([layers.Input((7,)), layers.Dense(16, "tanh"), layers.Dense(1)])
    x, y = random.normal(size=(NUM_SAMPLES, 7)), random.normal(size=(NUM_SAMPLES, 1))
    return Case(model, x, y, {"loss": lambda y, y_pred: ops.sum(ops.square(y - y_pred)) * 0.1})


CASES: dict[str, Callable[[np.random.Generator], Case]] = {
    "dense, sample weights": _dense,
    "CNN, class weights": _cnn,
    "LSTM, masked": _lstm,
    "transformer, masked": _transformer,
    "three outputs": _outputs,
    "two outputs, masked": _masked_outputs,
    "subclass with add_loss": _subclass,
    "own compute_loss": _own_loss,
    "own loss function": _own_function,
}


def made(name: str, seed: int, **compiled: Any) -> Case:
    """A case with its model compiled, weights and data by the seed."""
    keras.utils.set_random_seed(seed)
    case = CASES[name](np.random.default_rng(seed))
    case.model.compile(optimizer=optimizer(seed), **case.compiled, **compiled)
    return case


def states(model: Any) -> Iterator[tuple[str, Any]]:
    """Every variable of a model and its optimizer, by name."""
    for index, variable in enumerate([*model.variables, *model.optimizer.variables]):
        yield f"{index} {variable.path}", keras.ops.convert_to_numpy(variable)
