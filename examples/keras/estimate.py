"""Where the memory of a Keras model goes, and the largest batch that fits: on the backend that Keras runs on."""

import keras
from keras import layers

import memfit

model = keras.Sequential(
    [
        keras.Input((96, 96, 3)),
        layers.Conv2D(32, 3, padding="same", activation="relu", name="first"),
        layers.BatchNormalization(name="norm"),
        layers.MaxPooling2D(name="pool"),
        layers.Conv2D(64, 3, padding="same", activation="relu", name="second"),
        layers.GlobalAveragePooling2D(name="average"),
        layers.Dense(10, activation="softmax", name="classes"),
    ],
    name="small_network",
)
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])

# Shapes are enough: nothing is computed, and the model is left as it was.
batch = keras.KerasTensor((64, 96, 96, 3)), keras.KerasTensor((64,), "int32")

estimate = memfit.estimate(model, batch=batch, device="t4")
print(estimate)

largest = memfit.max_batch(model, batch=batch, device="t4")
print(f"Keras on {keras.backend.backend()}: the largest batch that fits is {largest.batch_size}")
