"""The operators of a graph with their edges, and what they hold: buffers with a count of their users, and tensors."""

import math
from dataclasses import dataclass, field
from typing import Any, final

Shape = tuple[int, ...]


@dataclass(slots=True)
class Node:
    """An operator of the graph."""

    name: str
    op: str
    definition: Any  # all its attributes
    inputs: list[tuple[int, int]] = field(default_factory=list)  # (number of the producer, output)
    controls: list[int] = field(default_factory=list)  # must have run before
    shapes: list[Shape | None] = field(default_factory=list)  # None: only the run tells
    item_bytes: list[int] = field(default_factory=list)  # 0: lies elsewhere (handles, lists)
    value: Any = None  # of a small constant


@dataclass(slots=True)
class Graph:
    """Operators and their consumers."""

    nodes: list[Node]
    consumers: list[list[tuple[int, int, int]]]  # of each node: (output, number of the consumer, input)
    control_consumers: list[list[int]]  # those that wait for each node
    results: list[tuple[int, int]]  # (node, output) of what the function returns
    arguments: dict[str, int]  # node by which an argument of this name enters
    roots: list[int]  # what waits for nothing: constants, the batch, then variables


def tensor_bytes(shape: Shape, item_bytes: int) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * item_bytes


@final
class Buffer:
    """Memory with a count of its users; made by operator number `node`, -1 of what was there before."""

    __slots__ = ("end", "items", "last", "node", "refs", "size", "start", "variable")

    def __init__(self, size: int, node: int, start: int, variable: str = "") -> None:
        self.size = size
        self.node = node
        self.last = node
        self.refs = 1
        self.start = start
        self.end: int | None = None
        self.items: list[Tensor] | None = None
        self.variable = variable


@final
class Tensor:
    """A buffer seen under a shape; with the value where it is small and known."""

    __slots__ = ("buffer", "item_bytes", "shape", "value")

    def __init__(self, buffer: Buffer | None, shape: Shape, item_bytes: int, value: Any = None) -> None:
        self.buffer = buffer
        self.shape = shape
        self.item_bytes = item_bytes
        self.value = value


@final
class Memory:
    """Hands out buffers and notes when each begins and ends."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.tick = 0
        self.live_bytes = 0
        self.peak_bytes = 0

    def allocate(self, size: int, node: int, variable: str = "") -> Buffer:
        """A buffer with one user."""
        buffer = Buffer(size, node, self.tick, variable)
        if size:
            self.tick += 1
            self.buffers.append(buffer)
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return buffer

    def make(self, shape: Shape, item_bytes: int, node: int) -> Tensor:
        """A tensor with memory of its own."""
        return Tensor(self.allocate(tensor_bytes(shape, item_bytes), node), shape, item_bytes)

    def same(self, tensor: Tensor, shape: Shape) -> Tensor:
        """The memory of a tensor under another shape, with one user more."""
        if tensor.buffer is not None:
            tensor.buffer.refs += 1
        return Tensor(tensor.buffer, shape, tensor.item_bytes, tensor.value)

    def release(self, buffer: Buffer | None) -> None:
        """One user less; the last one frees it, and what a list holds with it."""
        if buffer is None:
            return
        buffer.refs -= 1
        if buffer.refs:
            return
        if buffer.items is not None:
            for item in buffer.items:
                self.release(item.buffer)
        if buffer.size:
            buffer.end = self.tick
            self.tick += 1
            self.live_bytes -= buffer.size
