"""A Keras model on files that are read piece by piece: `python examples/keras/files.py`.

KERAS_BACKEND chooses the backend: torch (the default), jax or tensorflow.
"""

import os
import sys
import tempfile
from pathlib import Path

import numpy as np

os.environ.setdefault("KERAS_BACKEND", "torch")

import h5py
import keras

import memfit

NAMES = ("ash", "birch", "cedar", "dogwood")
NUM_TRAINED, NUM_TESTED, WIDTH = 20_000, 4_000, 16


def make_files(folder):
    """Training data in HDF5, compressed chunk by chunk and sorted by class; test data in CSV, with names as labels."""
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(len(NAMES), WIDTH))
    labels = np.sort(generator.integers(0, len(NAMES), NUM_TRAINED))
    features = centres[labels] + generator.normal(size=(NUM_TRAINED, WIDTH))
    with h5py.File(folder / "train.h5", "w") as file:
        file.create_dataset("leaves/features", data=features, chunks=(256, WIDTH), compression="gzip")
        file.create_dataset("leaves/tree", data=labels, chunks=(256,))
    labels = generator.integers(0, len(NAMES), NUM_TESTED)
    features = centres[labels] + generator.normal(size=(NUM_TESTED, WIDTH))
    with open(folder / "test.csv", "w") as file:
        print(*(f"feature{number}" for number in range(WIDTH)), "tree", sep=",", file=file)
        for row, label in zip(features, labels, strict=True):
            print(*(f"{value:.4f}" for value in row), NAMES[label], sep=",", file=file)


def main():
    keras.utils.set_random_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder)
        trained = memfit.stream(
            folder / "train.h5", columns="leaves/features", labels="leaves/tree", batch_size=100, memory="32MiB"
        )
        tested = memfit.stream(folder / "test.csv", labels="tree", batch_size=500, shuffle=False, memory="32MiB")
        print(f"{trained.num_samples} samples to train on, {len(trained)} batches; {tested.num_samples} to test on")
        print(f"classes of the test file: {', '.join(tested.classes)}")

        model = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(len(NAMES))])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
        history = model.fit(trained.keras(), epochs=2, verbose=0)
        for epoch, value in enumerate(history.history["loss"]):
            print(f"epoch {epoch}: loss {value:.4f}")
        _, accuracy = model.evaluate(tested.keras(), verbose=0)
        print(f"accuracy on the test file: {accuracy:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
