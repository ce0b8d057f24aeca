"""The memory of a TensorFlow step, from its graph: nothing is computed."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from memfit.core.estimate import Note
from memfit.core.timeline import Category, Timeline


@dataclass(frozen=True, slots=True)
class StepVariable:
    """A variable that lives as long as the model.

    Args:
        handle: the `tf.Variable`.
        category: what it is for.
        module: dotted path of its layer.
    """

    handle: Any
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
    layers: Iterable[str] = (),
) -> TracedStep:
    """The memory of one call of a function.

    Args:
        function: a `ConcreteFunction` of the whole training step, traced for TensorSpecs of concrete shapes.
        variables: all that the model, its optimizer and its metrics hold, used by the function or not.
        jit_compile: whether XLA compiles it.
        layers: dotted paths of layers as reports name them; name scopes of operators are matched to them.
    """
    raise NotImplementedError
