"""When each tensor of a graph is made and freed: TensorFlow's executor, played through without computing anything.

The executor keeps a count of users for every buffer. A tensor goes when the last of its consumers has run; a kernel
may write over an input that it alone still holds. So memory depends on the order in which operators run, which is
that of the executor's queues: what becomes ready is taken up by the thread that made it so if it is cheap; of several
expensive operators one is, and the others wait in the thread's queue, newest first, until it or another thread, which
takes the oldest, has time.

Loops run as TensorFlow runs them, an iteration at a time, with lists that hold what the forward pass keeps; the
integers that end them are followed.
"""

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from memfit.adapters.tensorflow.kernels import (
    ALIASES,
    INEXPENSIVE,
    forwarded,
    hidden_bytes,
    output_shape,
    scratch_bytes,
    seconds_of,
    values_of,
)
from memfit.adapters.tensorflow.nodes import Graph, Node, Shape, tensor_bytes
from memfit.core.errors import StepFailed


@final
class Buffer:
    """Memory with a count of its users.

    Args:
        size: bytes.
        node: number of the operator that made it; -1 of what was there before.
    """

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
class Iteration:
    """One iteration of a loop, or the whole graph: inputs that have arrived and how many are still missing."""

    __slots__ = ("frame", "inputs", "missing", "number")

    def __init__(self, frame: "Frame", number: int) -> None:
        self.frame = frame
        self.number = number
        self.inputs: dict[int, list[Tensor | None]] = {}
        # Consumer -> (edges still to come, whether one of them was dead).
        self.missing: dict[int, list[int]] = {}


@final
class Frame:
    """A loop that runs."""

    __slots__ = ("constants", "iterations", "parent")

    def __init__(self, parent: Iteration | None) -> None:
        self.parent = parent
        self.iterations: list[Iteration] = [Iteration(self, 0)]
        self.constants: list[tuple[int, Tensor]] = []


@dataclass(frozen=True, slots=True)
class Lived:
    """What a run of a graph asked for.

    Args:
        buffers: everything that took memory, in order of its start.
        num_ticks: allocations and frees.
        guessed: operators whose choice only a real run can know.
    """

    buffers: tuple[Buffer, ...]
    num_ticks: int
    guessed: tuple[str, ...]


_MOST_RUNS = 5_000_000


@final
class Executor:
    """Plays a graph through.

    Args:
        graph: what to run.
        held: bytes of what each argument holds, from the number of its node; variables by their own name.
        num_threads: threads that run operators.
        on_gpu: operators are launched, not waited for, in the order in which they get ready.
        onednn: whether oneDNN's kernels run, on the host.
    """

    def __init__(
        self, graph: Graph, held: Mapping[int, tuple[int, str]], *, num_threads: int, on_gpu: bool, onednn: bool
    ) -> None:
        self._graph = graph
        self._on_gpu = on_gpu
        self._onednn = onednn
        self._tick = 0
        self.buffers: list[Buffer] = []
        self._arguments: dict[int, Buffer] = {}
        self._frames: dict[tuple[int, str], Frame] = {}
        self._hidden: dict[tuple[int, int], Buffer] = {}
        self._guessed: dict[str, None] = {}
        self._num_threads = 1 if on_gpu else max(1, num_threads)
        by_variable: dict[str, Buffer] = {}
        for number, (size, name) in held.items():
            self._arguments[number] = by_variable[name] if name in by_variable else self._allocate(size, -1, name)
            by_variable[name] = self._arguments[number]
        # Variables are replaced by assignments: what holds one now.
        self._variables: dict[int, list[Buffer]] = {}
        slots: dict[str, list[Buffer]] = {}
        for number, (_, name) in held.items():
            self._variables[number] = slots.setdefault(name, [self._arguments[number]])
        self._constants = {
            number: self._allocate(tensor_bytes(node.shapes[0] or (), node.item_bytes[0]), number)
            for number, node in enumerate(graph.nodes)
            if node.op == "Const" and node.item_bytes
        }
        # A variable of which single rows have ever been changed hands out copies, so that readers see one state.
        self._copied_on_read = {
            number
            for node in graph.nodes
            for number, _ in node.inputs[:1]
            if node.op.startswith(("ResourceScatter", "ResourceSparseApply")) and number in self._variables
        }
        # What oneDNN's pooling keeps for its gradient, which in the graph is no output.
        self._pooled = {
            number: made
            for number, node in enumerate(graph.nodes)
            for made, _ in node.inputs
            if node.op == "MaxPoolGrad" and graph.nodes[made].op == "MaxPool"
        }
        self._has_gradient = set() if on_gpu else set(self._pooled.values())
        self._expected = [len(node.inputs) + len(node.controls) for node in graph.nodes]

    # Memory.

    def _allocate(self, size: int, node: int, variable: str = "") -> Buffer:
        buffer = Buffer(size, node, self._tick, variable)
        if size:
            self._tick += 1
            self.buffers.append(buffer)
        return buffer

    def _release(self, buffer: Buffer | None) -> None:
        if buffer is None:
            return
        buffer.refs -= 1
        if buffer.refs:
            return
        if buffer.items is not None:
            for item in buffer.items:
                self._release(item.buffer)
        if buffer.size:
            buffer.end = self._tick
            self._tick += 1

    # The run.

    def run(self) -> Lived:
        """The whole graph, once."""
        graph = self._graph
        root = Frame(None).iterations[0]
        results = set(graph.results)
        self._kept = results
        queues: list[deque[tuple[int, Iteration]]] = [deque() for _ in range(self._num_threads)]
        inline: list[deque[tuple[int, Iteration]]] = [deque() for _ in range(self._num_threads)]
        for number in graph.roots:
            (inline if graph.nodes[number].op == "Const" else queues)[0].appendleft((number, root))
        if self._on_gpu:
            inline[0].extend(reversed(queues[0]))
            queues[0].clear()
        running: list[tuple[float, int, int]] = []
        busy: list[tuple[int, Iteration, Any] | None] = [None] * self._num_threads
        now, serial, runs = 0.0, 0, 0
        while True:
            for thread in range(self._num_threads):
                while busy[thread] is None:
                    task = self._next(thread, inline, queues)
                    if task is None:
                        break
                    number, iteration = task
                    runs += 1
                    if runs > _MOST_RUNS:
                        raise StepFailed(f"a loop of the step didn't end within {_MOST_RUNS} operators.")
                    work = self._start(number, iteration)
                    seconds = self._seconds(number, work)
                    if seconds == 0.0:
                        self._finish(number, iteration, work, thread, inline, queues)
                        continue
                    busy[thread] = (number, iteration, work)
                    serial += 1
                    heapq.heappush(running, (now + seconds, serial, thread))
            if not running:
                break
            now, _, thread = heapq.heappop(running)
            number, iteration, work = busy[thread]  # type: ignore[misc]
            busy[thread] = None
            self._finish(number, iteration, work, thread, inline, queues)
        return Lived(tuple(self.buffers), self._tick, tuple(self._guessed))

    def _next(self, thread: int, inline: Any, queues: Any) -> tuple[int, Iteration] | None:
        if inline[thread]:
            return inline[thread].popleft()  # type: ignore[no-any-return]
        if queues[thread]:
            return queues[thread].popleft()  # type: ignore[no-any-return]
        for other in queues:
            if other:
                return other.pop()  # type: ignore[no-any-return]
        return None

    def _seconds(self, number: int, work: Any) -> float:
        """How long an operator is at work; 0 of one that its thread is done with at once."""
        node = self._graph.nodes[number]
        if self._on_gpu or node.op in INEXPENSIVE or work is None:
            return 0.0
        outputs, inputs, _ = work
        touched = sum(tensor_bytes(t.shape, t.item_bytes) for t in (*outputs, *inputs) if t is not None)
        return seconds_of(node, touched, [tensor.shape for tensor in inputs])

    def _start(self, number: int, iteration: Iteration) -> Any:
        """Takes what a kernel asks for: (outputs, inputs, scratch), or None of an operator on a path not taken."""
        node = self._graph.nodes[number]
        arrived: list[Tensor | None] = iteration.inputs.pop(number, [None] * len(node.inputs))
        missing = iteration.missing.pop(number, None)
        if missing is not None and missing[1] and node.op != "Merge":
            for tensor in arrived:
                if tensor is not None:
                    self._release(tensor.buffer)
            return None
        inputs = [tensor for tensor in arrived if tensor is not None]
        if self._on_gpu or node.op in ALIASES or node.op == "Const":
            scratch = None
        else:
            needed = scratch_bytes(node, [t.shape for t in inputs], onednn=self._onednn)
            scratch = self._allocate(needed, number) if needed else None
        return self._outputs(number, node, inputs, iteration), inputs, scratch

    def _finish(self, number: int, iteration: Iteration, work: Any, thread: int, inline: Any, queues: Any) -> None:
        """Gives back what the kernel no longer needs and hands its outputs on."""
        node = self._graph.nodes[number]
        ready: list[tuple[int, Iteration]] = []
        if work is None:
            self._deliver(number, node, iteration, None, ready)
        else:
            outputs, inputs, scratch = work
            for tensor in inputs:
                if tensor.buffer is not None:
                    tensor.buffer.last = number
                self._release(tensor.buffer)
            if number in self._pooled:
                self._release(self._hidden.pop((self._pooled[number], id(iteration)), None))
            if scratch is not None:
                self._release(scratch)
            self._deliver(number, node, iteration, outputs, ready)
            for port, tensor in enumerate(outputs):
                if tensor is not None and (number, port) not in self._kept:
                    self._release(tensor.buffer)
        self._schedule(ready, inline[thread], queues[thread])

    def _schedule(self, ready: list[tuple[int, Iteration]], inline: Any, queue: Any) -> None:
        """Where what got ready waits (`ExecutorState::ScheduleReady`)."""
        waiting: list[tuple[int, Iteration]] = []
        for task in ready:
            if self._on_gpu or self._graph.nodes[task[0]].op in INEXPENSIVE:
                inline.append(task)
            else:
                waiting.append(task)
        if waiting and not inline:
            inline.append(waiting.pop())
        for task in waiting:
            queue.appendleft(task)

    # Edges, loops and paths that aren't taken.

    def _deliver(
        self, number: int, node: Node, iteration: Iteration, outputs: list[Tensor | None] | None, ready: Any
    ) -> None:
        target: Iteration | None = iteration
        dead = outputs is None
        if node.op == "Enter":
            target = self._entered(number, node, iteration)
            if node.definition.attr["is_constant"].b and outputs is not None:
                frame = target.frame
                tensor = outputs[0]
                assert tensor is not None
                frame.constants.append((number, tensor))
                if tensor.buffer is not None:
                    tensor.buffer.refs += 1
                for later in frame.iterations[1:]:
                    self._pass(number, later, outputs, False, ready)
        elif node.op == "Exit":
            target = None if dead else iteration.frame.parent
        elif node.op == "NextIteration":
            target = None if dead else self._following(iteration, ready)
        if target is not None:
            self._pass(number, target, outputs, dead, ready)

    def _entered(self, number: int, node: Node, iteration: Iteration) -> Iteration:
        key = (id(iteration), node.definition.attr["frame_name"].s.decode())
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = Frame(iteration)
        return frame.iterations[0]

    def _following(self, iteration: Iteration, ready: Any) -> Iteration:
        frame = iteration.frame
        if iteration.number + 1 == len(frame.iterations):
            later = Iteration(frame, iteration.number + 1)
            frame.iterations.append(later)
            for number, tensor in frame.constants:
                self._pass(number, later, [tensor], False, ready)
        return frame.iterations[iteration.number + 1]

    def _pass(
        self, number: int, target: Iteration, outputs: list[Tensor | None] | None, dead: bool, ready: Any
    ) -> None:
        graph = self._graph
        for port, consumer, slot in graph.consumers[number]:
            tensor = None if outputs is None or port >= len(outputs) else outputs[port]
            if tensor is not None:
                if tensor.buffer is not None:
                    tensor.buffer.refs += 1
                arrived = target.inputs.get(consumer)
                if arrived is None:
                    arrived = target.inputs[consumer] = [None] * len(graph.nodes[consumer].inputs)
                arrived[slot] = tensor
            self._arrive(consumer, target, tensor is None, ready)
        for consumer in graph.control_consumers[number]:
            self._arrive(consumer, target, dead, ready, control=True)

    def _arrive(self, consumer: int, target: Iteration, dead: bool, ready: Any, control: bool = False) -> None:
        missing = target.missing.get(consumer)
        node = self._graph.nodes[consumer]
        if node.op == "Merge" and not control:
            # Runs with the first input that is alive; the other one comes in another iteration or never.
            if missing is None:
                missing = target.missing[consumer] = [len(node.controls) + 1, 0]
            if dead:
                missing[1] += 1
                if missing[1] < len(node.inputs) or self._is_loop(node):
                    return
            missing[0] -= 1
        else:
            if missing is None:
                first = len(node.controls) + 1 if node.op == "Merge" else self._expected[consumer]
                missing = target.missing[consumer] = [first, 0]
            missing[0] -= 1
            if dead and not (control and node.op == "Merge"):
                missing[1] += 1
        if missing[0] == 0:
            ready.append((consumer, target))

    def _is_loop(self, node: Node) -> bool:
        return any(self._graph.nodes[number].op == "NextIteration" for number, _ in node.inputs)

    # Kernels.

    def _outputs(self, number: int, node: Node, inputs: list[Tensor], iteration: Iteration) -> list[Tensor | None]:
        op = node.op
        if op in ("Placeholder", "_Arg", "VarHandleOp"):
            return [self._argument(number, node)]
        if op == "Const":
            buffer = self._constants.get(number)
            if buffer is not None:
                buffer.refs += 1
            return [Tensor(buffer, node.shapes[0] or (), node.item_bytes[0], node.value)]
        if op == "ReadVariableOp":
            return [self._read(number, node, inputs)]
        if op in ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp") or op.startswith("ResourceApply"):
            self._assign(number, node, inputs)
            return []
        if op == "Switch":
            return self._switched(node, inputs)
        if op == "Merge":
            return [self._same(inputs[0], inputs[0].shape), None]
        if op == "TensorListPopBack":
            return self._popped(number, node, inputs)
        if op.startswith("TensorList") or op == "EmptyTensorList":
            return [self._list(number, node, inputs)]
        if op in ALIASES:
            if op == "IdentityN":
                return [self._same(tensor, tensor.shape) for tensor in inputs]
            known = node.shapes[0] if node.shapes else None
            return [self._same(inputs[0], inputs[0].shape if known is None else known)]
        return self._computed(number, node, inputs, iteration)

    def _same(self, tensor: Tensor, shape: Shape) -> Tensor:
        if tensor.buffer is not None:
            tensor.buffer.refs += 1
        return Tensor(tensor.buffer, shape, tensor.item_bytes, tensor.value)

    def _argument(self, number: int, node: Node) -> Tensor:
        buffer = self._arguments.get(number)
        item_bytes = node.item_bytes[0] if node.item_bytes else 0
        shape = node.shapes[0] if node.shapes and node.shapes[0] is not None else ()
        if buffer is not None and item_bytes:
            buffer.refs += 1
            return Tensor(buffer, shape, item_bytes)
        # A handle of a variable: its node's number leads to the variable.
        return Tensor(None, (), 0, number)

    def _held(self, handle: Tensor) -> list[Buffer] | None:
        return self._variables.get(handle.value) if isinstance(handle.value, int) else None

    def _read(self, number: int, node: Node, inputs: list[Tensor]) -> Tensor:
        held = self._held(inputs[0])
        shape = node.shapes[0] if node.shapes and node.shapes[0] is not None else ()
        if held is None:
            return Tensor(None, shape, node.item_bytes[0])
        if inputs[0].value in self._copied_on_read:
            return Tensor(self._allocate(held[0].size, number), shape, node.item_bytes[0])
        held[0].refs += 1
        return Tensor(held[0], shape, node.item_bytes[0])

    def _assign(self, number: int, node: Node, inputs: list[Tensor]) -> None:
        held = self._held(inputs[0])
        if held is None:
            return
        if node.op == "AssignVariableOp":
            given = inputs[1].buffer
            if given is not None and given is not held[0]:
                given.refs += 1
                given.variable = held[0].variable
                self._release(held[0])
                held[0] = given
        elif held[0].refs > 1:
            # Somebody still reads the old value: it is left to them, the variable gets a copy.
            copy = self._allocate(held[0].size, number, held[0].variable)
            self._release(held[0])
            held[0] = copy

    def _switched(self, node: Node, inputs: list[Tensor]) -> list[Tensor | None]:
        value = inputs[1].value
        if value is None:
            self._guessed[node.name] = None
            taken = 1
        else:
            taken = 1 if bool(value) else 0
        chosen = self._same(inputs[0], inputs[0].shape)
        return [None, chosen] if taken else [chosen, None]

    def _list(self, number: int, node: Node, inputs: list[Tensor]) -> Tensor | None:
        """Lists of tensors, in which loops keep what the backward pass needs."""
        op, variant = node.op, 0
        if op in ("EmptyTensorList", "TensorListReserve"):
            made = Buffer(0, number, self._tick)
            count = 0
            if op == "TensorListReserve" and inputs[1].value is not None:
                count = int(inputs[1].value)
            made.items = [Tensor(None, (), 0) for _ in range(count)]
            return Tensor(made, (), variant)
        if op == "TensorListFromTensor":
            return self._unstacked(number, inputs[0], variant)
        source = inputs[0].buffer
        if op in ("TensorListPushBack", "TensorListSetItem"):
            made = self._own_list(source, number)
            assert made.items is not None
            element = inputs[1] if op == "TensorListPushBack" else inputs[2]
            kept = self._same(element, element.shape)
            if op == "TensorListPushBack":
                made.items.append(kept)
            else:
                place = None if inputs[1].value is None else int(inputs[1].value)
                if place is None or not 0 <= place < len(made.items):
                    made.items.append(kept)
                else:
                    self._release(made.items[place].buffer)
                    made.items[place] = kept
            return Tensor(made, (), variant)
        return self._from_list(number, node, inputs, source)

    def _own_list(self, source: Buffer | None, number: int) -> Buffer:
        """A list that may be changed: the given one if nobody else holds it, else a copy with the same elements."""
        if source is not None and source.refs == 1:
            source.refs += 1
            return source
        made = Buffer(0, number, self._tick)
        made.items = [] if source is None or source.items is None else list(source.items)
        for item in made.items:
            if item.buffer is not None:
                item.buffer.refs += 1
        return made

    def _popped(self, number: int, node: Node, inputs: list[Tensor]) -> list[Tensor | None]:
        """The list without its last element, and that."""
        made = self._own_list(inputs[0].buffer, number)
        assert made.items is not None
        if made.items:
            last = made.items.pop()
        else:
            shape = node.shapes[1] or ()
            last = Tensor(self._allocate(tensor_bytes(shape, node.item_bytes[1]), number), shape, node.item_bytes[1])
        return [Tensor(made, (), node.item_bytes[0]), last]

    def _unstacked(self, number: int, tensor: Tensor, variant: int) -> Tensor:
        """Elements are copies, or parts of the tensor where they are aligned."""
        made = Buffer(0, number, self._tick)
        size = tensor_bytes(tensor.shape[1:], tensor.item_bytes)
        made.items = []
        for _ in range(tensor.shape[0] if tensor.shape else 0):
            if size % 64:
                made.items.append(Tensor(self._allocate(size, number), tensor.shape[1:], tensor.item_bytes))
            else:
                made.items.append(self._same(tensor, tensor.shape[1:]))
        return Tensor(made, (), variant)

    def _from_list(self, number: int, node: Node, inputs: list[Tensor], source: Buffer | None) -> Tensor:
        op = node.op
        items = [] if source is None or source.items is None else source.items
        if op == "TensorListLength":
            return Tensor(self._allocate(4, number), (), node.item_bytes[0], len(items))
        if op == "TensorListGetItem":
            place = None if inputs[1].value is None else int(inputs[1].value)
            if place is not None and 0 <= place < len(items) and items[place].buffer is not None:
                return self._same(items[place], items[place].shape)
            element = node.shapes[0]
            if element is None:
                element = next((item.shape for item in items if item.buffer is not None), ())
            return Tensor(
                self._allocate(tensor_bytes(element, node.item_bytes[0]), number), element, node.item_bytes[0]
            )
        if op == "TensorListStack":
            shape = node.shapes[0]
            if shape is None:
                first: Shape = next((item.shape for item in items if item.buffer is not None), ())
                shape = (len(items), *first)
            return Tensor(self._allocate(tensor_bytes(shape, node.item_bytes[0]), number), shape, node.item_bytes[0])
        known = node.shapes[0] if node.shapes and node.shapes[0] is not None else ()
        item_bytes = node.item_bytes[0] if node.item_bytes else 0
        return Tensor(self._allocate(tensor_bytes(known, item_bytes), number), known, item_bytes)

    def _computed(self, number: int, node: Node, inputs: list[Tensor], iteration: Iteration) -> list[Tensor | None]:
        """Outputs of an ordinary kernel: an input's place where the kernel takes it over, else memory of their own."""
        values = values_of(node, [tensor.value for tensor in inputs], [tensor.shape for tensor in inputs])
        taken: set[int] = set()
        outputs: list[Tensor | None] = []
        for port, item_bytes in enumerate(node.item_bytes):
            shape = node.shapes[port]
            if shape is None:
                shape = output_shape(node, port, [tensor.shape for tensor in inputs])
            size = tensor_bytes(shape, item_bytes)
            buffer = None
            for place in forwarded(node, port):
                if place >= len(inputs):
                    continue
                given = inputs[place]
                if (
                    place not in taken
                    and given.buffer is not None
                    and given.buffer.refs == 1
                    and tensor_bytes(given.shape, given.item_bytes) == size == given.buffer.size
                    and given.item_bytes == item_bytes
                ):
                    buffer = given.buffer
                    buffer.refs += 1
                    taken.add(place)
                    break
            if buffer is None:
                buffer = self._allocate(size, number)
            outputs.append(Tensor(buffer, shape, item_bytes, values if port == 0 else None))
        if number in self._has_gradient:
            hidden = hidden_bytes(node, onednn=self._onednn)
            if hidden:
                self._hidden[number, id(iteration)] = self._allocate(hidden, number)
        return outputs
