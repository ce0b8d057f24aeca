"""Trains small models plainly and with recomputation, on the backend of KERAS_BACKEND; prints what differs as JSON."""

import json
import sys

import keras
import numpy as np
from keras import layers, ops

from memfit.core.settings import Settings
from memfit.frameworks.keras.apply import low_rank, precision, recomputation
from memfit.frameworks.keras.apply.units import units

keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(8, 8, 8, 3))
TOKENS = RANDOM.integers(1, 50, (8, 12)).astype("int32")
TOKENS[:, 8:] = 0
LABELS = RANDOM.integers(0, 4, 8)


class Block(layers.Layer):
    """Attention and two dense layers, with dropout, masks and a loss of its own."""

    def __init__(self, width, **options):
        super().__init__(**options)
        self.supports_masking = True
        self.attention = layers.MultiHeadAttention(2, width // 2)
        self.up, self.down = layers.Dense(2 * width, activation="gelu"), layers.Dense(width)
        self.dropout = layers.Dropout(0.2, seed=3)

    def call(self, x, training=None):
        x = x + self.dropout(self.attention(x, x), training=training)
        change = self.down(self.up(x))
        self.add_loss(1e-2 * ops.mean(change * change))
        return x + change


class Subclassed(keras.Model):
    """No graph: the blocks are the units."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(50, 8, mask_zero=True)
        self.blocks = [Block(8, name=f"block{index}") for index in range(2)]
        self.pool, self.head = layers.GlobalAveragePooling1D(), layers.Dense(4, activation="softmax")

    def call(self, x, training=None):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(self.pool(x))


def residual(norm):
    x = inputs = layers.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same", name="stem")(x)
    for index in range(2):
        y = layers.BatchNormalization(name=f"norm{index}")(x) if norm else x
        y = layers.ReLU(name=f"relu{index}")(y)
        y = layers.Dropout(0.3, seed=index + 3, name=f"dropout{index}")(y)
        y = layers.Conv2D(4, 3, padding="same", name=f"conv{index}", activity_regularizer="l2")(y)
        x = layers.Add(name=f"add{index}")([x, y])
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(4, activation="softmax", name="head")(x))


def recurrent():
    return keras.Sequential(
        [
            layers.Input((12,)),
            layers.Embedding(50, 8, mask_zero=True, name="embedding"),
            layers.LSTM(6, return_sequences=True, name="first"),
            layers.Dropout(0.2, seed=5, name="dropout"),
            layers.LSTM(6, name="second"),
            layers.Dense(4, activation="softmax", name="head"),
        ]
    )


def trained(make, data, paths, undone=False, **options):
    keras.utils.set_random_seed(0)
    model = make()
    model(data[:2])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "sparse_categorical_crossentropy", **options)
    if paths is None:
        paths = tuple(unit.path for unit in units(model, data))
    undo = recomputation.apply(Settings(checkpoint=paths), model)
    keras.utils.set_random_seed(1)
    losses = [float(model.train_on_batch(data, LABELS)) for _ in range(2)]
    if undone:
        undo()
    losses.append(float(model.train_on_batch(data, LABELS)))
    values = [ops.convert_to_numpy(v).astype("float64") for v in (*model.variables, *model.optimizer.variables)]
    return paths, losses, values


def apart(one, other):
    scale = [max(1.0, float(np.abs(a).max(initial=0))) for a in one[2]]
    values = [float(np.abs(a - b).max(initial=0)) / s for a, b, s in zip(one[2], other[2], scale, strict=True)]
    return max([abs(a - b) for a, b in zip(one[1], other[1], strict=True)] + values)


MODELS = {
    "residual": (lambda: residual(norm=False), IMAGES),
    "batch norm": (lambda: residual(norm=True), IMAGES),
    "subclassed": (Subclassed, TOKENS),
    "recurrent": (recurrent, TOKENS),
}


def recomputed(name, mode):
    """How far training with recomputation is from plain training."""
    make, data = MODELS[name]
    options = {"graph": {"jit_compile": False}, "compiled": {"jit_compile": True}, "eager": {"run_eagerly": True}}[mode]
    plain = trained(make, data, (), **options)
    fitted = trained(make, data, None, undone=name == "batch norm", **options)
    return {"paths": fitted[0], "apart": apart(plain, fitted), "losses": plain[1]}


def in_float32():
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def switched():
    """Losses in mixed precision and after it, and what adapters leave behind."""
    found = {}
    for kind in ("amp-bf16", "amp-fp16"):
        keras.utils.set_random_seed(0)
        model = residual(norm=True)
        model.compile("adam", "sparse_categorical_crossentropy")
        plain = [float(model.train_on_batch(IMAGES, LABELS))]
        undo = precision.apply(Settings(precision=kind), model)
        losses = [float(model.train_on_batch(IMAGES, LABELS)) for _ in range(2)]
        inside = {str(model.get_layer("stem").compute_dtype), str(model.get_layer("head").compute_dtype)}
        kinds = {str(variable.dtype) for variable in model.trainable_variables}
        iterations = int(model.optimizer.iterations)
        undo()
        found[kind] = {
            "losses": plain + losses + [float(model.train_on_batch(IMAGES, LABELS))],
            "inside": sorted(inside),
            "variables": sorted(kinds),
            "iterations": [iterations, int(model.optimizer.iterations)],
            "policies": sorted({layer.dtype_policy.name for layer in model.layers}),
            "optimizer": type(model.optimizer).__name__,
        }
    for quantized in (False, True):
        found[f"adapters {quantized}"] = adapted(quantized)
    return found


def adapted(quantized):
    keras.utils.set_random_seed(0)
    model = Subclassed()
    model(TOKENS)
    model.compile("adam", "sparse_categorical_crossentropy")
    model.train_on_batch(TOKENS, LABELS)
    names = [variable.path for variable in model.variables]
    start = ops.convert_to_numpy(model(TOKENS))
    undo = low_rank.apply(Settings(lora_rank=2, quantized_base=quantized), model)
    with_adapters = ops.convert_to_numpy(model(TOKENS))
    for _ in range(3):
        model.train_on_batch(TOKENS, LABELS)
    kinds = {str(variable.dtype) for variable in model.variables}
    learned = ops.convert_to_numpy(model(TOKENS))
    trained_names = sorted({variable.name for variable in model.trainable_variables})
    undo()
    merged = ops.convert_to_numpy(model(TOKENS))
    before = [ops.convert_to_numpy(variable).copy() for variable in model.trainable_variables]
    model.train_on_batch(TOKENS, LABELS)
    pairs = zip(model.trainable_variables, before, strict=True)
    return {
        "untrained": [variable.path for variable, old in pairs if (ops.convert_to_numpy(variable) == old).all()],
        "at first": float(np.abs(with_adapters - start).max()),
        "learned": float(np.abs(learned - start).max()),
        "merged": float(np.abs(merged - learned).max()),
        "trained": trained_names,
        "int8": "int8" in kinds,
        "same variables": [variable.path for variable in model.variables] == names,
        "iterations": int(model.optimizer.iterations),
    }


def jax_bytes():
    """Temporary memory of a compiled step, without and with recomputation."""
    import jax

    found = []
    for paths in ((), None):
        keras.utils.set_random_seed(0)
        x = inputs = layers.Input((64,))
        for index in range(6):
            y = layers.Dense(64, activation="gelu", name=f"up{index}")(x)
            y = layers.Dense(64, activation="gelu", name=f"down{index}")(y)
            x = layers.Add(name=f"add{index}")([x, y])
        model = keras.Model(inputs, layers.Dense(1, name="head")(x))
        model.compile("sgd", "mse")
        if paths is None:
            paths = tuple(unit.path for unit in units(model))
        recomputation.apply(Settings(checkpoint=paths), model)
        batch = (np.zeros((4096, 64), "float32"), np.zeros((4096, 1), "float32"))
        model._symbolic_build(data_batch=batch)
        groups = (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables)
        state = tuple([v.value for v in group] for group in (*groups, model.metrics_variables))
        compiled = jax.jit(model.train_step).lower(state, batch).compile()
        found.append(compiled.memory_analysis().temp_size_in_bytes)
    return found


if __name__ == "__main__":
    result = {}
    for check in sys.argv[1:]:
        kind, _, mode = check.partition(":")
        if kind in MODELS:
            result[check] = recomputed(kind, mode)
    in_float32()
    if "switched" in sys.argv:
        result["switched"] = switched()
    if "bytes" in sys.argv:
        result["bytes"] = jax_bytes()
    sys.stdout.write(json.dumps(result) + "\n")
