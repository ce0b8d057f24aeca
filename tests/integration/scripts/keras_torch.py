"""A convolutional network with Keras on PyTorch."""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from keras import layers

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--image-size", type=int, default=28)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--samples", type=int, default=32)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--mixed", action="store_true", help="compute in float16")

num_classes = 10


def build_model(image_size, width):
    return keras.Sequential(
        [
            keras.Input(shape=(image_size, image_size, 1)),
            layers.Conv2D(width, kernel_size=(3, 3), activation="relu", padding="same"),
            layers.BatchNormalization(),
            layers.Conv2D(width, kernel_size=(3, 3), activation="relu", padding="same"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Conv2D(2 * width, kernel_size=(3, 3), activation="relu", padding="same"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.GlobalAveragePooling2D(),
            layers.Dropout(0.5),
            layers.Dense(num_classes, activation="softmax", dtype="float32"),
        ]
    )


def main():
    args = parser.parse_args()
    keras.utils.set_random_seed(0)
    if args.mixed:
        keras.mixed_precision.set_global_policy("mixed_float16")
    rng = np.random.default_rng(0)
    x_train = rng.random((args.samples, args.image_size, args.image_size, 1), dtype="float32")
    y_train = keras.utils.to_categorical(rng.integers(num_classes, size=args.samples), num_classes)

    model = build_model(args.image_size, args.width)
    model.summary()
    model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
    callbacks = [
        keras.callbacks.ModelCheckpoint(filepath="model_at_epoch_{epoch}.keras"),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=2),
    ]
    history = model.fit(
        x_train, y_train, batch_size=args.batch_size, epochs=args.epochs, validation_split=0.25, callbacks=callbacks
    )
    print({name: values[-1] for name, values in history.history.items()})
    score = model.evaluate(x_train, y_train, batch_size=args.batch_size, verbose=0)
    print("Test loss:", score[0])
    print("Test accuracy:", score[1])
    print(model.predict(x_train[:4], verbose=0).argmax(axis=1))


if __name__ == "__main__":
    main()
