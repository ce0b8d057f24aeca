"""A plan for a Keras model on the backend of the environment, applied, and its plain code run beside it."""

import json
import sys

import keras
import numpy as np

import memfit

layers = keras.layers


def make():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((16, 16, 3))
    x = inputs
    for number in range(3):
        x = layers.Conv2D(16, 3, padding="same", activation="relu", name=f"conv{number}")(x)
        x = layers.LayerNormalization(name=f"norm{number}")(x)
    model = keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)), name="net")
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def job():
    rng = np.random.default_rng(0)
    return memfit.Job(make(), batch=(rng.normal(size=(32, 16, 16, 3)).astype("float32"), np.ones((32, 4), "float32")))


def values(model):
    return [np.asarray(keras.ops.convert_to_numpy(variable)).copy() for variable in model.trainable_variables]


def difference(one, other):
    return max(float(np.abs(a - b).max() / max(1e-6, np.abs(a).max())) for a, b in zip(one, other, strict=True))


def main(folder):
    batch = job().batch
    model = make()
    whole = memfit.estimate(model, batch=batch, device="cpu").peak_bytes
    allow = ["exact", "rounding", "-checkpoint"]
    plan = memfit.plan(model, batch=batch, device="cpu", budget=whole // 2, allow=allow)
    left = difference(values(make()), values(model))
    model.train_on_batch(*batch)
    plan.save(f"{folder}/plan.json")
    plan.report(f"{folder}/plan.html")
    plain, fitted = make(), make()
    plain.train_on_batch(*batch)
    memfit.load_plan(f"{folder}/plan.json").apply(fitted)
    fitted.train_on_batch(*batch)
    names = {}
    exec(compile(plan.code(), "plan", "exec"), names)
    coded = names["prepare"](make(), keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    size = len(batch[0]) // plan.settings.micro_batch_size * plan.settings.micro_batch_size
    # The plain step of JAX takes whole parts only.
    part = tuple(array[:size] for array in batch)
    coded.train_on_batch(*part)
    beside = make()
    beside.train_on_batch(*part)
    print(
        json.dumps(
            {
                "fits": plan.fits,
                "framework": plan.framework,
                "micro_batches": plan.settings.micro_batches,
                "left": left,
                "peak": plan.after.peak_bytes / whole,
                "fitted": difference(values(plain), values(fitted)),
                "coded": difference(values(beside), values(coded)),
                "moved": difference(values(make()), values(plain)),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
