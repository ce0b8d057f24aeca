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
import math
import random
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from memfit.core.errors import StepFailed
from memfit.frameworks.tensorflow.trace.kernels import (
    ALIASES,
    INEXPENSIVE,
    Inference,
    assumed_shape,
    forwarded,
    seconds_of,
)  # fmt: skip
from memfit.frameworks.tensorflow.trace.memory import (
    Buffer,
    Graph,
    Iteration,
    Lists,
    LoopFrame,
    Memory,
    Node,
    Shape,
    Tensor,
    tensor_bytes,
)


@dataclass(frozen=True, slots=True)
class Lived:
    """What a run of a graph asked for."""

    buffers: tuple[Buffer, ...]  # everything that took memory, in order of its start
    num_ticks: int
    peak_bytes: int
    num_runs: int  # operators that ran, those in loops as often as they did
    guessed: tuple[str, ...]  # operators whose choice only a real run can know


_MOST_RUNS = 5_000_000
# How much an operator's time differs from step to step, as the deviation of its logarithm.
_TIME_SPREAD = 0.3
# Those among the views that change the shape.
_RESHAPES = frozenset({"Reshape", "Squeeze", "ExpandDims", "Bitcast"})
# Iterations of a loop that run at once where it doesn't say.
_PARALLEL_ITERATIONS = 10


@final
class Executor:
    """Plays a graph through."""

    def __init__(
        self,
        graph: Graph,
        held: Mapping[int, tuple[int, str]],
        *,
        num_threads: int,
        on_gpu: bool,
        inference: Inference | None = None,
        seed: int = 0,
    ) -> None:
        self._graph = graph
        self._on_gpu = on_gpu
        self._random = random.Random(seed) if seed else None
        self._memory = Memory()
        self._lists = Lists(self._memory)
        self._inference = Inference() if inference is None else inference
        self._arguments: dict[int, Buffer] = {}
        self._frames: dict[tuple[Iteration, str], LoopFrame] = {}
        self._guessed: dict[str, None] = {}
        self._num_threads = 1 if on_gpu else max(1, num_threads)
        # Variables are replaced by assignments: what holds one now.
        self._variables: dict[int, list[Buffer]] = {}
        slots: dict[str, list[Buffer]] = {}
        for number, (size, name) in held.items():
            if name not in slots:
                slots[name] = [self._memory.allocate(size, -1, name)]
            self._variables[number] = slots[name]
            self._arguments[number] = slots[name][0]
        self._constants = {
            number: self._memory.allocate(tensor_bytes(node.shapes[0] or (), node.item_bytes[0]), number)
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
        self._expected = [len(node.inputs) + len(node.controls) for node in graph.nodes]
        self._num_entries = Counter(
            node.definition.attr["frame_name"].s.decode() for node in graph.nodes if node.op == "Enter"
        )
        self._loop_merges = {
            number
            for number, node in enumerate(graph.nodes)
            if node.op == "Merge" and any(graph.nodes[made].op == "NextIteration" for made, _ in node.inputs)
        }

    # The run.

    def run(self) -> Lived:
        """The whole graph, once."""
        graph, memory = self._graph, self._memory
        root = LoopFrame(None).iterations[0]
        root.num_active = len(graph.roots)
        self._kept = set(graph.results)
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
                    # Its own tasks first, then the oldest of another thread.
                    if inline[thread] or queues[thread]:
                        number, iteration = (inline[thread] or queues[thread]).popleft()
                    elif any(queues):
                        number, iteration = next(other for other in queues if other).pop()
                    else:
                        break
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
        return Lived(tuple(memory.buffers), memory.tick, memory.peak_bytes, runs, tuple(self._guessed))

    def _seconds(self, number: int, work: Any) -> float:
        """How long an operator is at work; 0 of one that its thread is done with at once."""
        node = self._graph.nodes[number]
        if self._on_gpu or node.op in INEXPENSIVE or work is None:
            return 0.0
        outputs, inputs = work
        touched = sum(tensor_bytes(t.shape, t.item_bytes) for t in (*outputs, *inputs) if t is not None)
        seconds = seconds_of(node, touched, [tensor.shape for tensor in inputs])
        return seconds if self._random is None else seconds * math.exp(self._random.gauss(0.0, _TIME_SPREAD))

    def _start(self, number: int, iteration: Iteration) -> Any:
        """Takes what a kernel asks for: (outputs, inputs), or None of an operator on a path not taken."""
        node = self._graph.nodes[number]
        arrived: list[Tensor | None] = iteration.inputs.pop(number, [None] * len(node.inputs))
        missing = iteration.missing.pop(number, None)
        if missing is not None and missing[1] and node.op != "Merge":
            for tensor in arrived:
                if tensor is not None:
                    self._memory.release(tensor.buffer)
            return None
        inputs = [tensor for tensor in arrived if tensor is not None]
        return self._outputs(number, node, inputs), inputs

    def _finish(self, number: int, iteration: Iteration, work: Any, thread: int, inline: Any, queues: Any) -> None:
        """Gives back what the kernel no longer needs and hands its outputs on."""
        node = self._graph.nodes[number]
        ready: list[tuple[int, Iteration]] = []
        if work is None:
            self._deliver(number, node, iteration, None, ready)
        else:
            outputs, inputs = work
            for tensor in inputs:
                if tensor.buffer is not None:
                    tensor.buffer.last = number
                self._memory.release(tensor.buffer)
            self._deliver(number, node, iteration, outputs, ready)
            for port, tensor in enumerate(outputs):
                if tensor is not None and (number, port) not in self._kept:
                    self._memory.release(tensor.buffer)
        iteration.num_active -= 1
        if not iteration.num_active:
            self._clean_up(iteration.frame, ready)
        # Where what got ready waits (`ExecutorState::ScheduleReady`).
        is_cheap = [self._on_gpu or self._graph.nodes[task[0]].op in INEXPENSIVE for task in ready]
        inline[thread].extend(task for task, cheap in zip(ready, is_cheap, strict=True) if cheap)
        waiting = [task for task, cheap in zip(ready, is_cheap, strict=True) if not cheap]
        if waiting and not inline[thread]:
            inline[thread].append(waiting.pop())
        queues[thread].extendleft(waiting)

    # Edges, loops and paths that aren't taken.

    def _deliver(
        self, number: int, node: Node, iteration: Iteration, outputs: list[Tensor | None] | None, ready: Any
    ) -> None:
        target: Iteration | None = iteration
        dead = outputs is None
        if node.op == "Enter":
            name = node.definition.attr["frame_name"].s.decode()
            if (iteration, name) not in self._frames:
                limit = int(node.definition.attr["parallel_iterations"].i) or _PARALLEL_ITERATIONS
                self._frames[iteration, name] = LoopFrame(iteration, name, self._num_entries[name], limit)
                iteration.num_frames += 1
            frame = self._frames[iteration, name]
            if node.definition.attr["is_constant"].b and outputs is not None:
                tensor = outputs[0]
                assert tensor is not None
                frame.constants.append((number, self._memory.same(tensor)))
                for later in frame.iterations[1:]:
                    self._pass(number, later, outputs, False, ready)
            self._pass(number, frame.iterations[0], outputs, dead, ready)
            frame.num_entries -= 1
            if not frame.num_entries:
                self._clean_up(frame, ready)
            return
        frame = iteration.frame
        if node.op == "Exit":
            target = None if dead else frame.parent
            if dead and iteration is frame.iterations[-1]:
                frame.dead_exits.append(number)
        elif node.op == "NextIteration" and outputs is None:
            target = None
        elif node.op == "NextIteration" and iteration.number + 1 < len(frame.iterations):
            target = frame.iterations[iteration.number + 1]
        elif node.op == "NextIteration" and frame.is_full:
            assert outputs is not None and outputs[0] is not None
            frame.waiting.append((number, self._memory.same(outputs[0])))
            target = None
        elif node.op == "NextIteration":
            target = self._begin(frame, ready)
        if target is not None:
            self._pass(number, target, outputs, dead, ready)

    def _begin(self, frame: LoopFrame, ready: Any) -> Iteration:
        later = frame.following()
        waiting, frame.waiting = frame.waiting, []
        for number, tensor in waiting:
            self._pass(number, later, [tensor], False, ready)
            self._memory.release(tensor.buffer)
        for number, tensor in frame.constants:
            self._pass(number, later, [tensor], False, ready)
        return later

    def _clean_up(self, frame: LoopFrame, ready: Any) -> None:
        """Ends iterations whose operators have all run, begins others in their place, and ends the loop itself."""
        parent = frame.parent
        if parent is None:
            return
        while (ended := frame.ended()) is not None:
            for arrived in ended.inputs.values():
                for tensor in arrived:
                    self._memory.release(None if tensor is None else tensor.buffer)
            ended.inputs.clear()
            if frame.waiting:
                self._begin(frame, ready)
        if not frame.is_done or self._frames.get((parent, frame.name)) is not frame:
            return
        del self._frames[parent, frame.name]
        for number in frame.dead_exits:
            self._pass(number, parent, None, True, ready)
        for _, tensor in frame.constants:
            self._memory.release(tensor.buffer)
        parent.num_frames -= 1
        if not parent.num_active:
            self._clean_up(parent.frame, ready)

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
                if missing[1] < len(node.inputs) or consumer in self._loop_merges:
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
            target.num_active += 1
            ready.append((consumer, target))

    # Kernels.

    def _outputs(self, number: int, node: Node, inputs: list[Tensor]) -> list[Tensor | None]:
        op = node.op
        if op in ("Placeholder", "_Arg", "VarHandleOp"):
            buffer = self._arguments.get(number)
            if buffer is None or not node.item_bytes or not node.item_bytes[0]:
                # A handle of a variable: its node's number leads to the variable.
                return [Tensor(None, (), 0, number)]
            buffer.refs += 1
            return [Tensor(buffer, (node.shapes[0] if node.shapes else None) or (), node.item_bytes[0])]
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
            value = inputs[1].value
            if value is None:
                self._guessed[node.name] = None
            chosen = self._memory.same(inputs[0])
            return [None, chosen] if value is None or bool(value) else [chosen, None]
        if op == "Merge":
            return [self._memory.same(inputs[0]), None]
        listed = self._lists.outputs(number, node, inputs)
        if listed is not None:
            return listed
        if op in ALIASES:
            if op == "IdentityN":
                return [self._memory.same(tensor) for tensor in inputs]
            known = node.shapes[0] if node.shapes else None
            if known is None and op in _RESHAPES:
                known = self._inferred(number, node, inputs)[0]
            return [self._memory.same(inputs[0], inputs[0].shape if known is None else known)]
        return self._computed(number, node, inputs)

    def _held(self, handle: Tensor) -> list[Buffer] | None:
        return self._variables.get(handle.value) if isinstance(handle.value, int) else None

    def _read(self, number: int, node: Node, inputs: list[Tensor]) -> Tensor:
        held = self._held(inputs[0])
        shape = (node.shapes[0] if node.shapes else None) or ()
        if held is None:
            return Tensor(None, shape, node.item_bytes[0])
        if inputs[0].value in self._copied_on_read:
            return Tensor(self._memory.allocate(held[0].size, number), shape, node.item_bytes[0])
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
                self._memory.release(held[0])
                held[0] = given
        elif held[0].refs > 1:
            # Somebody still reads the old value: it is left to them, the variable gets a copy.
            copy = self._memory.allocate(held[0].size, number, held[0].variable)
            self._memory.release(held[0])
            held[0] = copy

    def _inferred(self, number: int, node: Node, inputs: list[Tensor]) -> list[Shape | None]:
        found = self._inference.shapes(
            number, node, [tensor.shape for tensor in inputs], [tensor.value for tensor in inputs]
        )
        return found if len(found) >= len(node.item_bytes) else [None] * len(node.item_bytes)

    def _computed(self, number: int, node: Node, inputs: list[Tensor]) -> list[Tensor | None]:
        """Outputs of an ordinary kernel: an input's place where the kernel takes it over, else memory of their own."""
        values = self._inference.values(
            number, node, [tensor.shape for tensor in inputs], [tensor.value for tensor in inputs]
        )
        taken: set[int] = set()
        outputs: list[Tensor | None] = []
        for port, item_bytes in enumerate(node.item_bytes):
            shape = node.shapes[port]
            value = None if values is None else values[port]
            if shape is None and value is not None:
                shape = value.shape
            if shape is None:
                shape = self._inferred(number, node, inputs)[port]
            if shape is None:
                shape = assumed_shape([tensor.shape for tensor in inputs])
            size = tensor_bytes(shape, item_bytes)
            for place in forwarded(node, port):
                given = inputs[place] if place < len(inputs) and place not in taken else None
                buffer = None if given is None or given.item_bytes != item_bytes else given.buffer
                if given is None or buffer is None or buffer.refs != 1:
                    continue
                if tensor_bytes(given.shape, item_bytes) == size == buffer.size:
                    buffer.refs += 1
                    taken.add(place)
                    break
            else:
                buffer = self._memory.allocate(size, number)
            outputs.append(Tensor(buffer, shape, item_bytes, value))
        return outputs
