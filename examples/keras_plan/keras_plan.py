"""A plan for a compiled Keras model, applied to it: `fit` then stays within the budget.

Run it with `python examples/keras_plan/keras_plan.py`; KERAS_BACKEND chooses the backend.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

import memfit

layers = keras.layers

inputs = keras.Input((32, 32, 3))
x = inputs
for number in range(4):
    x = layers.Conv2D(32, 3, padding="same", activation="relu", name=f"conv{number}")(x)
    x = layers.LayerNormalization(name=f"norm{number}")(x)
model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)), name="small_cnn")
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

rng = np.random.default_rng(0)
images, labels = rng.normal(size=(128, 32, 32, 3)).astype("float32"), rng.integers(10, size=128)

plan = memfit.plan(model, batch=(images[:64], labels[:64]), device="cpu", budget="64MiB", measure=False)
print(plan)
print()
print(plan.code())

# Each batch of 64 is one update, as before; it is computed as planned.
plan.apply(model)
history = model.fit(images, labels, batch_size=64, epochs=1, verbose=0)
print("fit finished:", "loss" in history.history)
