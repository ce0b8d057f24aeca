"""Which layer an operator belongs to, by the scopes in its name."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import final

from memfit.core.timeline import Block, Phase, Timeline

NUMBERED = re.compile(r"(.*)_\d+")
"""A name that TensorFlow has made unlike others."""


@final
class LayerScopes:
    """Finds layers, given as dotted paths, by the scopes of operators.

    Layers of Keras open a scope of their name; other scopes may lie around and between them. TensorFlow adds a number
    where the scope exists already: the operators of the layer "conv2d" may stand under "conv2d_1" while those of the
    layer "conv2d_1" stand under "conv2d_1_2".
    """

    def __init__(self, layers: Iterable[str], names: Iterable[str]) -> None:
        self._children: dict[str, set[str]] = {}
        for path in layers:
            parent, _, name = path.rpartition(".")
            self._children.setdefault(parent, set()).add(name)
        seen = {part for name in names for part in name.split("/")}
        self._numbered = {match[1] for match in map(NUMBERED.fullmatch, seen) if match}
        self._modules: dict[str, str] = {}

    def module_of(self, name: str) -> str:
        """The dotted path of the innermost layer around an operator, "" outside of all."""
        scope = name.rpartition("/")[0]
        if scope not in self._modules:
            path = ""
            for part in scope.split("/"):
                children = self._children.get(path, set())
                match = NUMBERED.fullmatch(part)
                child = match[1] if match and match[1] in children else ""
                # Both may be layers: where the one of this very name has a numbered scope, this one is of the other.
                if part in children and not (child and part in self._numbered):
                    child = part
                path = f"{path}.{child}".lstrip(".") if child else path
            self._modules[scope] = path
        return self._modules[scope]


def with_layers(timeline: Timeline, layers: Sequence[str]) -> Timeline:
    """The timeline of a program of XLA, whose blocks know dotted scopes, with layers in their place.

    What was there before the program, and what keeps its place, is known already.
    """
    known = {block.module for block in timeline.blocks if block.phase is Phase.SETUP}
    scopes = LayerScopes(layers, {block.module.replace(".", "/") for block in timeline.blocks})

    def named(block: Block) -> Block:
        if block.module in known:
            return block
        return replace(block, module=scopes.module_of(block.module.replace(".", "/") + "/"))

    return Timeline(tuple(map(named, timeline.blocks)), timeline.num_ticks, timeline.marks)
