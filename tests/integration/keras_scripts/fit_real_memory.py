"""A fit whose whole batches really don't fit: a limit on the process's data is set after the first, small, fit.

Run as: fit_real_memory.py BACKEND HEADROOM_MIB [batches]; prints one line of JSON. With `batches`, a loop over batches
trains in place of the second fit.
"""

import json
import logging
import os
import sys

os.environ |= {"KERAS_BACKEND": sys.argv[1], "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}

import resource

import keras
import numpy as np

import memfit

WIDTH, NUM_SAMPLES, BATCH = 512, 80000, 40000


def data_bytes():
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))


def main():
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("memfit").addHandler(handler)
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).random((NUM_SAMPLES, 64)).astype("float32")
    y = x[:, :1].copy()
    arguments = {"verbose": 0, "plan": None, "options": memfit.GuardOptions(remember=False), "shuffle": False}
    memfit.fit(model, x[:64], y[:64], batch_size=64, **arguments)
    most = data_bytes() + int(sys.argv[2]) * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    if sys.argv[3:] == ["batches"]:
        with memfit.Guard(model, plan=None, options=memfit.GuardOptions(remember=False)) as guard:
            starts = [*range(0, NUM_SAMPLES, BATCH)] * 2
            loss = [guard.train_on_batch(x[at : at + BATCH], y[at : at + BATCH]) for at in starts]
            loss = [float(loss[0]), float(loss[-1])]
    else:
        loss = memfit.fit(model, x, y, batch_size=BATCH, epochs=2, **arguments).history["loss"]
    iterations = int(np.asarray(model.optimizer.iterations.value))
    print(json.dumps({"loss": loss, "iterations": iterations, "said": said}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
