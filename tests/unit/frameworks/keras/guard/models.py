"""A small compiled model, its data, and faults of its steps."""

import keras
import numpy as np

from memfit.frameworks.keras.guard.steps import make_steps


def dense():
    """A layer whose weights are the same whenever it is made."""
    return keras.layers.Dense(3, kernel_initializer=keras.initializers.GlorotUniform(seed=5))


def build(*layers, **options):
    keras.utils.set_random_seed(3)
    inner = layers or (keras.layers.BatchNormalization(),)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6), *inner, keras.layers.Dense(2)])
    model.compile(**{"optimizer": "adam", "loss": "mse", "metrics": ["mae"]} | options)
    return model


def data(number=12):
    generator = np.random.default_rng(0)
    return generator.random((number, 4)).astype("float32"), generator.random((number, 2)).astype("float32")


def as_array(value):
    """Keras goes by a protocol of numpy that PyTorch has an old form of."""
    return value.detach().numpy() if hasattr(value, "detach") else keras.ops.convert_to_numpy(value)


def values(model):
    return [as_array(one.value).copy() for one in [*model.variables, *model.optimizer.variables]]


def difference(one, other):
    return max(float(np.abs(a - b).max()) for a, b in zip(values(one), values(other), strict=True))


def fault_setter(monkeypatch):
    """Has the steps of the numbers that it is called with, counted from 1, run out of memory."""
    kind = type(make_steps(build(), len))
    plain, count = kind.run, [0]

    def set_faults(*numbers):
        def run(self, batch):
            count[0] += 1
            if count[0] in numbers:
                raise MemoryError("no memory")
            return plain(self, batch)

        monkeypatch.setattr(kind, "run", run)

    return set_faults
