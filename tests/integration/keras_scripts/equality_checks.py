"""Checks of split training steps in the backend of this process, printed as one line of JSON."""

import json
import sys

import keras
import numpy as np
from keras import layers, ops

from benchmarks import keras_equality
from memfit.core.errors import BadModel
from memfit.core.settings import Settings
from memfit.frameworks.keras.apply.fitted import FittedModel

BACKEND = keras.backend.backend()


def weights(model):
    return [ops.convert_to_numpy(variable) for variable in model.trainable_variables]


def error(found, expected):
    return max(float(abs(a - b).max() / abs(b).max()) for a, b in zip(found, expected, strict=True))


def made(**compiled):
    keras.utils.set_random_seed(3)
    inputs = layers.Input((5,))
    model = keras.Model(inputs, layers.Dense(2)(layers.Dense(6, "tanh")(inputs)))
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"], **compiled)
    return model


def data():
    random = np.random.default_rng(0)
    return random.normal(size=(22, 5)), random.normal(size=(22, 2))


def ways(settings, names=("numpy",), **compiled):
    """The error after one epoch, by way of training."""
    x, y = data()

    def by_fit(model, *given, **options):
        model.fit(*given, epochs=1, verbose=0, shuffle=False, **options)

    def in_batches():
        for start in range(0, 22, 8):
            yield x[start : start + 8], y[start : start + 8]

    def on_batches(model):
        for pair in in_batches():
            model.train_on_batch(*pair)

    trained = {
        "numpy": lambda model: by_fit(model, x, y, batch_size=8),
        "a generator": lambda model: by_fit(model, in_batches()),
        "train_on_batch": on_batches,
    }
    found = {}
    for name in names:
        train = trained[name]
        plain, split = made(**compiled), made(**compiled)
        FittedModel(settings, split)
        train(plain)
        train(split)
        found[name] = error(weights(split), weights(plain))
    return found


class OwnStep(keras.Model):
    def train_step(self, *arguments):
        return super().train_step(*arguments)


def refusals():
    inputs = layers.Input((5,))
    outputs = layers.Dense(2)(layers.BatchNormalization(name="norm")(inputs))
    found = {}
    for name, model in {"norm": keras.Model(inputs, outputs), "step": OwnStep(inputs, layers.Dense(2)(inputs))}.items():
        model.compile("sgd", "mse")
        try:
            FittedModel(Settings(micro_batches=2), model)
            found[name] = ""
        except BadModel as refused:
            found[name] = str(refused)
    allowed = keras.Model(inputs, outputs)
    allowed.compile("sgd", "mse")
    fitted = FittedModel(Settings(micro_batches=2), allowed, approximate=True)
    allowed.fit(*data(), batch_size=8, verbose=0)
    found["allowed"] = fitted.approximate
    return found


def relating():
    """A loss in which samples meet each other is refused when the step is first run."""
    model = made()
    model.compile("sgd", loss=lambda y, y_pred: ops.std(y - y_pred))
    FittedModel(Settings(micro_batches=2), model)
    try:
        model.fit(*data(), batch_size=8, verbose=0)
    except BadModel as refused:
        return str(refused)
    return ""


def main():
    cases, undone = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    keras_equality.prepare()
    rows = [keras_equality.compare(case, 0, {"micro_batch_size": 4}, undo=case in undone) for case in cases]
    found = {
        "rows": [[row.case, row.error, row.logs, row.undone is not False and row.same_logs] for row in rows],
        "ways": ways(Settings(micro_batch_size=3), ("a generator", "train_on_batch")),
        "eager": ways(Settings(micro_batches=20), ("train_on_batch",), run_eagerly=True),
        "refusals": refusals(),
        "relating": relating(),
    }
    if BACKEND == "tensorflow":
        found["compiled"] = ways(Settings(micro_batches=3, jit_compile=True))
    if BACKEND != "torch":
        found["several steps"] = ways(Settings(micro_batch_size=3), steps_per_execution=2)
    print(json.dumps(found))


main()
