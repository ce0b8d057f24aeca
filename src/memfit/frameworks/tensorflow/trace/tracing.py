"""The memory of a TensorFlow step, from its graph: nothing is computed.

A step that XLA compiles is laid out by XLA; any other one runs operator by operator, with a tensor for each.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memfit.core.errors import StepFailed
from memfit.core.estimate import Note
from memfit.core.layer_scopes import NUMBERED, LayerScopes, with_layers
from memfit.core.printing import text_of
from memfit.core.timeline import Block, Category, Mark, Phase, Timeline
from memfit.core.trace import Serving, Trace
from memfit.core.user_code import caller_lines
from memfit.frameworks.tensorflow import internals
from memfit.frameworks.tensorflow.trace.graph import graph_of, item_bytes
from memfit.frameworks.tensorflow.trace.kernels import Inference
from memfit.frameworks.tensorflow.trace.liveness import Executor, Lived
from memfit.frameworks.tensorflow.trace.memory import Buffer, Graph, tensor_bytes
from memfit.frameworks.tensorflow.trace.sources import NodeSources
from memfit.frameworks.xla.liveness import lay_out
from memfit.frameworks.xla.program import XlaProgram, held_before, num_processors, turn_of
from memfit.frameworks.xla.scratch import most_bytes, spread_of

_VARIABLE = "variable "
_ZEROS = frozenset({"Const", "Fill", "ZerosLike"})
# How often a step is gone through once more, with operators that take a little more or less time, and how many
# operators may run for that: a second's worth.
_MOST_ORDERS = 9
_MOST_RUNS = 100_000
_PARALLEL = "TensorFlow runs operators in parallel: which of them overlap varies by step, and so does the peak"
_LIBRARIES = Note("libraries", "workspaces of cuDNN aren't counted")
_STAND_IN = Note(
    "xla-cpu-layout", "XLA compiled the step for the host: its program for a GPU fuses and orders differently"
)
_BACKWARD = ("gradient_tape/", "gradients/")
# A tape adds up the gradients of what is used more than once outside of all scopes.
_SUM = re.compile(r"AddN(?:_\d+)?")


class XlaRefused(StepFailed):
    """XLA can't compile a step."""


@dataclass(frozen=True, slots=True)
class StepVariable:
    """A variable that lives as long as the model."""

    variable: Any
    category: Category
    module: str = ""


def trace_step(
    function: Any,
    variables: Iterable[StepVariable],
    *,
    jit_compile: bool = False,
    on_gpu: bool = False,
    optimizers: Sequence[str] = (),
    layers: Sequence[str] = (),
) -> Trace:
    """The memory of one call of a function; sizes of parameters and batch are left at 0.

    Args:
        function: a `ConcreteFunction` of the whole training step, traced for TensorSpecs of concrete shapes.
        variables: all that the model, its optimizer and its metrics hold, used by the function or not.
        jit_compile: whether XLA compiles it.
        on_gpu: whether it runs on a GPU.
        optimizers: their names, which are the scopes of their operators.
        layers: dotted paths of layers as reports name them; scopes of operators are matched to them.
    """
    known = list(variables)
    sources = NodeSources(function.graph, caller_lines())
    if jit_compile:
        return _compiled(function, known, optimizers, layers, sources, on_gpu=on_gpu)
    graph = graph_of(function, on_gpu=on_gpu)
    held = _held(function, graph, known)
    given: dict[str, Any] = {
        # As many as TensorFlow has for operators.
        "num_threads": tf.config.threading.get_inter_op_parallelism_threads() or num_processors(),
        "on_gpu": on_gpu,
        "inference": Inference(),
    }
    lived = Executor(graph, held, **given).run()
    num_orders = 0 if on_gpu else min(_MOST_ORDERS, _MOST_RUNS // max(1, lived.num_runs))
    others = (Executor(graph, held, **given, seed=seed).run() for seed in range(1, num_orders + 1))
    peaks = [lived.peak_bytes, *(one.peak_bytes for one in others)]
    notes = [Note("order", f"{_PARALLEL}; the bounds are those of {len(peaks)} orders" if num_orders else _PARALLEL)]
    if on_gpu:
        notes.append(_LIBRARIES)
    if lived.guessed:
        names = ", ".join(lived.guessed[:3])
        notes.append(Note("branch", f"only the run decides which branch is taken at {names}: the first one is counted"))
    spread = min(peaks) / max(1, lived.peak_bytes), max(peaks) / max(1, lived.peak_bytes)
    timeline = _timeline(graph, lived, known, optimizers, layers, sources)
    return Trace(timeline, tuple(notes), 0, 0, 0, serving=Serving.BEST_FIT, spread=spread)


def _captured(function: Any) -> dict[int, Any]:
    """The handle outside of the function from the id of each of its inputs that isn't an argument."""
    return {id(inner): outer for outer, inner in function.graph.captures}


def _held(function: Any, graph: Graph, variables: list[StepVariable]) -> dict[int, tuple[int, str]]:
    """(bytes, name) of what each argument of the graph holds, from the number of its node."""
    numbers = {id(entry.variable.handle): number for number, entry in enumerate(variables)}
    captured = _captured(function)
    held = {}
    for tensor in function.graph.inputs:
        place = graph.arguments.get(tensor.op.name)
        outer = captured.get(id(tensor))
        if place is None:
            continue
        if outer is not None and id(outer) in numbers:
            number = numbers.pop(id(outer))
            held[place] = (_variable_bytes(variables[number]), f"{_VARIABLE}{number}")
        elif tensor.dtype != tf.resource:
            size = tensor_bytes(tuple(tensor.shape), item_bytes(tensor.dtype))
            held[place] = (size, f"batch {tensor.op.name}")
    for index, number in enumerate(sorted(numbers.values())):
        held[-1 - index] = (_variable_bytes(variables[number]), f"{_VARIABLE}{number}")
    return held


def _variable_bytes(entry: StepVariable) -> int:
    return tensor_bytes(tuple(entry.variable.shape), item_bytes(entry.variable.dtype))


def _compiled(
    function: Any,
    variables: list[StepVariable],
    optimizers: Sequence[str],
    layers: Sequence[str],
    sources: NodeSources,
    *,
    on_gpu: bool,
) -> Trace:
    """What XLA lays out for the whole step."""
    by_handle = {id(entry.variable.handle): entry for entry in variables}
    captured = _captured(function)
    # XLA's arguments are the function's inputs in their order, variables by their values.
    inputs = [by_handle.get(id(captured.get(id(tensor)))) for tensor in function.inputs]

    def describe(number: int) -> tuple[Category, str]:
        entry = inputs[number] if number < len(inputs) else None
        return (Category.BATCH, "") if entry is None else (entry.category, entry.module)

    try:
        compiled = internals.compiled_text(function)
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise XlaRefused(
            f"XLA can't compile the step: {text_of(error)[:500]} Compile the model with jit_compile=False where it "
            "can't."
        ) from error
    program = XlaProgram(compiled)
    layout = lay_out(program.lives)
    # As many threads as TensorFlow gives to one program of XLA's.
    num_threads = tf.config.threading.get_intra_op_parallelism_threads() or num_processors()
    scratch = () if on_gpu else program.scratch(num_threads)

    def phase(name: str) -> Phase | None:
        return phase_of(name, optimizers) if name and not name.startswith("XLA_") else None

    # The stacks that TensorFlow gives to XLA end in TensorFlow.
    timeline = program.timeline(
        describe, scratch=scratch, phase_of=phase, source_of=lambda name, _: sources.of(name) if name else ""
    )
    used = {id(entry) for entry in inputs if entry is not None}
    # Those that the step doesn't touch live all the same.
    rest = [entry for entry in variables if id(entry) not in used and _variable_bytes(entry)]
    untouched = [(_variable_bytes(entry), entry.category, entry.module) for entry in rest]
    timeline = held_before(with_layers(timeline, layers), untouched)
    held = layout.constant_bytes + sum(_variable_bytes(entry) for entry in rest)
    total = layout.total_bytes + held + most_bytes(scratch)
    notes, spread = ((_STAND_IN,), (1.0, 1.0)) if on_gpu else ((), spread_of(total, scratch))
    return Trace(timeline, notes, 0, 0, 0, serving=Serving.BEST_FIT, assigned_bytes=total, spread=spread)


def _timeline(
    graph: Graph,
    lived: Lived,
    variables: list[StepVariable],
    optimizers: Sequence[str],
    layers: Sequence[str],
    sources: NodeSources,
) -> Timeline:
    """Blocks with what they are for."""
    names = [node.name for node in graph.nodes]
    scopes = LayerScopes(layers, names)
    phases = [phase_of(name, optimizers) for name in names]
    marks = _marks(lived, phases)
    # Without a backward pass nothing is kept for it.
    backward = next((mark.tick for mark in marks if mark.phase is Phase.BACKWARD), None)
    blocks = []
    for buffer in lived.buffers:
        op, phase, category, module, source = "", Phase.SETUP, Category.BATCH, "", ""
        if buffer.node >= 0:
            op, phase = graph.nodes[buffer.node].op, phases[buffer.node]
            category, module = _category(buffer, op, phases, backward), scopes.module_of(names[buffer.node])
            source = sources.of(names[buffer.node])
        if buffer.variable.startswith(_VARIABLE):
            entry = variables[int(buffer.variable.removeprefix(_VARIABLE))]
            category, module = entry.category, entry.module
        blocks.append(Block(buffer.size, buffer.start, buffer.end, category, phase, module, op, source))
    return Timeline(tuple(blocks), lived.num_ticks, marks)


def _category(buffer: Buffer, op: str, phases: list[Phase], backward: int | None) -> Category:
    if backward is None:
        return Category.TEMPORARY
    phase = phases[buffer.node]
    # Parts of the backward pass that need nothing of it run ahead, and keep what they make until it comes.
    is_ahead = phase is Phase.BACKWARD and buffer.start < backward and op not in _ZEROS
    if (phase is Phase.FORWARD or is_ahead) and (buffer.end is None or buffer.end > backward):
        return Category.ACTIVATION
    if phase is Phase.BACKWARD and phases[buffer.last] is Phase.OPTIMIZER:
        return Category.GRADIENT
    return Category.TEMPORARY


def _marks(lived: Lived, phases: list[Phase]) -> tuple[Mark, ...]:
    """Where phases begin; operators of several run at once."""
    made = sorted((buffer for buffer in lived.buffers if buffer.node >= 0), key=lambda buffer: buffer.start)
    if not made:
        return ()
    marks = [Mark(made[0].start, Phase.FORWARD, 1)]
    turn = turn_of((phases[buffer.node], buffer.size) for buffer in made)
    backward = [buffer.start for buffer in made[turn:] if phases[buffer.node] is Phase.BACKWARD]
    if backward:
        marks.append(Mark(min(backward), Phase.BACKWARD, 1))
        after = [b.start for b in made if phases[b.node] is Phase.OPTIMIZER and b.start > max(backward)]
        if after:
            marks.append(Mark(min(after), Phase.OPTIMIZER, 1))
    return tuple(marks)


def phase_of(name: str, optimizers: Iterable[str] = ()) -> Phase:
    """The part of the step that an operator runs in, from its name; optimizers have scopes of their own."""
    if any(scope in name for scope in _BACKWARD) or _SUM.fullmatch(name):
        return Phase.BACKWARD
    first = name.partition("/")[0]
    numbered = NUMBERED.fullmatch(first)
    scopes = {first, numbered[1] if numbered else first}
    return Phase.FORWARD if scopes.isdisjoint(optimizers) else Phase.OPTIMIZER
