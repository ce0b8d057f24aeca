"""A plan as plain Keras: the lines that do the same without memfit, and honest words where there are none."""

import re

from memfit.core.plan import Plan
from memfit.core.settings import Settings
from memfit.core.units import format_size
from memfit.reports.estimate import figures

_PATH = re.compile(r"[\w.:/ -]+")

_TENSORFLOW_STEP = '''\
class MicroBatched(keras.Model):
    """Gradients of each part with its share of the batch, one update; samples have no weights."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        size = tf.shape(keras.tree.flatten(y)[0])[0]

        def add(start, loss, *total):
            x_part, y_part = keras.tree.map_structure(lambda array: array[start : start + PART], (x, y))
            count = tf.shape(keras.tree.flatten(y_part)[0])[0]
            with tf.GradientTape() as tape:
                y_pred = self(x_part, training=True)
                share = tf.cast(count, "float32") / tf.cast(size, "float32")
                value = share * self.compute_loss(x=x_part, y=y_part, y_pred=y_pred)
            gradients = tape.gradient(value, self.trainable_variables)
            return start + PART, loss + value, *(a + b for a, b in zip(total, gradients))

        zeros = [tf.zeros_like(variable) for variable in self.trainable_variables]
        _, loss, *total = tf.while_loop(
            lambda start, *_: start < size, add, [0, 0.0, *zeros], parallel_iterations=1
        )
        self.optimizer.apply(total, self.trainable_variables)
        return {"loss": loss}'''

_TORCH_STEP = '''\
class MicroBatched(keras.Model):
    """Gradients of each part with its share of the batch, one update; samples have no weights."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        self.zero_grad()
        loss, size = 0.0, len(keras.tree.flatten(y)[0])
        for start in range(0, size, PART):
            x_part, y_part = keras.tree.map_structure(lambda array: array[start : start + PART], (x, y))
            y_pred = self(x_part, training=True)
            share = min(PART, size - start) / size
            value = self.compute_loss(x=x_part, y=y_part, y_pred=y_pred) * share
            value.backward()
            loss = loss + value.detach()
        gradients = [variable.value.grad for variable in self.trainable_weights]
        with torch.no_grad():
            self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}'''

_JAX_STEP = '''\
class MicroBatched(keras.Model):
    """Gradients of equal parts, one update; batches have a multiple of PART samples, without weights.

    State of layers, such as seeds of dropout, is taken from the last part.
    """

    def train_step(self, state, data):
        trained, other, optimizer_state, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        count = jax.tree.leaves(y)[0].shape[0] // PART
        gradient = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)

        def add(carry, part):
            total, other = carry
            (value, (_, _, other, *_)), gradients = gradient(
                trained, other, metrics, *part, None, training=True, optimizer_variables=optimizer_state
            )
            return (jax.tree.map(jnp.add, total, gradients), other), value

        parts = jax.tree.map(lambda array: array.reshape(count, PART, *array.shape[1:]), (x, y))
        zeros = [jnp.zeros_like(variable) for variable in trained]
        (total, other), values = jax.lax.scan(add, (zeros, other), parts)
        total = [gradient / count for gradient in total]
        trained, optimizer_state = self.optimizer.stateless_apply(optimizer_state, total, trained)
        return {"loss": values.mean()}, (trained, other, optimizer_state, metrics)'''

_STEPS = {
    "tensorflow": (("import tensorflow as tf",), _TENSORFLOW_STEP),
    "torch": (("import torch",), _TORCH_STEP),
    "jax": (("import jax", "import jax.numpy as jnp"), _JAX_STEP),
}


def format_keras_code(plan: Plan) -> str:
    """The program, with a trailing newline."""
    backend = plan.framework.partition(":")[2]
    settings = plan.settings
    where = f"within {format_size(plan.budget_bytes)} on {figures.device_title(plan.device)}"
    head = [f"# How to run {figures.printable(plan.subject)} {where} in plain Keras on {backend}."]
    imports = ["import keras"]
    blocks: list[str] = []
    steps: list[str] = []
    if settings.precision:
        steps += _precision(settings)
    if settings.lora_rank:
        steps += _adapters(settings)
    if settings.micro_batches > 1 and backend in _STEPS:
        more, step = _STEPS[backend]
        imports += more
        size = settings.micro_batch_size or f"{-(-(plan.batch_size or 1) // settings.micro_batches)}"
        blocks += [f"PART = {size}  # samples that are computed at a time", step]
        steps += [
            "    # A functional model with the same layers and weights, and the step above.",
            "    model = MicroBatched(model.input, model.output)",
        ]
    compiled = "" if settings.jit_compile is None else f", jit_compile={settings.jit_compile}"
    scaled = settings.precision == "amp-fp16"
    given = "keras.optimizers.LossScaleOptimizer(optimizer)" if scaled else "optimizer"
    steps.append("    # With the metrics and weights of losses that it was compiled with, if any.")
    steps.append(f"    model.compile(optimizer={given}, loss=loss{compiled})")
    prepare = "\n".join(["def prepare(model, optimizer, loss):", *steps, "    return model"])
    return "\n\n\n".join(["\n".join([*head, *_recomputation(settings), *imports]), *blocks, prepare]) + "\n"


def _precision(settings: Settings) -> list[str]:
    name = "mixed_float16" if settings.precision == "amp-fp16" else "mixed_bfloat16"
    return [
        "    # Layers take their policy when they are made: the model is made again, with the weights that it has.",
        f'    keras.config.set_dtype_policy("{name}")',
        "    config = keras.saving.serialize_keras_object(model)",
        f'    policy = {{"module": "keras", "class_name": "DTypePolicy", "config": {{"name": "{name}"}}}}',
        '    for layer in config["config"].get("layers", []):',
        '        if "dtype" in layer["config"] and layer["class_name"] != "InputLayer":',
        '            layer["config"]["dtype"] = {**policy, "registered_name": None}',
        "    weights = model.get_weights()",
        "    model = keras.saving.deserialize_keras_object(config)",
        "    model.set_weights(weights)",
    ]


def _adapters(settings: Settings) -> list[str]:
    lines = ["    for layer in model._flatten_layers():", '        if hasattr(layer, "enable_lora") and layer.built:']
    if settings.quantized_base:
        lines.append('            layer.quantize("int8")')
    lines += [
        f"            layer.enable_lora({settings.lora_rank})",
        "        elif not list(layer._layers):",
        "            layer.trainable = False",
    ]
    return lines


def _recomputation(settings: Settings) -> list[str]:
    """Words: Keras has no switch that has parts of a finished model computed again."""
    if not settings.checkpoint:
        return []
    paths = [path if _PATH.fullmatch(path) else repr(path) for path in settings.checkpoint]
    lines = ["# These parts are computed again in the backward pass:"]
    lines += [f"#     {path}" for path in paths]
    lines += [
        "# Keras has no switch for that on a finished model. Where you build it, put the layers of each part into one",
        "# function of tensors and call keras.remat(function)(x), or build under keras.RematScope. XLA for CPU merges",
        "# the second computation with the first and saves nothing; memfit's plan.apply(model) keeps them apart.",
    ]
    return lines
