"""Which layer and which part of the step an operator belongs to, from its name.

Layers of Keras open a scope of their name, and TensorFlow adds a number where the scope exists already: the operators
of the layer "conv2d" may stand under "conv2d_1" while those of the layer "conv2d_1" stand under "conv2d_1_2".
"""

import re
from collections.abc import Iterable
from typing import final

from memfit.core.timeline import Phase

_NUMBERED = re.compile(r"(.*)_\d+")
_BACKWARD = ("gradient_tape/", "gradients/")
# A tape adds up the gradients of what is used more than once outside of all scopes.
_SUM = re.compile(r"AddN(?:_\d+)?")


def phase_of(name: str, optimizers: Iterable[str] = ()) -> Phase:
    """The part of the step that an operator runs in, from its name; optimizers have scopes of their own."""
    if any(scope in name for scope in _BACKWARD) or _SUM.fullmatch(name):
        return Phase.BACKWARD
    first = name.partition("/")[0]
    numbered = _NUMBERED.fullmatch(first)
    scopes = {first, numbered[1] if numbered else first}
    return Phase.FORWARD if scopes.isdisjoint(optimizers) else Phase.OPTIMIZER


@final
class Scopes:
    """Finds layers, given as dotted paths, by the scopes of operators."""

    def __init__(self, layers: Iterable[str], names: Iterable[str]) -> None:
        self._children: dict[str, set[str]] = {}
        for path in layers:
            parent, _, name = path.rpartition(".")
            self._children.setdefault(parent, set()).add(name)
        self._seen = {part for name in names for part in name.split("/")}
        self._numbered = {match[1] for match in map(_NUMBERED.fullmatch, self._seen) if match}
        self._found: dict[str, str] = {}

    def module_of(self, name: str) -> str:
        """The dotted path of the innermost layer around an operator, "" outside of all."""
        scope = name.rpartition("/")[0]
        if scope not in self._found:
            path = ""
            for part in scope.split("/"):
                child = self._child(path, part)
                if child:
                    path = f"{path}.{child}" if path else child
            self._found[scope] = path
        return self._found[scope]

    def _child(self, parent: str, part: str) -> str:
        children = self._children.get(parent)
        if not children:
            return ""
        match = _NUMBERED.fullmatch(part)
        stripped = match[1] if match and match[1] in children else ""
        if part not in children:
            return stripped
        # Both are layers: where the one of this very name has a numbered scope, this one is of the other.
        return stripped if stripped and part in self._numbered else part
