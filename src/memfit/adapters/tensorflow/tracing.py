"""The memory of a TensorFlow step, from its graph: nothing is computed.

A step that XLA compiles is laid out by XLA; any other one runs operator by operator, with a tensor for each.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memfit.adapters.tensorflow.graph import graph_of, item_bytes
from memfit.adapters.tensorflow.liveness import Buffer, Executor, Lived
from memfit.adapters.tensorflow.nodes import Graph, tensor_bytes
from memfit.core.estimate import Note
from memfit.core.timeline import Block, Category, Mark, Phase, Timeline


@dataclass(frozen=True, slots=True)
class StepVariable:
    """A variable that lives as long as the model.

    Args:
        variable: the `tf.Variable`.
        category: what it is for.
        module: dotted path of its layer.
    """

    variable: Any
    category: Category
    module: str = ""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """What a step asks for.

    Args:
        timeline: every allocation; variables and the batch are there from the first tick on.
        notes: what had to be assumed.
        assigned_bytes: what XLA laid out for the whole step, variables and batch included; None without XLA.
    """

    timeline: Timeline
    notes: tuple[Note, ...] = ()
    assigned_bytes: int | None = None


def trace_step(
    function: Any,
    variables: Iterable[StepVariable],
    *,
    jit_compile: bool = False,
    on_gpu: bool = False,
    optimizer: str = "",
    layers: Sequence[str] = (),
) -> TracedStep:
    """The memory of one call of a function.

    Args:
        function: a `ConcreteFunction` of the whole training step, traced for TensorSpecs of concrete shapes.
        variables: all that the model, its optimizer and its metrics hold, used by the function or not.
        jit_compile: whether XLA compiles it.
        on_gpu: whether it runs on a GPU.
        optimizer: the optimizer's name, which is the scope of its operators.
        layers: dotted paths of layers as reports name them; scopes of operators are matched to them.
    """
    known = list(variables)
    graph = graph_of(function, on_gpu=on_gpu)
    held = _held(function, graph, known)
    executor = Executor(graph, held, num_threads=_num_threads(), on_gpu=on_gpu, onednn=_onednn())
    lived = executor.run()
    return TracedStep(_timeline(graph, lived, known, optimizer, layers))


def _num_threads() -> int:
    """Threads that run operators, as TensorFlow counts them."""
    return tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count() or 1


def _onednn() -> bool:
    return os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1") not in ("0", "false")


def _held(function: Any, graph: Graph, variables: list[StepVariable]) -> dict[int, tuple[int, str]]:
    """(bytes, name) of what each argument of the graph holds, from the number of its node."""
    numbers = {id(entry.variable.handle): number for number, entry in enumerate(variables)}
    captured = {id(inner): outer for outer, inner in function.graph.captures}
    held = {}
    for tensor in function.graph.inputs:
        place = graph.arguments.get(tensor.op.name)
        outer = captured.get(id(tensor))
        if outer is not None and id(outer) in numbers:
            number = numbers.pop(id(outer))
            if place is not None:
                variable = variables[number].variable
                held[place] = (tensor_bytes(tuple(variable.shape), item_bytes(variable.dtype)), f"variable {number}")
        elif place is not None and outer is None and tensor.dtype != tf.resource:
            held[place] = (tensor_bytes(tuple(tensor.shape), item_bytes(tensor.dtype)), f"batch {tensor.op.name}")
    for index, number in enumerate(sorted(numbers.values())):
        variable = variables[number].variable
        held[-1 - index] = (tensor_bytes(tuple(variable.shape), item_bytes(variable.dtype)), f"variable {number}")
    return held


def _phase(name: str, optimizer: str) -> Phase:
    if "gradient_tape/" in name or name.startswith("gradients/"):
        return Phase.BACKWARD
    return Phase.OPTIMIZER if optimizer and name.startswith(f"{optimizer}/") else Phase.FORWARD


def _timeline(
    graph: Graph, lived: Lived, variables: list[StepVariable], optimizer: str, layers: Sequence[str]
) -> Timeline:
    phases = [_phase(node.name, optimizer) for node in graph.nodes]
    firsts = {phase: lived.num_ticks for phase in Phase}
    largest = max((b.size for b in lived.buffers if b.node >= 0), default=0)
    for buffer in lived.buffers:
        phase = phases[buffer.node] if buffer.node >= 0 else Phase.SETUP
        if phase is not Phase.FORWARD and (phase is not Phase.BACKWARD or buffer.size * 100 >= largest):
            firsts[phase] = min(firsts[phase], buffer.start)
    blocks = []
    for buffer in lived.buffers:
        category, module, phase = _described(buffer, graph, phases, firsts[Phase.BACKWARD], variables)
        op = graph.nodes[buffer.node].op if buffer.node >= 0 else ""
        blocks.append(Block(buffer.size, buffer.start, buffer.end, category, phase, module, op))
    return Timeline(tuple(blocks), lived.num_ticks, (Mark(0, Phase.SETUP, 0),))


def _described(
    buffer: Buffer, graph: Graph, phases: list[Phase], backward: int, variables: list[StepVariable]
) -> tuple[Category, str, Phase]:
    if buffer.variable.startswith("variable "):
        entry = variables[int(buffer.variable.split()[1])]
        return entry.category, entry.module, Phase.SETUP if buffer.node < 0 else phases[buffer.node]
    if buffer.node < 0:
        return Category.BATCH, "", Phase.SETUP
    phase = phases[buffer.node]
    category = Category.TEMPORARY
    if phase is Phase.FORWARD and (buffer.end is None or buffer.end > backward):
        category = Category.ACTIVATION
    elif phase is Phase.BACKWARD and phases[buffer.last] is Phase.OPTIMIZER:
        category = Category.GRADIENT
    return category, "", phase
