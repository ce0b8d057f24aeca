"""A plain Keras script: it knows nothing of memfit, and of memory only that there is enough."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(0)
inputs = x = keras.Input((64, 64, 8))
for number in range(8):
    y = layers.Conv2D(8, 1, activation="gelu", name=f"conv{number}")(x)
    x = layers.Add(name=f"add{number}")([x, y])
outputs = layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
model = keras.Model(inputs, outputs)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

random = np.random.default_rng(0)
images = random.standard_normal((512, 64, 64, 8), dtype=np.float32)
labels = random.integers(0, 10, 512)
history = model.fit(images, labels, batch_size=256, epochs=1, shuffle=False, verbose=0)
print(f"loss {history.history['loss'][0]:.4f}")
