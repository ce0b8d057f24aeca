"""Which line of the user's code each operator of a graph comes from.

TensorFlow keeps the Python stack of every operator that is put into a graph. The optimizer, and XLA, know names alone:
what they inline of a function or a loop has the name of the call in front of its own, and what the optimizer fuses has
the name of the last part. Operators of the backward pass were made where the gradient was asked for; the scope that a
tape opens around them names the operator of the forward pass.
"""

import re
from collections.abc import Iterable
from typing import Any, final

from memfit.core.user_code import SourceNames
from memfit.frameworks.tensorflow import internals

# Where a loop or a branch was inlined: "while/body/_7/while/add" is the operator "while/add" of the call "while".
_INLINED = re.compile(r"/(?:body|cond|then|else|branch)/_\d+(?=/)")
_BACKWARD = re.compile(r".*(?:gradient_tape|gradients)/")
_OF_GRADIENT = re.compile(r"_grad$|Grad(?:_\d+)?$")


@final
class NodeSources:
    """The sources of one traced function, by the names of operators.

    Args:
        graph: of the function, before any optimization.
        callers: (file, line) of what asked for the trace, which is on the stack of every operator and no part of it.
    """

    def __init__(self, graph: Any, callers: Iterable[tuple[str, int]] = ()) -> None:
        self._callers = frozenset(callers)
        self._operations: dict[str, Any] = {}
        self._known: dict[str, str] = {}
        self._names = SourceNames()
        self._note(graph, "")

    def _note(self, graph: Any, prefix: str) -> None:
        for operation in graph.get_operations():
            name = f"{prefix}{operation.name}"
            self._operations[name] = operation
            for inner in internals.graphs_called_by(operation):
                self._note(inner, f"{name}/")

    def of(self, name: str) -> str:
        """The innermost line of the user's for an operator, as "net.py:31", or "" where no line of it is."""
        if name not in self._known:
            plain = _INLINED.sub("", name)
            forward = _BACKWARD.sub("", plain)
            self._known[name] = (self._nearest_line(forward) if forward != plain else "") or self._nearest_line(plain)
        return self._known[name]

    def _nearest_line(self, name: str) -> str:
        """The line of an operator, of the one whose gradient it is, or of what calls it: saved functions have none."""
        while name:
            of_operator = _OF_GRADIENT.sub("", name)
            # Several of a kind in one scope can't be told apart: their gradients are made in another order.
            if f"{of_operator}_1" not in self._operations and (line := self._line(of_operator)):
                return line
            if line := self._line(name):
                return line
            name = name.rpartition("/")[0]
        return ""

    def _line(self, name: str) -> str:
        operation = self._operations.get(name)
        if operation is None:
            return ""
        stack = [(frame.filename, frame.lineno) for frame in reversed(operation.traceback or ())]
        return self._names.innermost(stack, self._callers)
