"""A plan as plain PyTorch, or as Keras or JAX: the lines that do the same without memfit.

The text is a small program of two functions, `prepare` and `step`, with what they need above them and nothing that the
plan doesn't use. It is made from the settings alone, so it says the same after a plan was saved and loaded.
"""

import re
import textwrap
from dataclasses import replace

from memfit.core.device import Kind
from memfit.core.errors import BadInput
from memfit.core.plan import Plan
from memfit.core.settings import OptimizerKernels, OptimizerState, Settings, Weighting
from memfit.core.units import format_size
from memfit.reports.estimate import figures
from memfit.reports.plan import snippets

# A place in a batch goes into the program as it is, so it must be one: [1], ['labels'], .labels.
_PLACE = re.compile(r"(?:\[\d+\]|\['[\w./ -]+'\]|\.[A-Za-z_]\w*)*")

_PLAIN_PATH = re.compile(r"[\w.]+")
_KERAS_PATH = re.compile(r"[\w.:/ -]+")
_LINE_LENGTH = 110


def format_code(plan: Plan) -> str:
    """The program, with a trailing newline."""
    settings = plan.settings
    # A batch that stays whole has no parts to weigh or to measure.
    if replace(settings, weighting=Weighting(), micro_batch_size=0) == Settings():
        return "# The step fits as it is: nothing has to be changed.\n"
    if plan.framework == "jax":
        return _jax_code(plan)
    if plan.framework.startswith("keras"):
        return _keras_code(plan)
    device_type = "cpu" if plan.device.kind is Kind.HOST else "cuda"
    estimate = plan.estimate_before
    # A plan that was loaded doesn't know.
    has_batch_norm = estimate is None or any("batch_norm" in block.op for block in estimate.timeline.blocks)
    return _Program(settings, device_type, has_batch_norm).text(_subject(plan))


def _subject(plan: Plan) -> str:
    where = f"within {format_size(plan.budget_bytes)} on {figures.device_title(plan.device)}"
    return f"{figures.printable(plan.subject)} {where}"


def _part_size(plan: Plan) -> str:
    size = plan.settings.micro_batch_size or -(-(plan.batch_size or 1) // plan.settings.micro_batches)
    return f"PART = {size}  # samples that are computed at a time"


class _Program:
    """Puts the pieces of a program together."""

    def __init__(self, settings: Settings, device_type: str, has_batch_norm: bool) -> None:
        self.settings = settings
        self.device_type = device_type
        self.has_batch_norm = has_batch_norm
        self.split = settings.micro_batches > 1
        self.on_host = settings.state is OptimizerState.HOST
        self.scaled = settings.precision == "amp-fp16"
        self.placed = self.split or settings.channels_last
        self.given = settings.weighting.kind == "given"
        # None of these goes with LBFGS.
        other_update = self.on_host or settings.step_in_backward or self.scaled or settings.num_devices > 1
        own_optimizer = settings.kernels is OptimizerKernels.KEEP and settings.state is OptimizerState.KEEP
        self.may_search = own_optimizer and not other_update and not settings.lora_rank
        if settings.step_in_backward and (self.split or self.scaled or self.on_host):
            raise BadInput(
                "a plan that updates parameters in the backward pass has neither micro-batches, nor fp16, nor an "
                "optimizer in host memory. Plan without one of them."
            )

    def text(self, subject: str) -> str:
        functions = [
            *self._functions(),
            self._prepare(),
            *([self._gradients()] if self.may_search else []),
            self._step(),
        ]
        head = ["# How to run " + subject + " in plain PyTorch. Once, before training:"]
        head += ["#     model, optimizer = prepare(model, optimizer)", "# and for each batch:"]
        head += ["#     value = step(model, optimizer, loss, batch)"]
        own = "Clipping and schedulers" if self.scaled else "Clipping, schedulers and a gradient scaler"
        head.append(f"# {own} of your own loop are not in here: keep them where `step` updates.")
        if self.settings.num_devices > 1:
            head.append(f"# Start it with `torchrun --nproc-per-node {self.settings.num_devices} train.py`.")
        blocks = ["\n".join([*head, *self._imports(functions)]), *self._globals(), *functions]
        return "\n\n\n".join(block.strip("\n") for block in blocks) + "\n"

    def _imports(self, functions: list[str]) -> list[str]:
        early = snippets.EXPANDABLE_SEGMENTS if self.settings.expandable_segments else ()
        body = "\n".join([*early, *self._globals(), *functions])
        standard = _import_lines(body, snippets.STANDARD_MODULES, snippets.STANDARD_NAMES)
        others = _import_lines(body, snippets.MODULES, snippets.NAMES)
        groups = [group for group in (standard, list(early), others) if group]
        return [line for group in groups for line in ("", *group)][1:]

    def _globals(self) -> list[str]:
        lines = []
        if self.scaled:
            lines.append(f'scaler = torch.amp.GradScaler("{self.device_type}")')
        if self.on_host:
            lines.append("on_host = []  # pairs of a parameter and its copy in host memory")
        return ["\n".join(lines)] if lines else []

    def _functions(self) -> list[str]:
        settings = self.settings
        recompute = snippets.RECOMPUTE_KEEPING_STATISTICS if self.has_batch_norm else snippets.RECOMPUTE
        chunked = snippets.CHUNKED_CROSS_ENTROPY.replace("NUM_CHUNKS", str(settings.cross_entropy_chunks))
        placed = snippets.PLACED_CHANNELS_LAST if settings.channels_last else snippets.PLACED
        pieces = [
            (snippets.TREES, self.placed),
            (self._parts() if self.split else "", self.split),
            (recompute, settings.checkpoint),
            (snippets.OFFLOAD, settings.offload),
            (chunked, settings.cross_entropy_chunks),
            (snippets.HOST_COPY, self.on_host),
            (snippets.UPDATE_IN_BACKWARD, settings.step_in_backward),
            (placed, self.placed),
        ]
        return [text for text, used in pieces if used]

    def _parts(self) -> str:
        weighting, by_size = self.settings.weighting, self.settings.micro_batch_size > 0
        if weighting.kind == "count":
            if not _PLACE.fullmatch(weighting.tensor):
                raise BadInput(f"{weighting.tensor!r} is no place in a batch, such as [1] or ['labels'].")
            skip = f"[:, {weighting.skipped}:]" if weighting.skipped else ""
            counted = f"(tree{weighting.tensor}{skip} != {weighting.ignored}).sum().item()"
            return snippets.parts(snippets.PARTS_BY_COUNT, by_size).replace("COUNTED", counted)
        if weighting.kind == "samples":
            return snippets.parts(snippets.PARTS_BY_SAMPLES, by_size)
        # The parts of a sum just add up; a loss that gives weights is divided by their sum at the end.
        return snippets.parts(snippets.PARTS, by_size)

    def _prepare(self) -> str:
        settings = self.settings
        lines = ["def prepare(model, optimizer):"]
        lines += _named_modules(settings.freeze, "model.get_submodule(name).requires_grad_(False)")
        if settings.lora_rank:
            lines += snippets.lora(settings.lora_rank, settings.quantized_base)
        if settings.channels_last:
            lines.append("    model = model.to(memory_format=torch.channels_last)")
        prefix = "model.base_model.model" if settings.lora_rank else "model"
        # What is computed again has only its inputs to save, and those may wait in host memory: in this order.
        lines += _named_modules(settings.checkpoint, f"recompute({prefix}.get_submodule(name))")
        lines += _named_modules(settings.offload, f"offload({prefix}.get_submodule(name))")
        if settings.checkpoint:
            lines += snippets.WITHOUT_CACHE
        if settings.num_devices > 1:
            lines += snippets.shard(settings, self.device_type)
        if settings.state is OptimizerState.EIGHT_BIT:
            lines += snippets.EIGHT_BIT
        if settings.kernels is not OptimizerKernels.KEEP:
            fused = settings.kernels is OptimizerKernels.FUSED
            lines.append("    for group in optimizer.param_groups:")
            lines.append(f"        group.update(foreach=False, fused={fused})")
            if fused and self.device_type == "cuda":
                lines += snippets.FUSED_COUNTERS
        if self.on_host:
            lines += snippets.HOST_GROUPS
        if settings.step_in_backward:
            lines += snippets.UPDATE_HOOKS
        if settings.compile:
            lines.append("    model.forward = torch.compile(model.forward)")
        return "\n".join([*lines, "    return model, optimizer"])

    def _gradients(self) -> str:
        lines = [
            "def gradients(model, optimizer, loss, batch):",
            '    """Leaves the gradients of the whole batch; returns its loss."""',
            f"    optimizer.zero_grad(set_to_none={self.settings.set_to_none})",
        ]
        return "\n".join([*lines, *self._accumulate()])

    def _step(self) -> str:
        lines = [
            "def step(model, optimizer, loss, batch):",
            '    """One update; returns the loss of the whole batch."""',
        ]
        if self.may_search:
            return "\n".join([*lines, *snippets.STEP])
        *passes, returned = self._accumulate()
        return "\n".join([*lines, *passes, *self._update(), returned])

    def _accumulate(self) -> list[str]:
        """Lines that run forward and backward passes; the last returns the loss."""
        place = ["    device = next(model.parameters()).device"] if self.placed else []
        if self.split:
            return [*place, *self._backward_parts(), "    return total"]
        return [*place, *self._forward("batch", "    "), f"    {self._backward('value')}", "    return value.detach()"]

    def _forward(self, batch: str, indent: str) -> list[str]:
        value = "value, weight" if self.given and self.split else "value, _" if self.given else "value"
        given = f"placed({batch}, device)" if self.placed else batch
        call = f"{value} = loss(model, {given})"
        if self.settings.precision is None:
            return [indent + call]
        dtype = "torch.float16" if self.scaled else "torch.bfloat16"
        return [f'{indent}with torch.autocast("{self.device_type}", {dtype}):', f"{indent}    {call}"]

    def _backward(self, value: str) -> str:
        return f"scaler.scale({value}).backward()" if self.scaled else f"{value}.backward()"

    def _backward_parts(self) -> list[str]:
        kind, pad = self.settings.weighting.kind, " " * 8
        number = self.settings.micro_batch_size or self.settings.micro_batches
        share = {"sum": "", "given": " * weight"}.get(kind, " * share")
        loop = "part" if kind in ("sum", "given") else "part, share"
        lines = ["    total = whole = 0.0" if self.given else "    total = 0.0"]
        lines += [f"    for {loop} in parts(batch, {number}):", *self._forward("part", pad)]
        if self.given:
            lines += [f"{pad}if not weight:", f"{pad}    continue  # a mean over nothing is no number"]
        scaled = f"({f'value{share}'})" if share and not self.scaled else f"value{share}"
        lines += [f"{pad}{self._backward(scaled)}", f"{pad}total = total + value.detach(){share}"]
        if self.given:
            lines.append(f"{pad}whole = whole + weight")
            lines += ["    for parameter in model.parameters():", f"{pad}if parameter.grad is not None:"]
            lines += [f"{pad}    parameter.grad /= whole", "    total = total / whole"]
        return lines

    def _update(self) -> list[str]:
        zero = f"set_to_none={self.settings.set_to_none}"
        update = "scaler.step(optimizer)" if self.scaled else "optimizer.step()"
        after = ["    scaler.update()"] if self.scaled else []
        if self.settings.step_in_backward:
            return after
        if not self.on_host:
            return [f"    {update}", *after, f"    optimizer.zero_grad({zero})"]
        return [
            "    for parameter, waiting in on_host:",
            '        waiting.grad = None if parameter.grad is None else parameter.grad.to("cpu", copy=True)',
            f"    model.zero_grad({zero})",
            f"    {update}",
            *after,
            "    with torch.no_grad():",
            "        for parameter, waiting in on_host:",
            "            parameter.copy_(waiting)",
            "            waiting.grad = None",
        ]


def _import_lines(body: str, modules: tuple[str, ...], names: dict[str, str]) -> list[str]:
    """Imports of the modules, and of the names with their modules, that a program uses."""
    lines = [f"import {module}" for module in modules if _uses(body, module.split()[-1])]
    used: dict[str, list[str]] = {}
    for name, module in sorted(names.items(), key=lambda item: item[1]):
        if _uses(body, name):
            used.setdefault(module, []).append(name)
    return lines + [f"from {module} import {', '.join(found)}" for module, found in used.items()]


def _uses(body: str, name: str) -> bool:
    return re.search(rf"\b{name}[.(,)]", body) is not None


def _named_modules(names: tuple[str, ...], action: str) -> list[str]:
    """A loop over the modules of these names, listed so that no line gets too long."""
    if not names:
        return []
    # A loop needs a tuple, and a tuple of one needs its comma.
    written = [f'"{name}"' if _PLAIN_PATH.fullmatch(name) else repr(name) for name in names]
    short = f"    for name in ({', '.join(written)}{',' if len(names) == 1 else ''}):"
    if len(short) <= _LINE_LENGTH:
        return [short, f"        {action}"]
    wrapped = textwrap.wrap(", ".join(written) + ",", _LINE_LENGTH - 8, break_long_words=False, break_on_hyphens=False)
    return ["    for name in (", *(f"        {line}" for line in wrapped), "    ):", f"        {action}"]


def _keras_code(plan: Plan) -> str:
    backend = plan.framework.partition(":")[2]
    settings = plan.settings
    head = [f"# How to run {_subject(plan)} in plain Keras on {backend}."]
    imports = ["import keras"]
    blocks: list[str] = []
    steps: list[str] = []
    if settings.precision:
        steps += _precision(settings)
    if settings.lora_rank:
        steps += _adapters(settings)
    if settings.micro_batches > 1 and backend in snippets.KERAS_STEPS:
        more, step = snippets.KERAS_STEPS[backend]
        imports += more
        blocks += [_part_size(plan), step]
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
    paths = [path if _KERAS_PATH.fullmatch(path) else repr(path) for path in settings.checkpoint]
    lines = ["# These parts are computed again in the backward pass:"]
    lines += [f"#     {path}" for path in paths]
    lines += [
        "# Keras has no switch for that on a finished model. Where you build it, put the layers of each part into one",
        "# function of tensors and call keras.remat(function)(x), or build under keras.RematScope. XLA for CPU merges",
        "# the second computation with the first and saves nothing; memfit's plan.apply(model) keeps them apart.",
    ]
    return lines


def _jax_code(plan: Plan) -> str:
    settings = plan.settings
    head = [f"# How to run {_subject(plan)} in plain JAX; loss and optimizer are yours."]
    if settings.checkpoint:
        names = ", ".join(figures.printable(name) for name in settings.checkpoint)
        head += [
            f"# Computed again in the backward pass: {names}. Put jax.checkpoint around these calls in the loss.",
            "# XLA for CPU merges the second computation with the first and saves nothing; memfit keeps them apart.",
        ]
    split = settings.micro_batches > 1
    imports = ["from functools import partial", ""] if settings.donate else []
    imports += ["import jax", *(["import jax.numpy as jnp"] if split or settings.precision else []), "import optax"]
    blocks = ["\n".join([*head, *imports])]
    if settings.precision:
        blocks.append(snippets.JAX_NARROW)
    if split:
        blocks.append(_part_size(plan))
    blocks.append(snippets.JAX_IN_PARTS if split else snippets.JAX_WHOLE)
    blocks.append(("@partial(jax.jit, donate_argnums=(0, 1))" if settings.donate else "@jax.jit") + snippets.JAX_STEP)
    return "\n\n\n".join(blocks) + "\n"
