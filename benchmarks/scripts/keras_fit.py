"""A plain Keras script that knows nothing of memfit: `keras_fit.py resnet50|transformer BATCH STEPS`.

Data are random; the last line is JSON with the loss and the time of `fit`.
"""

import json
import sys
import time

import keras
import numpy as np
from keras import layers

LENGTH = 512
WORDS = 8000


def resnet50() -> tuple[keras.Model, tuple[int, ...]]:
    """ResNet-50 for images of 224 x 224."""
    return keras.applications.ResNet50(weights=None, classes=1000, classifier_activation=None), (224, 224, 3)


def transformer() -> tuple[keras.Model, tuple[int, ...]]:
    """A language model of six layers."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, 256)(tokens)
    for number in range(6):
        y = layers.LayerNormalization(name=f"norm{number}a")(x)
        x = layers.Add()([x, layers.MultiHeadAttention(8, 32, name=f"attention{number}")(y, y, use_causal_mask=True)])
        y = layers.LayerNormalization(name=f"norm{number}b")(x)
        y = layers.Dense(1024, activation="gelu", name=f"wide{number}")(y)
        x = layers.Add()([x, layers.Dense(256, name=f"narrow{number}")(y)])
    return keras.Model(tokens, layers.Dense(WORDS)(layers.LayerNormalization()(x))), (LENGTH,)


name, batch, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
keras.utils.set_random_seed(0)
model, shape = {"resnet50": resnet50, "transformer": transformer}[name]()
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
random = np.random.default_rng(0)
if name == "resnet50":
    x = random.standard_normal((batch * steps, *shape), dtype=np.float32)
    y = random.integers(0, 1000, batch * steps)
else:
    data = random.integers(0, WORDS, (batch * steps, LENGTH + 1)).astype("int32")
    x, y = data[:, :-1], data[:, 1:]
started = time.perf_counter()
history = model.fit(x, y, batch_size=batch, verbose=0)
print(json.dumps({"loss": history.history["loss"][0], "seconds": time.perf_counter() - started}), file=sys.stderr)
