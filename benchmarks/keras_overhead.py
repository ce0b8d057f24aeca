"""What a guarded `fit` of Keras costs while memory suffices: against the plain one, in one run.

    python -m benchmarks.keras_overhead [--rounds 12] [--backends tensorflow jax torch]

A convolutional network, an LSTM and a multilayer perceptron with steps of a few milliseconds, on each backend, in a
process for each. Calls of `fit` of both kinds take turns, so that both meet the same machine; each has its own model of
the same values, which was trained before. The time is processor time of the whole process, which other programs disturb
less than the clock.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.reporting import Bar, publish, table

BACKENDS = ("tensorflow", "jax", "torch")
MODELS = ("convolutions", "lstm", "perceptron")
METHOD = """\
Calls of `model.fit` and of `memfit.fit` over the same data take turns, six epochs each; the ratio of a pair is
compared, and the median of the ratios is the result. Nothing is planned, remembered or stored: this is the cost of
steps that can be undone.
"""
_MOST = 0.03


def make(name: str) -> tuple[Any, Any, Any]:
    """A compiled model with equal values each time, and its data."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    generator = np.random.default_rng(0)
    layers = keras.layers
    if name == "convolutions":
        blocks = []
        for width in (32, 64, 96):
            blocks += [layers.Conv2D(width, 3, padding="same"), layers.BatchNormalization(), layers.ReLU()]
            blocks += [layers.MaxPooling2D()]
        model = keras.Sequential([keras.Input((32, 32, 3)), *blocks, layers.Flatten(), layers.Dense(10)])
        x, size = generator.random((256, 32, 32, 3)), 32
    elif name == "lstm":
        model = keras.Sequential([keras.Input((40, 32)), layers.LSTM(96), layers.Dropout(0.1), layers.Dense(10)])
        x, size = generator.random((512, 40, 32)), 64
    else:
        hidden = [layers.Dense(512, activation="relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((256,)), *hidden, layers.Dense(10)])
        x, size = generator.random((4096, 256)), 128
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    y = generator.integers(0, 10, len(x))
    return model, (x.astype("float32"), y), size


def ratios(name: str, rounds: int) -> tuple[list[float], float]:
    """Processor time of guarded fits over that of plain ones, and of a plain step in milliseconds."""
    import memfit

    models = {guarded: make(name) for guarded in (False, True)}
    epochs = 6

    def fit(guarded: bool) -> None:
        model, data, size = models[guarded]
        if guarded:
            memfit.fit(
                model,
                *data,
                batch_size=size,
                verbose=0,
                epochs=epochs,
                plan=None,
                options=memfit.GuardOptions(remember=False),
            )
        else:
            model.fit(*data, batch_size=size, verbose=0, epochs=epochs)

    for guarded in (False, True, False, True):
        fit(guarded)
    found, plain = [], []
    for number in range(rounds):
        seconds = {}
        for guarded in (False, True) if number % 2 else (True, False):
            started = time.process_time()
            fit(guarded)
            seconds[guarded] = time.process_time() - started
        found.append(seconds[True] / seconds[False])
        plain.append(seconds[False])
    _, data, size = models[False]
    return found, statistics.median(plain) / (epochs * len(data[0]) / size) * 1000


def apart(backend: str, name: str, rounds: int) -> tuple[list[float], float]:
    """The same, in a process of its own."""
    environment = os.environ | {
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.keras_overhead", "--one", name, "--rounds", str(rounds)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    found, milliseconds = json.loads(done.stdout.splitlines()[-1])
    return found, milliseconds


def main() -> int:
    """Measures and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="pairs of fits; default 12")
    parser.add_argument("--backends", nargs="*", default=BACKENDS, help="all by default")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(ratios(arguments.one, arguments.rounds)))
        return 0
    bars, rows = [], []
    for backend in arguments.backends:
        for name in MODELS:
            found, milliseconds = apart(backend, name, arguments.rounds)
            median = statistics.median(found)
            claim = f"time of a guarded fit, {name} on {backend}"
            bars.append(Bar(claim, f"{median - 1:+.2%}", f"at most +{_MOST:.0%}", median <= 1 + _MOST))
            low, _, high = statistics.quantiles(found, n=4)
            rows.append((f"{name}, {backend}", f"{milliseconds:.1f}", f"{median:.4f}", f"{low:.4f} to {high:.4f}"))
            print(rows[-1], flush=True)
    head = ("model and backend", "plain step, ms of processor time", "median ratio", "middle half")
    complete = tuple(arguments.backends) == BACKENDS and arguments.rounds >= 10
    publish("keras_overhead", "What a guarded fit of Keras costs", bars, [METHOD, table(head, rows)], save=complete)
    return 0


if __name__ == "__main__":
    sys.exit(main())
