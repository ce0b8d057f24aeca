"""A Keras `fit` that resumes in mid-epoch after a kill: `python examples/keras/resume.py FOLDER [BATCHES]`.

With BATCHES, the process ends itself after that many batches; run it again without to resume.
KERAS_BACKEND chooses the backend: torch (the default), jax or tensorflow.
"""

import os
import sys

import numpy as np

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras

import memfit

NUM_SAMPLES, WIDTH, NUM_CLASSES = 2_000, 16, 4


class KillAfter(keras.callbacks.Callback):
    """Ends the process after this many batches, as the OOM killer would."""

    def __init__(self, num_batches):
        super().__init__()
        self.left = num_batches

    def on_train_batch_end(self, batch, logs=None):
        """Called by Keras."""
        self.left -= 1
        if self.left == 0:
            print("killed in mid-epoch", flush=True)
            os._exit(9)


def main():
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(NUM_CLASSES, WIDTH))
    labels = generator.integers(0, NUM_CLASSES, NUM_SAMPLES)
    features = (centres[labels] + generator.normal(size=(NUM_SAMPLES, WIDTH))).astype("float32")

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(32, activation="relu"), keras.layers.Dropout(0.1), keras.layers.Dense(NUM_CLASSES)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    callbacks = [KillAfter(int(sys.argv[2]))] if len(sys.argv) > 2 else []
    history = memfit.fit(
        model,
        features,
        labels,
        batch_size=100,
        epochs=3,
        verbose=0,
        callbacks=callbacks,
        checkpoint=sys.argv[1],
        options=memfit.GuardOptions(checkpoint_every=5),
    )
    for epoch, loss in enumerate(history.history["loss"]):
        print(f"epoch {epoch + 1}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
