"""Training steps of JAX, of a few hundred megabytes each, to measure."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Made = tuple[Callable[..., Any], tuple[Any, ...]]


def _adam(loss: Callable[..., Any], parameters: Any, *batch: Any, donate: bool = True) -> Made:
    optimizer = optax.adam(1e-3)

    def step(parameters: Any, state: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(parameters, *batch)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1) if donate else ()), (parameters, optimizer.init(parameters), *batch)


def _filled(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * 0.05)


def _mlp_loss(parameters: Any, x: Any, y: Any) -> Any:
    for weight in parameters:
        x = jax.nn.relu(x @ weight)
    return jnp.mean((x - y) ** 2)


def mlp() -> Made:
    """Five dense layers."""
    return _adam(_mlp_loss, [_filled(1024, 1024) for _ in range(5)], _filled(4096, 1024), _filled(4096, 1024))


def mlp_not_donated() -> Made:
    """The same, its old parameters kept."""
    return _adam(
        _mlp_loss, [_filled(1024, 1024) for _ in range(5)], _filled(4096, 1024), _filled(4096, 1024), donate=False
    )


def _convolved(x: Any, weight: Any, stride: int = 1) -> Any:
    return jax.lax.conv_general_dilated(x, weight, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def cnn() -> Made:
    """Four convolutions with normalisation."""

    def loss(parameters: Any, x: Any, y: Any) -> Any:
        for weight in parameters["convolutions"]:
            x = _convolved(x, weight, 2)
            x = jax.nn.relu((x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-3))
        logits = x.mean((1, 2)) @ parameters["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    widths = (3, 32, 64, 128, 256)
    weights = [_filled(3, 3, a, b) for a, b in pairwise(widths)]
    return _adam(
        loss, {"convolutions": weights, "head": _filled(256, 10)}, _filled(48, 128, 128, 3), jnp.zeros(48, jnp.int32)
    )


def autoencoder() -> Made:
    """Convolutions down and up again."""

    def loss(parameters: Any, x: Any) -> Any:
        y = x
        for weight in parameters["down"]:
            y = jax.nn.relu(_convolved(y, weight, 2))
        for weight in parameters["up"]:
            batch, height, width, channels = y.shape
            y = jax.image.resize(y, (batch, 2 * height, 2 * width, channels), "nearest")
            y = jax.nn.relu(_convolved(y, weight))
        return jnp.mean((y - x) ** 2)

    return _adam(
        loss,
        {"down": [_filled(3, 3, 3, 32), _filled(3, 3, 32, 64)], "up": [_filled(3, 3, 64, 32), _filled(3, 3, 32, 3)]},
        _filled(32, 96, 96, 3),
    )


def transformer(*, remat: bool = False) -> Made:
    """Four blocks of attention."""

    def normalised(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def block(weights: Any, x: Any) -> Any:
        batch, time, width = x.shape
        query, key, value = jnp.split((normalised(x) @ weights["qkv"]).reshape(batch, time, 4, -1), 3, -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(width // 4)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value).reshape(x.shape) @ weights["out"]
        return x + jax.nn.gelu(normalised(x) @ weights["up"]) @ weights["down"]

    def loss(parameters: Any, tokens: Any) -> Any:
        x = parameters["embedding"][tokens[:, :-1]]
        for weights in parameters["blocks"]:
            x = jax.checkpoint(block)(weights, x) if remat else block(weights, x)
        logits = x @ parameters["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    width = 256
    blocks = [
        {
            "qkv": _filled(width, 3 * width),
            "out": _filled(width, width),
            "up": _filled(width, 4 * width),
            "down": _filled(4 * width, width),
        }
        for _ in range(4)
    ]
    return _adam(loss, {"embedding": _filled(8000, width), "blocks": blocks}, jnp.zeros((8, 257), jnp.int32))


def lstm() -> Made:
    """A recurrent layer, scanned over time."""

    def loss(parameters: Any, x: Any, y: Any) -> Any:
        def cell(carried: Any, inputs: Any) -> Any:
            hidden, memory = carried
            gates = inputs @ parameters["input"] + hidden @ parameters["hidden"]
            i, f, g, o = jnp.split(gates, 4, -1)
            memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(memory)
            return (hidden, memory), hidden

        start = jnp.zeros((x.shape[1], 512))
        _, outputs = jax.lax.scan(cell, (start, start), x)
        return jnp.mean((outputs.mean(0) @ parameters["head"] - y) ** 2)

    weights = {"input": _filled(128, 2048), "hidden": _filled(512, 2048), "head": _filled(512, 1)}
    return _adam(loss, weights, _filled(100, 128, 128), _filled(128, 1))


def unet() -> Made:
    """Convolutions down and up, with a skip."""

    def loss(parameters: Any, x: Any) -> Any:
        first = jax.nn.relu(_convolved(x, parameters[0]))
        inner = jax.nn.relu(_convolved(jax.nn.relu(_convolved(first, parameters[1], 2)), parameters[2]))
        larger = jax.image.resize(inner, (*first.shape[:3], inner.shape[3]), "nearest")
        return jnp.mean((_convolved(jnp.concatenate([larger, first], -1), parameters[3]) - x) ** 2)

    kernels = [_filled(3, 3, 3, 32), _filled(3, 3, 32, 64), _filled(3, 3, 64, 64), _filled(3, 3, 96, 3)]
    return _adam(loss, kernels, _filled(16, 96, 96, 3))


def bottlenecks() -> Made:
    """Residual blocks of three convolutions."""

    def loss(parameters: Any, x: Any, y: Any) -> Any:
        x = _convolved(x, parameters["stem"], 2)
        for narrow, middle, wide in parameters["blocks"]:
            inner = jax.nn.relu(_convolved(jax.nn.relu(_convolved(x, narrow)), middle))
            x = jax.nn.relu(x + _convolved(inner, wide))
        logits = x.mean((1, 2)) @ parameters["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    block = (_filled(1, 1, 128, 32), _filled(3, 3, 32, 32), _filled(1, 1, 32, 128))
    parameters = {"stem": _filled(7, 7, 3, 128), "blocks": [block] * 3, "head": _filled(128, 10)}
    return _adam(loss, parameters, _filled(16, 96, 96, 3), jnp.zeros(16, jnp.int32))


def gru() -> Made:
    """A recurrent cell over 120 steps."""

    def loss(parameters: Any, x: Any, y: Any) -> Any:
        def cell(state: Any, given: Any) -> Any:
            gate = jax.nn.sigmoid(given @ parameters["a"] + state @ parameters["b"])
            state = gate * state + (1 - gate) * jnp.tanh(given @ parameters["c"] + state @ parameters["d"])
            return state, state

        _, outputs = jax.lax.scan(cell, jnp.zeros((x.shape[1], 384)), x)
        return jnp.mean((outputs @ parameters["e"] - y) ** 2)

    shapes = {"a": (64, 384), "b": (384, 384), "c": (64, 384), "d": (384, 384), "e": (384, 64)}
    parameters = {name: _filled(*shape) for name, shape in shapes.items()}
    return _adam(loss, parameters, _filled(120, 128, 64), _filled(120, 128, 64))


def wide_head() -> Made:
    """An embedding and many classes."""

    def loss(parameters: Any, x: Any, y: Any) -> Any:
        inner = jax.nn.gelu(parameters["embedding"][x].mean(1) @ parameters["inner"])
        return optax.softmax_cross_entropy_with_integer_labels(inner @ parameters["head"], y).mean()

    parameters = {"embedding": _filled(20000, 256), "inner": _filled(256, 2048), "head": _filled(2048, 8000)}
    return _adam(loss, parameters, jnp.zeros((2048, 32), jnp.int32), jnp.zeros(2048, jnp.int32))


CASES = (
    "mlp",
    "mlp_not_donated",
    "transformer",
    "lstm",
    "autoencoder",
    "cnn",
    "unet",
    "bottlenecks",
    "gru",
    "wide_head",
)
