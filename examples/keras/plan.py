"""Where the memory of a Keras model goes, the largest batch, and a plan for a smaller budget that `fit` then keeps to.

Run it with `python examples/keras/plan.py`; KERAS_BACKEND chooses the backend: torch, jax or tensorflow.
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

# Shapes are enough for an estimate: nothing is computed, and the model is left as it was.
shapes = keras.KerasTensor((64, 32, 32, 3)), keras.KerasTensor((64,), "int32")
print(memfit.estimate(model, batch=shapes, device="t4"))
largest = memfit.max_batch(model, batch=shapes, device="t4")
print(f"\nKeras on {keras.backend.backend()}: the largest batch that fits is {largest.batch_size}\n")

rng = np.random.default_rng(0)
images, labels = rng.normal(size=(128, 32, 32, 3)).astype("float32"), rng.integers(10, size=128)
options = memfit.PlanOptions(measure=False)
plan = memfit.plan(model, batch=(images[:64], labels[:64]), device="cpu", budget="64MiB", options=options)
print(plan)
print()
print(plan.code())

# Each batch of 64 is still one update; it is computed as planned.
plan.apply(model)
history = model.fit(images, labels, batch_size=64, epochs=1, verbose=0)
print("fit finished:", "loss" in history.history)
