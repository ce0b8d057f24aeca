"""Checks of `memfit.Guard` of a Keras model on one backend, all in one process.

Run as: guard_checks.py BACKEND FOLDER CHECK...; prints one line of JSON by check.
"""

import json
import os
import sys
from pathlib import Path

BACKEND, FOLDER = sys.argv[1], Path(sys.argv[2])
os.environ |= {"KERAS_BACKEND": BACKEND, "TF_CPP_MIN_LOG_LEVEL": "3", "MEMFIT_CACHE": str(FOLDER / "cache")}
os.environ |= {"JAX_ENABLE_X64": "1", "TF_ENABLE_ONEDNN_OPTS": "0"}

import keras  # noqa: E402
import numpy as np  # noqa: E402
from injected import faults  # noqa: E402

import memfit  # noqa: E402
from memfit.core.settings import Settings  # noqa: E402
from memfit.frameworks.keras.apply.fitted import FittedModel  # noqa: E402
from memfit.guard import checkpointing  # noqa: E402

BATCH, NUM_BATCHES = 12, 4


def build(*middle, norm=False, floatx="float64", optimizer=None, **options):
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(floatx)
    keras.utils.set_random_seed(3)
    layers = [keras.Input((8,)), keras.layers.Dense(6, activation="relu")]
    layers += [keras.layers.BatchNormalization()] if norm else []
    model = keras.Sequential([*layers, *middle, keras.layers.Dense(2)])
    adam = {"learning_rate": keras.optimizers.schedules.CosineDecay(1e-2, 40), "clipnorm": 1.0} | options
    # XLA in TensorFlow compiles for seconds.
    optimizer = optimizer or keras.optimizers.Adam(**adam)
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=BACKEND == "jax")
    return model


def batches():
    generator = np.random.default_rng(0)
    return [(generator.random((BATCH, 8)), generator.random((BATCH, 2))) for _ in range(NUM_BATCHES)]


def weights(model):
    values = [*model.trainable_variables, *model.non_trainable_variables, *model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(value.value)) for value in values]


def difference(one, other):
    """Greatest difference of all variables, relative to the greatest value of each."""
    pairs = zip(weights(one), weights(other), strict=True)
    return max(float(np.abs(a - b).max() / (np.abs(a).max() + 1e-12)) for a, b in pairs)


def is_plain(model):
    function = getattr(model.train_function, "memfit_function", None)
    return function is None and "train_step" not in model.__dict__ and "apply" not in model.optimizer.__dict__


def batches_without_faults():
    one, other = build(norm=True), build(norm=True)
    expected = [one.train_on_batch(x, y) for x, y in batches()]
    with memfit.Guard(other, options=memfit.GuardOptions(remember=False)) as guard:
        found = [guard.train_on_batch(x, y) for x, y in batches()]
    return {"difference": difference(one, other), "same": expected == found, "plain": is_plain(other)}


def batches_with_faults():
    one, other = build(), build()
    weighted = {"sample_weight": np.arange(1.0, BATCH + 1), "return_dict": True}
    expected = [one.train_on_batch(x, y, **weighted) for x, y in batches()]
    with memfit.Guard(other, options=memfit.GuardOptions(remember=False)) as guard, faults(BACKEND, 2, 2):
        found = [guard.train_on_batch(x, y, **weighted) for x, y in batches()]
        size = guard.settings.micro_batch_size
        updates = guard.num_updates
    losses = max(abs(a[name] - b[name]) for a, b in zip(expected, found, strict=True) for name in a)
    names = [sorted(one) for one in found]
    return {
        "difference": difference(one, other),
        "losses": float(losses),
        "names": names[0],
        "size": size,
        "updates": updates,
        "plain": is_plain(other),
    }


def nothing_helps():
    """At the first batch and at a later one: the model is as it was, and goes on."""
    found = {}
    for first in (1, 3):
        expected, model = build(norm=True), build(norm=True)
        text, before = "", None
        with memfit.Guard(model, plan=None, options=memfit.GuardOptions(remember=False)) as guard:
            with faults(BACKEND, first, 1000):
                try:
                    for x, y in batches():
                        before = weights(model) if guard.num_updates else None
                        guard.train_on_batch(x, y)
                except memfit.CannotFit as error:
                    text = str(error)
            done = guard.num_updates
            same = before is None or all(np.array_equal(a, b) for a, b in zip(before, weights(model), strict=True))
            for x, y in batches()[done:]:
                guard.train_on_batch(x, y)
        for x, y in batches():
            expected.train_on_batch(x, y)
        found[str(first)] = [done, same, difference(expected, model), "nothing is left to try" in text]
    return found


def fit_that_fails_at_once():
    """The first batch of a fit: Keras on JAX has emptied the variables by then."""
    expected, model = build(norm=True), build(norm=True)
    x, y = (np.concatenate(part) for part in zip(*batches(), strict=True))
    try:
        with faults(BACKEND, 1, 1000):
            memfit.fit(
                model,
                x,
                y,
                batch_size=BATCH,
                verbose=0,
                shuffle=False,
                plan=None,
                options=memfit.GuardOptions(remember=False),
            )
    except memfit.CannotFit:
        pass
    for one in (expected, model):
        one.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False)
    return {"difference": difference(expected, model)}


def all_that_a_loop_does():
    """A fit, batches, another compile, batches, a fit of the model's own: all train as the plain model."""
    one, other = build(), build()
    x, y = batches()[0]
    guard = memfit.Guard(other, options=memfit.GuardOptions(remember=False))
    for model, fit, train_on_batch in ((one, one.fit, one.train_on_batch), (other, guard.fit, guard.train_on_batch)):
        with faults(BACKEND, 1, 1 if model is other else 0):
            fit(x, y, batch_size=6, verbose=0, shuffle=False)
        train_on_batch(x, y)
        model.compile(keras.optimizers.SGD(1e-2, momentum=0.9), "mse", jit_compile=BACKEND == "jax")
        train_on_batch(x, y)
        model.fit(x, y, batch_size=6, verbose=0, shuffle=False)
        train_on_batch(x[:5], y[:5])
        fit(x, y, batch_size=6, verbose=0, shuffle=False)
        train_on_batch(x, y)
    guard.close()
    return {"difference": difference(one, other), "plain": is_plain(other)}


def goes_on():
    """Batches of two processes, each of which trains on some."""
    expected = build(keras.layers.Dropout(0.3))
    for x, y in batches():
        expected.train_on_batch(x, y)
    counts = []
    for stop in (2, NUM_BATCHES):
        checkpointing._finished.clear()
        model = build(keras.layers.Dropout(0.3))
        with memfit.Guard(
            model, checkpoint=FOLDER / "kept", options=memfit.GuardOptions(checkpoint_every=1, remember=False)
        ) as guard:
            counts.append([guard.resumed_from, guard.num_updates])
            for x, y in batches()[guard.num_updates : stop]:
                guard.train_on_batch(x, y)
    return {"difference": difference(expected, model), "counts": counts}


class Numbered(keras.utils.PyDataset):
    """Batches by number, the last of which is smaller."""

    def __len__(self):
        return NUM_BATCHES

    def __getitem__(self, index):
        x, y = batches()[index]
        return (x, y) if index < NUM_BATCHES - 1 else (x[:5], y[:5])


def kinds_of_data():
    """Micro-batches of a PyDataset, of a tf.data.Dataset where there is TensorFlow, and of a generator."""
    import types

    makers = {"PyDataset": Numbered, "generator": lambda: (Numbered()[index] for index in range(NUM_BATCHES))}
    if BACKEND == "tensorflow":
        import tensorflow as tf

        x, y = (np.concatenate(part) for part in zip(*[Numbered()[index] for index in range(NUM_BATCHES)], strict=True))
        makers["tf.data"] = lambda: tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    found = {}
    for name, make in makers.items():
        one, other = build(), build()
        steps = {"shuffle": False} if not isinstance(make(), types.GeneratorType) else {}
        one.fit(make(), verbose=0, **steps)
        with faults(BACKEND, 2, 1):
            memfit.fit(other, make(), verbose=0, options=memfit.GuardOptions(remember=False), **steps)
        numbers = [int(model.optimizer.iterations) for model in (one, other)]
        if name == "generator":
            # At the end of data of unknown length, Keras on TensorFlow counts a step that it doesn't make.
            other.optimizer.iterations.assign(numbers[0])
        found[name] = [difference(one, other), numbers[1]]
    return found


def accumulation_of_keras():
    """An optimizer that itself applies every other batch, the last window unfinished."""
    one, other = build(gradient_accumulation_steps=3), build(gradient_accumulation_steps=3)
    for x, y in batches():
        one.train_on_batch(x, y)
    with memfit.Guard(other, options=memfit.GuardOptions(micro_batch_size=5, remember=False)) as guard:
        for x, y in batches():
            guard.train_on_batch(x, y)
    return {"difference": difference(one, other)}


def scaled_loss():
    """float16 with a loss that is scaled: whole batches against micro-batches, and steps that overflow left out."""
    found = {}
    for name, scale in (("fits", 2.0**10), ("overflows", 2.0**40)):
        made = []
        for settings in (Settings(precision="amp-fp16"), Settings(precision="amp-fp16", micro_batches=3)):
            # Adam would not see a factor that is wrong.
            model = build(floatx="float32", optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
            fitted = FittedModel(settings, model)
            x, y = (part.astype("float32") for part in batches()[0])
            model.optimizer.build(model.trainable_variables)
            model.optimizer.dynamic_scale.assign(scale)
            before = weights(model)[0]
            for _ in range(3):
                model.train_on_batch(x, y)
            numbers = [int(model.optimizer.inner_optimizer.iterations), float(model.optimizer.dynamic_scale)]
            changed = not np.array_equal(before, weights(model)[0])
            fitted.undo()
            made.append((model, numbers, changed))
        (one, plain, _), (other, parts, changed) = made
        found[name] = [difference(one, other), plain, parts, changed]
    return found


def precision_goes():
    """Settings that put another optimizer before the user's leave nothing behind, nor do they undo a compile."""
    model = build(floatx="float32")
    plain = model.optimizer
    x, y = (part.astype("float32") for part in batches()[0])
    guard = memfit.Guard(model, options=memfit.GuardOptions(remember=False, micro_batch_size=5))
    guard.train_on_batch(x, y)
    guard._keras._loop.put_on(Settings(precision="amp-fp16"))
    scaled = type(model.optimizer).__name__
    guard.close()
    back = model.optimizer is plain and is_plain(model)
    fitted = FittedModel(Settings(precision="amp-fp16"), model)
    model.compile("sgd", "mse")
    fitted.undo()
    # Keras may have put its own scaling around it.
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return {"scaled": scaled, "back": back, "compiled": type(inner).__name__}


def main():
    for name in sys.argv[3:]:
        print(json.dumps({"check": name, **globals()[name]()}), flush=True)


if __name__ == "__main__":
    main()
