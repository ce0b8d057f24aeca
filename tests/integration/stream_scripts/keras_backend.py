"""What `stream.keras()` gives to fit, evaluate and predict on one backend, as JSON; the backend is in the environment.

Usage: keras_backend.py FOLDER
"""

import contextlib
import json
import os
import signal
import sys
import threading
import warnings
from pathlib import Path

import keras
import numpy as np

from memfit.api.stream import StreamOptions, stream
from memfit.frameworks.keras.streaming import KerasStream, StreamPosition

NUM_SAMPLES, BATCH, WIDTH = 103, 10, 3
NUM_BATCHES = 11
RATE = 0.05


def write(folder):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(NUM_SAMPLES, WIDTH)).astype("float32")
    # The first feature names the sample, so that predictions tell the order.
    features[:, 0] = np.arange(NUM_SAMPLES) / 100
    np.save(folder / "x.npy", features)
    np.save(folder / "y.npy", rng.normal(size=(NUM_SAMPLES, 1)).astype("float32"))


def opened(folder, *, labels=True, seed=0, shuffle=True):
    source = (str(folder / "x.npy"), str(folder / "y.npy")) if labels else str(folder / "x.npy")
    return stream(source, batch_size=BATCH, options=StreamOptions(seed=seed), shuffle=shuffle, memory="16MiB")


def linear(built=True, steps_per_execution=1):
    layers = [keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers] if built else layers)
    model.compile(keras.optimizers.SGD(RATE), loss="mse", steps_per_execution=steps_per_execution)
    return model


def weights(model):
    return np.asarray(model.get_weights()[0], "float64").ravel()


def descend(batches, start=None):
    """The weights after training on the batches, computed by hand: another order gives other weights."""
    w = np.zeros(WIDTH) if start is None else start.copy()
    for x, y in batches:
        error = x.astype("float64") @ w - y[:, 0]
        w -= RATE * 2 * x.T.astype("float64") @ error / len(x)
    return w


def epochs(folder, count, **options):
    plain = opened(folder, **options)
    return [list(plain) for _ in range(count)]


def off(found, expected):
    return float(np.abs(found - expected).max())


def stream_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("memfit")]


class Recorder(keras.callbacks.Callback):
    def __init__(self, data, at):
        super().__init__()
        self.data, self.at, self.seen, self.kept = data, at, 0, None

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.at:
            self.kept = self.data.state_dict(), weights(self.model)


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            raise KeyboardInterrupt


def check_order(folder, found):
    first, second, third = epochs(folder, 3)
    found["order matters"] = off(descend(first + second), descend(second + first))
    for name, built in (("built", True), ("unbuilt", False)):
        model, data = linear(built), opened(folder).keras()
        model.fit(data, epochs=2, verbose=0)
        found[f"fit {name}"] = off(weights(model), descend(first + second))
        found[f"epoch {name}"] = data.epoch
        model.fit(data, epochs=1, verbose=0)
        found[f"fit again {name}"] = off(weights(model), descend(first + second + third))
    model, data = linear(), opened(folder).keras()
    model.fit(data, epochs=2, verbose=0, shuffle=False)
    found["fit unshuffled"] = off(weights(model), descend(first + second))
    if keras.backend.backend() != "torch":  # which takes one step at a time
        model, data = linear(steps_per_execution=4), opened(folder).keras()
        model.fit(data, epochs=2, verbose=0)
        found["fit 4 steps at once"] = off(weights(model), descend(first + second))
    model, data = linear(), opened(folder).keras()
    model.fit(data, epochs=1, verbose=0, class_weight=dict.fromkeys(range(-9, 10), 0.0))
    found["class weights are heard"] = off(weights(model), np.zeros(WIDTH))


def check_validation(folder, found):
    first, second = epochs(folder, 2)
    model, data, held = linear(), opened(folder).keras(), opened(folder, seed=5).keras()
    history = model.fit(data, epochs=2, validation_data=held, verbose=0).history
    found["fit validated"] = off(weights(model), descend(first + second))
    found["validation epochs"] = held.epoch
    x, y = np.load(folder / "x.npy"), np.load(folder / "y.npy")
    loss = float(np.mean((x.astype("float64") @ weights(model) - y[:, 0]) ** 2))
    found["validation loss"] = abs(history["val_loss"][-1] - loss)
    found["evaluate"] = abs(model.evaluate(held, verbose=0) - loss)
    identity = linear()
    identity.set_weights([np.array([[1.0], [0.0], [0.0]])])
    data = opened(folder, labels=False).keras()
    given = [np.round(np.asarray(identity.predict(data, verbose=0)).ravel() * 100).astype(int) for _ in range(2)]
    expected = [
        np.round(np.concatenate([batch[:, 0] for batch in epoch]) * 100).astype(int)
        for epoch in epochs(folder, 2, labels=False)
    ]
    found["predict"] = [bool((a == b).all()) for a, b in zip(given, expected, strict=True)]
    found["predict all"] = sorted(given[0].tolist()) == list(range(NUM_SAMPLES))


def check_parts(folder, found):
    first, second = epochs(folder, 2)
    model, data = linear(), opened(folder).keras()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(data, epochs=2, steps_per_epoch=4, verbose=0)
        found["4 steps twice"] = off(weights(model), descend(first[:8]))
        found["threads after parts"] = stream_threads()
        model, data = linear(), opened(folder).keras()
        for _ in range(2):
            model.fit(data, epochs=1, steps_per_epoch=4, verbose=0, callbacks=[StreamPosition(data)])
        found["4 steps in two calls"] = off(weights(model), descend(first[:8]))
    model.fit(data, epochs=1, verbose=0)
    found["the rest"] = off(weights(model), descend(first))
    model.fit(data, epochs=1, verbose=0)
    found["and the next"] = off(weights(model), descend(first + second))


def check_left(folder, found):
    first, *_ = epochs(folder, 1)
    model, data = linear(), opened(folder).keras()
    with contextlib.suppress(KeyboardInterrupt):
        model.fit(data, epochs=1, verbose=0, callbacks=[StreamPosition(data), Stop()])
    found["batches done when left"] = data.state_dict()["samples"]
    data.close()
    found["threads after a left epoch"] = stream_threads()
    data.load_state_dict(data.stream.state_dict())
    model = linear()
    model.fit(data, epochs=1, verbose=0)
    found["fit after a left one"] = off(weights(model), descend(first))


def check_resumed(folder, found):
    first, second = epochs(folder, 2)
    data = opened(folder).keras()
    recorder = Recorder(data, at=5)
    linear().fit(data, epochs=1, verbose=0, callbacks=[StreamPosition(data), recorder])
    state, before = json.loads(json.dumps(recorder.kept[0])), recorder.kept[1]
    found["trained when saved"] = off(before, descend(first[:5]))
    model, data = linear(), opened(folder, seed=9).keras()
    model.set_weights([before[:, None]])
    data.load_state_dict(state)
    found["left"] = [data.num_batches, len(data)]
    model.fit(data, initial_epoch=data.epoch, epochs=data.epoch + 1, verbose=0)
    found["resumed"] = off(weights(model), descend(first))
    model.fit(data, initial_epoch=data.epoch, epochs=data.epoch + 1, verbose=0)
    found["after the resumed"] = off(weights(model), descend(first + second))
    data.load_state_dict(state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(data, epochs=2, verbose=0)
    found["warning"] = [str(w.message) for w in caught if "in the middle of an epoch" in str(w.message)]


class Killed(keras.callbacks.Callback):
    """Saves weights and position after each batch, and is killed in the middle of one."""

    def __init__(self, data, folder):
        super().__init__()
        self.data, self.folder, self.left = data, folder, 7

    def on_train_batch_begin(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, batch, logs=None):
        saved = {"state": self.data.state_dict(), "weights": weights(self.model).tolist()}
        (self.folder / "saved.json").write_text(json.dumps(saved))


def check_killed(folder, found):
    first, second = epochs(folder, 2)
    child = os.fork()
    if child == 0:
        data = opened(folder).keras()
        linear().fit(data, epochs=2, verbose=0, callbacks=[StreamPosition(data), Killed(data, folder)])
        os._exit(1)
    found["killed by"] = os.WTERMSIG(os.waitpid(child, 0)[1])
    saved = json.loads((folder / "saved.json").read_text())
    model, data = linear(), opened(folder).keras()
    model.set_weights([np.array(saved["weights"])[:, None]])
    data.load_state_dict(saved["state"])
    found["left after the kill"] = data.num_batches
    model.fit(data, initial_epoch=data.epoch, epochs=data.epoch + 1, verbose=0)
    model.fit(data, initial_epoch=data.epoch, epochs=2, verbose=0)
    found["fit after a kill"] = off(weights(model), descend(first + second))


def check_tf_data(folder, found):
    first, second, third, fourth = epochs(folder, 4)
    data = opened(folder).tensorflow()
    found["cardinality"] = int(data.cardinality())
    found["spec"] = [(list(spec.shape), spec.dtype.name) for spec in data.element_spec]
    given = [[x[:, 0] for x, _ in data.as_numpy_iterator()] for _ in range(2)]
    found["tf.data"] = [
        all(np.array_equal(a, b[:, 0]) for a, (b, _) in zip(epoch, expected, strict=True))
        for epoch, expected in zip(given, (first, second), strict=True)
    ]
    model = linear()
    model.fit(data, epochs=2, verbose=0, shuffle=False)
    # A model takes one batch before it trains, to build its loss with: that is an iteration, which is left.
    options = {
        name: off(weights(model), descend(batches))
        for name, batches in (("at once", third + fourth), ("after a look", fourth + epochs(folder, 5)[4]))
    }
    found["fit on tf.data"] = min(options.values())


def main(folder):
    write(folder)
    found = {"backend": keras.backend.backend(), "is a PyDataset": issubclass(KerasStream, keras.utils.PyDataset)}
    checks = [check_order, check_validation, check_parts, check_left, check_resumed]
    if keras.backend.backend() == "torch":
        checks.append(check_killed)  # a fork of JAX or TensorFlow waits for threads that it doesn't have
    if keras.backend.backend() == "tensorflow":
        checks.append(check_tf_data)
    for check in checks:
        check(folder, found)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
