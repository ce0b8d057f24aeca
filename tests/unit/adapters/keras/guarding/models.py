"""A small compiled model, and its data."""

import keras
import numpy as np


def build(*layers, **options):
    keras.utils.set_random_seed(3)
    inner = layers or (keras.layers.BatchNormalization(),)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6), *inner, keras.layers.Dense(2)])
    model.compile(**{"optimizer": "adam", "loss": "mse", "metrics": ["mae"]} | options)
    return model


def data(number=12):
    generator = np.random.default_rng(0)
    return generator.random((number, 4)).astype("float32"), generator.random((number, 2)).astype("float32")
