"""What a graph that runs holds: operators, buffers with a count of their users, lists of tensors, frames of loops."""

import math
from dataclasses import dataclass, field
from typing import Any, final

Shape = tuple[int, ...]

_LIST_ARITHMETIC = frozenset({"ZerosLike", "AddN", "AddV2", "Add"})


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
        self.node = self.last = node
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
    """Hands out buffers and notes when each begins and ends; a tick is an allocation or a free."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.tick = self.live_bytes = self.peak_bytes = 0

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

    def same(self, tensor: Tensor, shape: Shape | None = None) -> Tensor:
        """The memory of a tensor, under another shape if one is given, with one user more."""
        if tensor.buffer is not None:
            tensor.buffer.refs += 1
        return Tensor(tensor.buffer, tensor.shape if shape is None else shape, tensor.item_bytes, tensor.value)

    def release(self, buffer: Buffer | None) -> None:
        """One user less; the last one frees it, and what a list holds with it."""
        if buffer is None:
            return
        buffer.refs -= 1
        if buffer.refs:
            return
        for item in buffer.items or ():
            self.release(item.buffer)
        if buffer.size:
            buffer.end = self.tick
            self.tick += 1
            self.live_bytes -= buffer.size


@final
class Lists:
    """Runs operators of lists, in which loops keep what the backward pass needs (`core/kernels/list_kernels.h`).

    A list is a small object that shares its elements: a copy of it costs nothing but users of them. An element that
    was never set takes nothing; sums take the other one's element in its place.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def outputs(self, number: int, node: Node, inputs: list[Tensor]) -> list[Tensor | None] | None:
        """What an operator makes; None if it has nothing to do with lists."""
        op, memory = node.op, self._memory
        if op in ("EmptyTensorList", "TensorListReserve"):
            is_sized = op == "TensorListReserve" and inputs[1].value is not None
            return [self._list(number, [Tensor(None, (), 0) for _ in range(int(inputs[1].value) if is_sized else 0)])]
        if op == "TensorListFromTensor":
            # Each element is a copy, aligned or not.
            shape = inputs[0].shape
            parts = [memory.make(shape[1:], inputs[0].item_bytes, number) for _ in range(shape[0] if shape else 0)]
            return [self._list(number, parts)]
        if op == "TensorListPopBack":
            changed, items = self._own(inputs[0].buffer, number)
            last = items.pop() if items else Tensor(None, (), 0)
            if last.buffer is None:
                last = memory.make(node.shapes[1] or (), node.item_bytes[1], number)
            return [Tensor(changed, (), node.item_bytes[0]), last]
        if op in ("TensorListPushBack", "TensorListSetItem"):
            changed, items = self._own(inputs[0].buffer, number)
            pushed = op == "TensorListPushBack"
            kept = memory.same(inputs[1] if pushed else inputs[2])
            place = None if pushed or inputs[1].value is None else int(inputs[1].value)
            if place is None or not 0 <= place < len(items):
                items.append(kept)
            else:
                memory.release(items[place].buffer)
                items[place] = kept
            return [Tensor(changed, (), 0)]
        if op.startswith("TensorList"):
            return self._read(number, node, inputs)
        source = inputs[0].buffer if op in _LIST_ARITHMETIC and inputs else None
        if source is None or source.items is None:
            return None
        if op != "ZerosLike":
            return [self._sum(number, inputs)]
        zeros = (
            item if item.buffer is None else memory.make(item.shape, item.item_bytes, number) for item in source.items
        )
        return [self._list(number, list(zeros))]

    def _list(self, number: int, items: list[Tensor]) -> Tensor:
        made = Buffer(0, number, self._memory.tick)
        made.items = items
        return Tensor(made, (), 0)

    def _own(self, source: Buffer | None, number: int) -> tuple[Buffer, list[Tensor]]:
        """A list that may be changed: the given one if nobody else holds it, else a copy with the same elements."""
        if source is not None and source.refs == 1:
            source.refs += 1
            assert source.items is not None
            return source, source.items
        made = Buffer(0, number, self._memory.tick)
        made.items = [] if source is None or source.items is None else list(map(self._memory.same, source.items))
        return made, made.items

    def _sum(self, number: int, inputs: list[Tensor]) -> Tensor:
        """Element by element; where only one of two is set, it is the sum."""
        first, *others = (tensor.buffer.items or [] for tensor in inputs if tensor.buffer is not None)
        total = list(map(self._memory.same, first))
        for items in others:
            for place, (item, other) in enumerate(zip(total, items, strict=False)):
                if other.buffer is None:
                    continue
                if item.buffer is None:
                    total[place] = self._memory.same(other)
                else:
                    total[place] = self._memory.make(item.shape, item.item_bytes, number)
                    self._memory.release(item.buffer)
        return self._list(number, total)

    def _read(self, number: int, node: Node, inputs: list[Tensor]) -> list[Tensor | None]:
        source = inputs[0].buffer if inputs else None
        items = [] if source is None or source.items is None else source.items
        element = next((item.shape for item in items if item.buffer is not None), ())
        known = node.shapes[0] if node.shapes else None
        if node.op == "TensorListLength":
            length = self._memory.make((), 4, number)
            length.value = len(items)
            return [length]
        if node.op.startswith("TensorListConcat"):
            # All elements end to end, and how long each was.
            rows = sum(item.shape[0] for item in items if item.shape)
            whole = (rows, *element[1:]) if known is None else known
            lengths = self._memory.make((len(items),), node.item_bytes[1], number) if len(node.item_bytes) > 1 else None
            return [self._memory.make(whole, node.item_bytes[0], number), lengths]
        if node.op == "TensorListGetItem":
            place = None if inputs[1].value is None else int(inputs[1].value)
            if place is not None and 0 <= place < len(items) and items[place].buffer is not None:
                return [self._memory.same(items[place])]
            known = element if known is None else known
        elif node.op == "TensorListStack" and known is None:
            known = (len(items), *element)
        item_bytes = node.item_bytes[0] if node.item_bytes else 0
        return [self._memory.make(() if known is None else known, item_bytes, number)]


@final
class Iteration:
    """One iteration of a loop, or the whole graph: inputs that have arrived and how many are still missing."""

    __slots__ = ("frame", "inputs", "missing", "num_active", "num_frames", "number")

    def __init__(self, frame: "LoopFrame", number: int) -> None:
        self.frame = frame
        self.number = number
        # Both by the number of the operator that waits; missing: [edges to come, dead ones among those that came].
        self.inputs: dict[int, list[Tensor | None]] = {}
        self.missing: dict[int, list[int]] = {}
        # Operators that are ready or run, and loops inside of it that run.
        self.num_active = self.num_frames = 0


@final
class LoopFrame:
    """A loop that runs, as in `tensorflow/core/common_runtime/propagator_state.h`; None is the parent of a graph.

    An iteration may begin before those in front of it have ended, as soon as its inputs are there, but only `limit` run
    at once. What arrives for a later one waits. A frame is done when its last iteration is; only then does it let go of
    what all iterations share.
    """

    __slots__ = (
        "constants", "dead_exits", "iterations", "limit", "name", "num_done", "num_entries", "parent", "waiting"
    )  # fmt: skip

    def __init__(self, parent: Iteration | None, name: str = "", num_entries: int = 0, limit: int = 1) -> None:
        self.parent = parent
        self.name = name
        self.num_entries = num_entries
        self.limit = max(1, limit)
        self.iterations: list[Iteration] = [Iteration(self, 0)]
        self.num_done = 0
        # What all iterations get, what waits for an iteration that may not begin yet, and ways out not taken.
        self.constants: list[tuple[int, Tensor]] = []
        self.waiting: list[tuple[int, Tensor]] = []
        self.dead_exits: list[int] = []

    @property
    def is_full(self) -> bool:
        """Whether another iteration must wait."""
        return len(self.iterations) - self.num_done >= self.limit

    @property
    def is_done(self) -> bool:
        """Whether no iteration runs any more."""
        return self.num_done == len(self.iterations) and not self.num_entries

    def following(self) -> Iteration:
        """Begins another iteration."""
        later = Iteration(self, len(self.iterations))
        self.iterations.append(later)
        self.dead_exits.clear()
        return later

    def ended(self) -> Iteration | None:
        """The oldest iteration, if it has come to its end since; it doesn't count any longer."""
        if self.num_done == len(self.iterations):
            return None
        oldest = self.iterations[self.num_done]
        if oldest.num_active or oldest.num_frames or (oldest.number == 0 and self.num_entries):
            return None
        self.num_done += 1
        return oldest
