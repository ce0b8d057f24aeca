"""Estimates of Keras models on the backend of the environment, as one line of JSON."""

import json

import keras
import numpy as np
from keras import layers

import memfit

keras.utils.set_random_seed(0)


def convolutional():
    model = keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            layers.Conv2D(8, 3, padding="same", activation="relu", name="conv"),
            layers.BatchNormalization(name="norm"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(10, activation="softmax", name="head"),
        ]
    )
    model.compile(keras.optimizers.Adam(use_ema=True), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model, (np.zeros((16, 16, 16, 3), "float32"), np.zeros(16, "int32"))


def recurrent():
    model = keras.Sequential([keras.Input((12, 8)), layers.LSTM(16, name="lstm"), layers.Dense(1, name="head")])
    model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
    return model, (np.zeros((16, 12, 8), "float32"), np.zeros((16, 1), "float32"))


def transformer():
    tokens = keras.Input((10,), dtype="int32")
    x = layers.Embedding(50, 16, name="embed")(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8, name="attend")(x, x))
    model = keras.Model(tokens, layers.Dense(50, name="head")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.1, 10), clipnorm=1.0), loss)
    return model, (np.zeros((16, 10), "int32"), np.zeros((16, 10), "int32"))


class Block(layers.Layer):
    def __init__(self, width, **options):
        super().__init__(**options)
        self.grow, self.shrink = layers.Dense(4 * width, name="grow"), layers.Dense(width, name="shrink")

    def call(self, x):
        return x + self.shrink(keras.ops.gelu(self.grow(x)))


class Subclassed(keras.Model):
    """With a frozen layer, its layers not built, and a training step of its own."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(16, name="first", trainable=False)
        self.block = Block(16, name="block")
        self.last = layers.Dense(3, name="last")

    def call(self, x):
        return self.last(self.block(self.first(x)))

    def train_step(self, *arguments):
        return super().train_step(*arguments)


def subclassed():
    model = Subclassed()
    model.compile("rmsprop", keras.losses.CategoricalCrossentropy(from_logits=True))
    return model, (np.zeros((16, 8), "float32"), np.zeros((16, 3), "float32"))


def two_inputs():
    a, b = keras.Input((8,), name="a"), keras.Input((4,), name="b")
    x = layers.Concatenate()([layers.Dense(16)(a), b])
    model = keras.Model({"a": a, "b": b}, [layers.Dense(5, name="c")(x), layers.Dense(1, name="d")(x)])
    model.compile(keras.optimizers.Adafactor(), ["mse", "mae"])
    x = {"a": np.zeros((16, 8), "float32"), "b": np.zeros((16, 4), "float32")}
    return model, (x, [np.zeros((16, 5), "float32"), np.zeros((16, 1), "float32")], [np.ones(16), np.ones(16)])


def messages():
    """What is said about bad input."""
    model, batch = recurrent()
    plain = keras.Sequential([keras.Input((8,)), layers.Dense(1)], name="plain")
    given = {
        "uncompiled": (plain, batch),
        "no batch": (model, None),
        "other shape": (model, (np.zeros((16, 12, 7), "float32"), batch[1])),
        "other loss": (model, (batch[0], np.zeros((16, 3, 5, 7), "float32"))),
    }
    found = {}
    for name, (one, data) in given.items():
        try:
            memfit.estimate(one, batch=data, device="cpu")
        except memfit.MemfitError as error:
            found[name] = [type(error).__name__, str(error)]
    return found


def state_of(model):
    values = [keras.ops.convert_to_numpy(variable.value).tolist() for variable in model.variables]
    return values, len(model.optimizer.variables), model.optimizer.built, sorted(vars(model))


def estimated(make):
    model, batch = make()
    before = state_of(model)
    estimate = memfit.estimate(model, batch=batch, device="cpu")
    tick, _ = estimate.timeline.peak()
    return {
        "state": dict(estimate.state_bytes),
        "parameters": estimate.num_parameters,
        "peak": estimate.replay.reserved_peak_bytes,
        "untouched": state_of(model) == before and model.train_function is None,
        "modules": sorted({block.module for block in estimate.timeline.blocks}),
        "phases": sorted({block.phase for block in estimate.timeline.blocks}),
        "at peak": estimate.timeline.breakdown(tick, lambda block: str(block.category)),
    }


MODELS = (convolutional, recurrent, transformer, subclassed, two_inputs)
found = {make.__name__: estimated(make) for make in MODELS}
model, batch = subclassed()
searched = memfit.max_batch(model, batch=batch, device="1GiB")
found["max batch"] = [searched.batch_size, searched.estimate.fits, searched.estimate.replay.reserved_peak_bytes]
found["inference"] = memfit.estimate(model, batch=batch[0], device="cpu", mode="inference").replay.reserved_peak_bytes
found["messages"] = messages()
model.fit(*batch, verbose=0)
found["backend"] = keras.backend.backend()
print(json.dumps(found))
