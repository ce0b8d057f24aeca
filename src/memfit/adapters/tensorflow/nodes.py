"""The operators of a graph and their edges, whichever way they were found."""

import math
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]


@dataclass(slots=True)
class Node:
    """An operator of the graph.

    Args:
        name: its name, with scopes.
        op: its type.
        definition: all its attributes.
        inputs: (number of the producing node, which of its outputs).
        controls: numbers of nodes that must have run before.
        shapes: of its outputs; None where only the run itself tells.
        item_bytes: of one element of each output; 0 of what lies elsewhere: handles of variables, lists.
        value: what a small constant holds.
    """

    name: str
    op: str
    definition: Any
    inputs: list[tuple[int, int]] = field(default_factory=list)
    controls: list[int] = field(default_factory=list)
    shapes: list[Shape | None] = field(default_factory=list)
    item_bytes: list[int] = field(default_factory=list)
    value: Any = None


@dataclass(slots=True)
class Graph:
    """Operators and their consumers.

    Args:
        nodes: in the order of the optimized graph.
        consumers: for each node (output, number of the consumer, which of its inputs).
        control_consumers: for each node those that wait for it.
        results: (node, output) of what the function returns.
        arguments: number of the node by which an argument of the function enters, from the argument's name.
        roots: what waits for nothing: constants, the batch, then variables.
    """

    nodes: list[Node]
    consumers: list[list[tuple[int, int, int]]]
    control_consumers: list[list[int]]
    results: list[tuple[int, int]]
    arguments: dict[str, int]
    roots: list[int]


def tensor_bytes(shape: Shape, item_bytes: int) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * item_bytes
