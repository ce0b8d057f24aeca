"""A guarded step of JAX in a process whose memory ends before that of the whole batch."""

import json
import resource
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import memfit
from memfit.core.own_memory import read_sizes

NUM, WIDTH, HIDDEN = 4096, 64, 4096


def loss(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(jnp.sort(jnp.tanh(x @ params["a"]), axis=1)) @ params["b"] - y) ** 2)


def data_bytes():
    return read_sizes()[-1]


def settled_bytes():
    """What is held when XLA has given the last run's memory back, which it does after it has given the results."""
    found = [data_bytes()]
    while len(found) < 10 or len(set(found[-10:])) > 1:
        time.sleep(0.05)
        found.append(data_bytes())
    return found[-1]


def main(room_mib):
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    params = {"a": rng.normal(size=(WIDTH, HIDDEN)) * 0.05, "b": rng.normal(size=(HIDDEN, WIDTH)) * 0.01}
    batch = (rng.normal(size=(NUM, WIDTH)), rng.normal(size=(NUM, WIDTH)))
    optimizer = optax.adamw(1e-2)
    plain = memfit.jax.train_step(loss, optimizer)
    expected, _, value = plain(jax.tree.map(jnp.asarray, params), plain.init(params), batch)
    expected, value = jax.tree.map(np.asarray, expected), float(value)
    step = memfit.jax.train_step(loss, optimizer, guard=True)
    state = step.init(params)
    resource.setrlimit(resource.RLIMIT_DATA, (settled_bytes() + room_mib * 2**20, resource.RLIM_INFINITY))
    after, _, found = step(jax.tree.map(jnp.asarray, params), state, batch)
    gap = max(float(np.abs(np.asarray(after[name]) - expected[name]).max()) for name in params)
    print(json.dumps({"retries": step.num_retries, "gap": gap, "value": abs(float(found) - value) / value}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
