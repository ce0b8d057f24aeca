"""Keras models of many kinds, made from configurations, compiled, with a batch for each.

The same on every backend: import this module after KERAS_BACKEND is set. Inputs are small enough for a laptop and large
enough that activations count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers


@dataclass(frozen=True, slots=True)
class Case:
    """A model to train.

    Attributes:
        name: for tables.
        make: makes the compiled model.
        batch: makes (x, y) for a number of samples.
        batch_size: of the comparison.
    """

    name: str
    make: Callable[[], keras.Model]
    batch: Callable[[int], tuple[Any, Any]]
    batch_size: int


def _images(size: int, num_classes: int) -> Callable[[int], tuple[Any, Any]]:
    def batch(count: int) -> tuple[Any, Any]:
        random = np.random.default_rng(0)
        return random.random((count, size, size, 3), "float32"), random.integers(0, num_classes, count)

    return batch


def _tokens(length: int, vocabulary: int, num_classes: int) -> Callable[[int], tuple[Any, Any]]:
    def batch(count: int) -> tuple[Any, Any]:
        random = np.random.default_rng(0)
        return random.integers(1, vocabulary, (count, length)), random.integers(0, num_classes, count)

    return batch


def _compiled(
    model: keras.Model, optimizer: Any = "adam", loss: str = "sparse_categorical_crossentropy"
) -> keras.Model:
    model.compile(optimizer=optimizer, loss=loss, metrics=[])
    return model


def _application(name: str, size: int, optimizer: str) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        kind = getattr(keras.applications, name)
        return _compiled(kind(weights=None, input_shape=(size, size, 3), classes=100), optimizer)

    return make


def small_cnn() -> keras.Model:
    """Convolutions with batch norm and dropout."""
    model = keras.Sequential([keras.Input((64, 64, 3))])
    for filters in (32, 64, 128):
        for layer in (
            layers.Conv2D(filters, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.MaxPooling2D(),
        ):
            model.add(layer)
    for layer in (layers.Flatten(), layers.Dropout(0.3), layers.Dense(256, activation="relu"), layers.Dense(10)):
        model.add(layer)
    model.add(layers.Softmax())
    return _compiled(model, keras.optimizers.SGD(0.01, momentum=0.9))


def lstm() -> keras.Model:
    """A stack of LSTMs over masked tokens."""
    model = keras.Sequential(
        [
            keras.Input((100,), dtype="int32"),
            layers.Embedding(5_000, 128, mask_zero=True),
            layers.LSTM(128, return_sequences=True),
            layers.LSTM(128),
            layers.Dense(20, activation="softmax"),
        ]
    )
    return _compiled(model)


def gru() -> keras.Model:
    """Two directions of GRUs over a series of numbers."""
    series = keras.Input((120, 16))
    x = layers.Bidirectional(layers.GRU(96, return_sequences=True))(series)
    x = layers.GlobalAveragePooling1D()(x)
    return _compiled(keras.Model(series, layers.Dense(5, activation="softmax")(x)), "rmsprop")


def transformer() -> keras.Model:
    """An encoder with four blocks of attention."""
    tokens = keras.Input((128,), dtype="int32")
    x = layers.Embedding(8_000, 192)(tokens)
    for _ in range(4):
        attended = layers.MultiHeadAttention(6, 32)(x, x)
        x = layers.LayerNormalization()(layers.Add()([x, layers.Dropout(0.1)(attended)]))
        inner = layers.Dense(192)(layers.Dense(768, activation="gelu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, layers.Dropout(0.1)(inner)]))
    x = layers.GlobalAveragePooling1D()(x)
    return _compiled(keras.Model(tokens, layers.Dense(20, activation="softmax")(x)), "adamw")


def autoencoder() -> keras.Model:
    """Convolutions down and up again."""
    image = keras.Input((96, 96, 3))
    x = image
    for filters in (32, 64, 128):
        x = layers.Conv2D(filters, 3, strides=2, padding="same", activation="relu")(x)
    for filters in (64, 32):
        x = layers.Conv2DTranspose(filters, 3, strides=2, padding="same", activation="relu")(x)
    x = layers.Conv2DTranspose(3, 3, strides=2, padding="same", activation="sigmoid")(x)
    return _compiled(keras.Model(image, x), loss="mse")


def _reconstructed(count: int) -> tuple[Any, Any]:
    x = np.random.default_rng(0).random((count, 96, 96, 3), "float32")
    return x, x.copy()


def unet() -> keras.Model:
    """Skips from the way down to the way up."""
    image = keras.Input((96, 96, 3))
    x, skips = image, []
    for filters in (24, 48):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(96, 3, padding="same", activation="relu")(x)
    for filters, skip in ((48, skips[1]), (24, skips[0])):
        x = layers.Concatenate()([layers.UpSampling2D()(x), skip])
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return _compiled(keras.Model(image, layers.Conv2D(3, 1)(x)), loss="mse")


def several_inputs() -> keras.Model:
    """Numbers and tokens that meet."""
    numbers, tokens = keras.Input((64,), name="numbers"), keras.Input((50,), dtype="int32", name="tokens")
    x = layers.Dense(512, activation="relu")(numbers)
    y = layers.Flatten()(layers.Embedding(2_000, 64)(tokens))
    x = layers.Dense(512, activation="relu")(layers.Concatenate()([x, y]))
    model = keras.Model({"numbers": numbers, "tokens": tokens}, layers.Dense(1)(x))
    return _compiled(model, keras.optimizers.Adam(use_ema=True), "mse")


def _numbers_and_tokens(count: int) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    x = {"numbers": random.random((count, 64), "float32"), "tokens": random.integers(1, 2_000, (count, 50))}
    return x, random.random((count, 1), "float32")


class Mixer(keras.Model):
    """A subclassed model: patches and channels mixed in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = layers.Conv2D(128, 8, strides=8)
        self.flat = layers.Reshape((64, 128))
        self.blocks = [MixerBlock(64, 128) for _ in range(4)]
        self.head = layers.Dense(10, activation="softmax")

    def call(self, x: Any) -> Any:
        """Logits of images."""
        x = self.flat(self.patches(x))
        for block in self.blocks:
            x = block(x)
        return self.head(keras.ops.mean(x, axis=1))


class MixerBlock(layers.Layer):
    """One turn."""

    def __init__(self, num_patches: int, channels: int) -> None:
        super().__init__()
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.tokens = [layers.Dense(256, activation="gelu"), layers.Dense(num_patches)]
        self.channels = [layers.Dense(512, activation="gelu"), layers.Dense(channels)]

    def call(self, x: Any) -> Any:
        """Mixed."""
        y = keras.ops.transpose(self.norms[0](x), (0, 2, 1))
        x = x + keras.ops.transpose(self.tokens[1](self.tokens[0](y)), (0, 2, 1))
        return x + self.channels[1](self.channels[0](self.norms[1](x)))


def mixer() -> keras.Model:
    """A subclassed model, built."""
    model = Mixer()
    model.build((None, 64, 64, 3))
    return _compiled(model)


def mlp() -> keras.Model:
    """Dense layers only."""
    sizes = (1024, 1024, 512)
    model = keras.Sequential([keras.Input((512,)), *(layers.Dense(size, activation="relu") for size in sizes)])
    model.add(layers.Dense(10, activation="softmax"))
    return _compiled(model, keras.optimizers.Adam(clipnorm=1.0))


def _vectors(count: int) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return random.random((count, 512), "float32"), random.integers(0, 10, count)


CASES = (
    Case("ResNet50, 96 px", _application("ResNet50", 96, "adam"), _images(96, 100), 16),
    Case("MobileNetV2, 96 px", _application("MobileNetV2", 96, "rmsprop"), _images(96, 100), 32),
    Case("EfficientNetB0, 96 px", _application("EfficientNetB0", 96, "adam"), _images(96, 100), 16),
    Case("DenseNet121, 64 px", _application("DenseNet121", 64, "sgd"), _images(64, 100), 16),
    Case("VGG16, 64 px", _application("VGG16", 64, "sgd"), _images(64, 100), 16),
    Case("small CNN", small_cnn, _images(64, 10), 64),
    Case("LSTM", lstm, _tokens(100, 5_000, 20), 64),
    Case("GRU, both ways", gru, lambda n: (_series(n), np.zeros(n, "int64")), 64),
    Case("transformer", transformer, _tokens(128, 8_000, 20), 32),
    Case("autoencoder", autoencoder, _reconstructed, 64),
    Case("U-Net", unet, _reconstructed, 32),
    Case("several inputs", several_inputs, _numbers_and_tokens, 4096),
    Case("subclassed mixer", mixer, _images(64, 10), 64),
    Case("MLP", mlp, _vectors, 8192),
)


def _series(count: int) -> Any:
    return np.random.default_rng(0).random((count, 120, 16), "float32")


def case(name: str) -> Case:
    """The one of this name."""
    return next(one for one in CASES if one.name == name)
