"""Checks of a guarded fit on one backend, each in a process of its own, forked after the framework was imported.

Run as: fit_checks.py BACKEND FOLDER KILLS CHECK...; prints one line of JSON by check.
"""

import json
import os
import random
import signal
import sys
import traceback
from pathlib import Path

BACKEND, FOLDER, KILLS = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
os.environ |= {"KERAS_BACKEND": BACKEND, "TF_CPP_MIN_LOG_LEVEL": "3", "MEMFIT_CACHE": str(FOLDER / "cache")}
# Steps are compiled once for all forked processes.
os.environ |= {"JAX_COMPILATION_CACHE_DIR": str(FOLDER / "jax"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
os.environ |= {"JAX_ENABLE_X64": "1", "TF_ENABLE_ONEDNN_OPTS": "0"}

import keras  # noqa: E402
import numpy as np  # noqa: E402
from injected import faults, kind_of_steps  # noqa: E402

import memfit  # noqa: E402
from memfit.guard import checkpointing  # noqa: E402

NUM_SAMPLES, BATCH = 90, 16


def build(*, norm=False, dropout=True, compiled=None, size=24):
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(3)
    layers = [keras.Input((20,)), keras.layers.Dense(size, activation="relu")]
    layers += [keras.layers.BatchNormalization()] if norm else []
    layers += [keras.layers.Dropout(0.2)] if dropout else []
    model = keras.Sequential([*layers, keras.layers.Dense(3, activation="softmax")])
    schedule = keras.optimizers.schedules.CosineDecay(1e-2, 40)
    model.compile(
        keras.optimizers.Adam(schedule, use_ema=True, clipnorm=1.0),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile=BACKEND != "torch" if compiled is None else compiled,
    )
    return model


def data():
    generator = np.random.default_rng(0)
    return generator.random((NUM_SAMPLES, 20)), generator.integers(0, 3, NUM_SAMPLES)


def fit(model, *, folder=None, every=2, epochs=3, x=None, callbacks=(), **arguments):
    given = data() if x is None else (x, None)
    batch_size = {"batch_size": BATCH} if x is None else {}
    return memfit.fit(
        model,
        *given,
        checkpoint=folder,
        epochs=epochs,
        verbose=0,
        callbacks=list(callbacks),
        options=memfit.GuardOptions(checkpoint_every=every if folder else None, remember=False),
        **batch_size,
        **arguments,
    )


def weights(model):
    values = [*model.trainable_variables, *model.non_trainable_variables, *model.optimizer.variables]
    return [np.asarray(keras.ops.convert_to_numpy(value.value)) for value in values]


def difference(one, other):
    """Greatest difference of all variables, relative to the greatest value of each."""
    pairs = zip(weights(one), weights(other), strict=True)
    return max(float(np.abs(a - b).max() / (np.abs(a).max() + 1e-12)) for a, b in pairs if a.dtype.kind == "f")


def plain_is_same():
    one = build(norm=True)
    x, y = data()
    history = one.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, validation_data=(x[:20], y[:20]))
    other = build(norm=True)
    guarded = fit(other, epochs=2, validation_data=(x[:20], y[:20]))
    return {"difference": difference(one, other), "same": history.history == guarded.history}


def fault_is_same(compiled=None):
    one, other = build(dropout=False, compiled=compiled), build(dropout=False, compiled=compiled)
    x, y = data()
    history = one.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
    with faults(BACKEND, 2, 2):
        guarded = fit(other, epochs=2, shuffle=False)
    losses = np.abs(np.array(history.history["loss"]) - guarded.history["loss"]).max()
    return {"difference": difference(one, other), "losses": float(losses)}


def fault_in_graph():
    return fault_is_same(compiled=False)


def fault_is_undone():
    model = build(norm=True)
    x, y = data()
    before = {}

    class Keep(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2 and BACKEND != "jax":
                before["values"] = weights(model)

    with faults(BACKEND, 3, 1000):
        try:
            memfit.fit(
                model,
                x,
                y,
                batch_size=BATCH,
                verbose=0,
                plan=None,
                callbacks=[Keep()],
                options=memfit.GuardOptions(remember=False),
            )
        except memfit.CannotFit as error:
            text = str(error)
    same = BACKEND == "jax" or all(np.array_equal(a, b) for a, b in zip(before["values"], weights(model), strict=True))
    iterations = int(keras.ops.convert_to_numpy(model.optimizer.iterations.value))
    function = getattr(model.train_function, "memfit_function", None)
    return {"same": same, "iterations": iterations, "text": text, "left": function is not None}


def bad_input():
    texts = []
    for call in (
        lambda: memfit.fit(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), np.ones((4, 2))),
        lambda: memfit.fit(build(), options=memfit.GuardOptions(keep=0)),
        lambda: memfit.fit(build(), plan=7),
        lambda: memfit.fit("no model"),
        lambda: memfit.keras.Fit(options={"keep": 2}),
    ):
        try:
            call()
        except memfit.BadInput as error:
            texts.append(str(error))
    return {"texts": texts}


def generator_of_batches():
    x, y = data()
    for epoch in range(100):
        order = np.random.default_rng(epoch).permutation(NUM_SAMPLES)
        for start in range(0, NUM_SAMPLES - BATCH, BATCH):
            chosen = order[start : start + BATCH]
            yield x[chosen], y[chosen]


class Batches(keras.utils.PyDataset):
    """Batches by number, which Keras shuffles."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        x, y = data()
        return x[index * 15 : index * 15 + 15], y[index * 15 : index * 15 + 15]


def arguments_of(kind):
    if kind == "generator":
        return {"x": generator_of_batches(), "steps_per_epoch": 5}
    if kind == "dataset":
        return {"x": Batches(), "shuffle": True}
    if kind == "stream":
        x, y = data()
        path = FOLDER / "stream"
        path.mkdir(exist_ok=True)
        if not (path / "y.npy").exists():
            np.save(path / "x.npy", x)
            np.save(path / "y.npy", y)
        return {
            "x": memfit.stream(
                (path / "x.npy", path / "y.npy"), batch_size=BATCH, options=memfit.StreamOptions(seed=5)
            ).keras()
        }
    return {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}


def train(kind, folder):
    """A whole run, as a script would do it."""
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=50, restore_best_weights=False)
    # XLA in TensorFlow compiles for each process anew.
    model = build(norm=True, compiled=BACKEND == "jax")
    history = fit(model, folder=folder, callbacks=[stop], **arguments_of(kind))
    np.savez(f"{folder}.npz", *weights(model), np.array(history.history["loss"]), np.array([stop.best, stop.wait]))


def forked(work):
    """Runs in a child; whether it came to its end."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def kills(kind):
    """Runs that are killed at random batches, against one that isn't."""
    chosen = random.Random(f"{BACKEND} {kind}")
    whole, broken = FOLDER / f"{kind}-whole", FOLDER / f"{kind}-broken"
    num_killed = 0
    for number in range(KILLS + 1):
        # Where the order isn't that of Keras's own seed, the run that isn't killed begins from the first checkpoint.
        after = chosen.randrange(3, 6)

        def killed(after=after, number=number):
            steps = kind_of_steps(BACKEND)
            plain, count = steps.run, [0]

            def run(self, batch):
                count[0] += 1
                if count[0] > after and number < KILLS:
                    os.kill(os.getpid(), signal.SIGKILL)
                return plain(self, batch)

            steps.run = run
            train(kind, broken)

        status = forked(killed)
        num_killed += status == signal.SIGKILL
        if number == 0 and broken.exists():
            import shutil

            shutil.copytree(broken, whole)
        if status not in (0, signal.SIGKILL):
            return {"failed": status}
        if status == 0:
            break
    status = forked(lambda: train(kind, whole))
    if status:
        return {"failed": status}
    with np.load(f"{whole}.npz") as one, np.load(f"{broken}.npz") as other:
        same = all(np.array_equal(one[name], other[name]) for name in one.files)
    return {"killed": num_killed, "same": same}


def main():
    checkpointing._finished.clear()
    for name in sys.argv[4:]:
        if name.startswith("kills-"):
            found = kills(name.removeprefix("kills-"))
        else:
            path = FOLDER / f"{name}.json"
            status = forked(lambda name=name, path=path: path.write_text(json.dumps(globals()[name]())))
            found = json.loads(path.read_text()) if status == 0 else {"failed": status}
        print(json.dumps({"check": name, **found}), flush=True)


if __name__ == "__main__":
    main()
