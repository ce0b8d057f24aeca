"""A program that XLA compiled: which buffer lives from where to where, what it is for, what kernels take beside it."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from memfit.core.timeline import Block, Category, Mark, Phase, Timeline
from memfit.core.user_code import SourceNames
from memfit.frameworks.xla.hlo import Instruction, Module, parse
from memfit.frameworks.xla.liveness import Lives, ProgramBuffer, Value, lives_of
from memfit.frameworks.xla.scratch import Scratch, scratch_of

# Steps of JAX's own transformations, which it names among the scopes.
_OWN_SCOPES = frozenset({
    "while", "body", "cond", "scan", "closed_call", "checkpoint", "rematted_computation", "remat", "remat2", "pjit",
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "core_call", "branch_0_fun", "branch_1_fun",
    "XLA_Args", "XLA_Retvals", "gradient_tape", "StatefulPartitionedCall", "PartitionedCall",
})  # fmt: skip
_WRAPPED = re.compile(r"^(?:jvp|transpose|vmap|checkpoint|remat|linearize|pmap|shard_map)\((.*)\)$")
_NAME = re.compile(r"^[A-Za-z_][\w.\-\[\]]*$")
PhaseOf = Callable[[str], Phase | None]
"""The part of a step that an operation belongs to, from its name; None where the name doesn't say."""
SourceOf = Callable[[str, tuple[tuple[str, int], ...]], str]
"""The line of the user's code, "net.py:31" or "", from an operation's name and its stack, innermost (file, line) first.
"""
Describe = Callable[[int], tuple[Category, str]]
"""What an argument (or a result) of the program is for, and the module that it belongs to, from its number."""
# Scalars that are part of a program say nothing.
_SMALLEST_CONSTANT_BYTES = 1024


@dataclass(frozen=True, slots=True)
class InstructionOrigin:
    """Where an instruction comes from; `source` is the innermost line of the user's code."""

    phase: Phase | None  # None where the framework doesn't say
    module: str
    op: str
    source: str
    is_named: bool = True  # the framework said something about it


class Origins:
    """Knows the origin of each instruction.

    `phases` tells parts of a step from names, JAX's by default; `sources` lines, by default those that the program has.

    Frameworks tell XLA what each operation is called. JAX wraps the names of transformed code, "transpose(jvp(layer1))"
    for the backward pass of layer1; TensorFlow puts "gradient_tape" in front of it.
    """

    def __init__(self, module: Module, phases: PhaseOf | None = None, sources: SourceOf | None = None) -> None:
        names = SourceNames()
        self._module = module
        self._phase_of = phases or phase_of
        self._known: dict[str, InstructionOrigin] = {}
        self._source_of = sources or (lambda _, stack: names.innermost(stack))
        self._sources: dict[tuple[str, tuple[tuple[str, int], ...]], str] = {}

    def of(self, instruction: Instruction) -> InstructionOrigin:
        """Where `instruction` comes from."""
        if instruction.name not in self._known:
            named = instruction
            if not instruction.op_name and "calls" in instruction.called:
                # The last inside of a fused one. Constants don't count unless there is nothing else: XLA shares one,
                # with the name of its first place.
                inside = self._module.computations[instruction.called["calls"]].instructions
                inside = tuple(inner for inner in inside if inner.opcode not in ("parameter", "constant"))
                computed = tuple(inner for inner in inside if inner.opcode != "broadcast")
                named = next((inner for inner in reversed(computed or inside) if inner.op_name), instruction)
            path, primitive = scopes_of(named.op_name)
            is_plain = not primitive or primitive == instruction.opcode
            op = instruction.opcode if is_plain else f"{primitive} ({instruction.opcode})"
            self._known[instruction.name] = InstructionOrigin(
                self._phase_of(named.op_name), path, op, self._source(named), bool(named.op_name)
            )
        return self._known[instruction.name]

    def _source(self, named: Instruction) -> str:
        key = named.op_name, named.source
        if key not in self._sources:
            self._sources[key] = self._source_of(*key)
        return self._sources[key]


def phase_of(op_name: str) -> Phase | None:
    """The part of a step that an operation belongs to, where its name says so.

    >>> phase_of("jit(step)/transpose(jvp(layer1))/dot_general")
    <Phase.BACKWARD: 'backward'>
    """
    if "transpose(" in op_name or "gradient_tape/" in op_name:
        return Phase.BACKWARD
    if "jvp(" in op_name:
        return Phase.FORWARD
    return None


def scopes_of(op_name: str) -> tuple[str, str]:
    """(dotted path of the module, primitive) of an operation's name.

    >>> scopes_of("jit(step)/transpose(jvp(block1))/dense/jit(relu)/max")
    ('block1.dense', 'max')
    """
    parts = _split(op_name)
    if not parts:
        return "", ""
    unwrapped = []
    for part in parts:
        while (inner := _WRAPPED.match(part)) is not None:
            part = inner.group(1)
        unwrapped.append(part)
    *around, primitive = unwrapped
    names = (name for part in around for name in _split(part))
    scopes = ".".join(name for name in names if _NAME.match(name) and name not in _OWN_SCOPES)
    return scopes, primitive if _NAME.match(primitive) else ""


def _split(name: str) -> list[str]:
    """Parts between slashes that are in no brackets."""
    parts, depth = [""], 0
    for letter in name:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "/" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part]


class XlaProgram:
    """A program as text after all of XLA's passes, scheduled.

    `compiled.as_text()` of JAX and `experimental_get_compiler_ir(stage="optimized_hlo")` of TensorFlow give it.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.module = parse(text)
        self.lives = lives_of(self.module)

    def scratch(self, num_threads: int | None = None) -> tuple[Scratch, ...]:
        """What kernels take for themselves on the CPU; by default with a thread for each processor."""
        return scratch_of(self.module, self.lives, num_threads or num_processors())

    def timeline(
        self,
        describe: Describe,
        describe_result: Describe | None = None,
        scratch: Sequence[Scratch] = (),
        phase_of: PhaseOf | None = None,
        source_of: SourceOf | None = None,
    ) -> Timeline:
        """Every buffer, with what kernels take for themselves on the CPU.

        `describe` and `describe_result` tell what arguments, and results that take no argument's place, are for;
        `phase_of` and `source_of` are as for `Origins`.
        """
        spans = [(kernel.time, kernel.end, kernel.matrix_bytes) for kernel in scratch]
        spans += [(kernel.time, kernel.time, kernel.own_bytes) for kernel in scratch]
        writer = _Writer(self.lives, Origins(self.module, phase_of, source_of), describe, describe_result)
        return writer.timeline(sorted(span for span in spans if span[2]))


@dataclass(frozen=True, slots=True)
class _Run:
    """A stretch of time in which a buffer is in use."""

    start: int
    end: int | None
    values: tuple[Value, ...]
    place: int
    scratch_bytes: int = 0


class _Writer:
    def __init__(self, lives: Lives, origins: Origins, describe: Describe, describe_result: Describe | None) -> None:
        self._lives = lives
        self._origins = origins
        self._describe = describe
        self._describe_result = describe_result
        self._named_after = self._names_from_readers()
        # When the backward pass begins.
        self._turned = lives.num_times + 1
        self._phases = self._phases_by_time()
        self._results = {place: number for number, place in reversed(list(enumerate(lives.results)))}
        # XLA copies an argument whose place the result takes too early.
        self._copies = {
            user.name: value.argument
            for buffer in lives.buffers
            for value in buffer.values
            if value.argument is not None
            for _, user, _ in value.users
            if user.opcode == "copy"
        }
        self._weights = {
            tuple(sorted(value.instruction.shape.dimensions))
            for buffer in lives.buffers
            if buffer.argument is not None and describe(buffer.argument)[0] is Category.PARAMETER
            for value in buffer.values
            if value.argument is not None
        }

    def timeline(self, scratch: Sequence[tuple[int, int, int]]) -> Timeline:
        runs = [run for place, buffer in enumerate(self._lives.buffers) for run in self._runs(place, buffer)]
        runs += [_Run(start, end, (), -1, size) for start, end, size in scratch]
        begins: dict[int, list[int]] = {}
        ends: dict[int, list[int]] = {}
        for number, run in enumerate(runs):
            begins.setdefault(run.start, []).append(number)
            if run.end is not None:
                ends.setdefault(run.end, []).append(number)
        starts, stops, tick = [0] * len(runs), dict[int, int](), 0
        marks = {-1: 0}
        for time in range(-1, self._lives.num_times + 1):
            marks[time] = tick
            for number in begins.get(time, ()):
                # A run that ends as this one begins, in its place.
                is_scratch = runs[number].place < 0
                targets = frozenset() if is_scratch else self._lives.buffers[runs[number].place].overwrites
                ending = (one for one in ends.get(time, ()) if runs[one].place in targets and one not in stops)
                over = next(ending, None)
                if over is not None:
                    stops[over] = tick
                    tick += 1
                starts[number] = tick
                tick += 1
            for number in ends.get(time, ()):
                if number not in stops:
                    stops[number] = tick
                    tick += 1
        blocks = [self._block(run, starts[number], stops.get(number)) for number, run in enumerate(runs)]
        blocks.sort(key=lambda block: block.start)
        return Timeline(tuple(blocks), tick, self._marks(marks))

    def _runs(self, place: int, buffer: ProgramBuffer) -> Iterator[_Run]:
        """The stretches of time in which a buffer holds something.

        An argument that a result replaces leaves its place to others in between.
        """
        if not buffer.size_bytes:
            return
        if buffer.is_constant or (buffer.argument is not None and not buffer.is_result):
            if buffer.argument is not None or buffer.size_bytes >= _SMALLEST_CONSTANT_BYTES:
                yield _Run(-1, None, buffer.values, place)
            return
        current: list[Value] = []
        start = end = 0
        for value in buffer.values:
            if current and value.start > end + 1:
                yield _Run(start, end, tuple(current), place)
                current = []
            if not current:
                start = end = value.start if value.argument is None else -1
            current.append(value)
            end = max(end, value.end)
        yield _Run(start, None if buffer.is_result else end, tuple(current), place)

    def _block(self, run: _Run, start: int, end: int | None) -> Block:
        if run.scratch_bytes:
            origin, phase = self._origin(self._lives.order[run.start]), self._phase(run.start)
            return Block(
                run.scratch_bytes, start, end, Category.WORKSPACE, phase, origin.module, origin.op, origin.source
            )
        buffer = self._lives.buffers[run.place]
        first = run.values[0]
        origin = self._origin(first.instruction)
        if first.argument is not None:
            category, module = self._describe(first.argument)
            return Block(buffer.size_bytes, start, end, category, Phase.SETUP, module, str(category))
        if buffer.is_constant:
            return Block(buffer.size_bytes, start, None, Category.BUFFER, Phase.SETUP, origin.module, "constant")
        phase = self._phase(first.start)
        category, module = self._category(run, phase), origin.module
        held = buffer.argument if buffer.argument is not None else self._copies.get(first.instruction.name)
        if held is not None:
            category, module = self._describe(held)
        elif buffer.is_result and self._describe_result is not None:
            category, module = self._describe_result(self._results[run.place])
            if category is Category.PARAMETER and phase is Phase.BACKWARD:
                # What has a parameter's shape and no optimizer has touched.
                category = Category.GRADIENT
        return Block(buffer.size_bytes, start, end, category, phase, module, origin.op, origin.source)

    def _names_from_readers(self) -> dict[str, InstructionOrigin]:
        """Origins of instructions that XLA put in without a name: those of the first that reads what they make."""
        found: dict[str, InstructionOrigin] = {}
        for buffer in reversed(self._lives.buffers):
            for value in reversed(buffer.values):
                name, own = value.instruction.name, self._origins.of(value.instruction)
                if own.is_named or value.argument is not None:
                    continue
                for _, user, _ in sorted(value.users, key=lambda use: use[0]):
                    theirs = found.get(user.name, self._origins.of(user))
                    if theirs.is_named and user is not value.instruction:
                        found[name] = replace(theirs, op=own.op)
                        break
        return found

    def _origin(self, instruction: Instruction) -> InstructionOrigin:
        return self._named_after.get(instruction.name) or self._origins.of(instruction)

    def _phase(self, time: int) -> Phase:
        # The caller takes results after the last instruction.
        return self._phases[min(time, len(self._phases) - 1)]

    def _category(self, run: _Run, phase: Phase) -> Category:
        last = max(value.end for value in run.values)
        # Kernels for the backward pass, turned around ahead of it, have a weight's shape too.
        is_weight = tuple(sorted(run.values[0].instruction.shape.dimensions)) in self._weights
        # XLA runs parts of the backward pass ahead and fuses its last parts with the update: names alone don't tell.
        is_kept = run.start < self._turned <= last and not is_weight
        if is_kept or (phase is Phase.FORWARD and self._phase(last) is Phase.BACKWARD):
            return Category.ACTIVATION
        readers = {self._phase(time) for value in run.values for time, _, _ in value.users}
        if phase is Phase.BACKWARD and Phase.OPTIMIZER in readers and is_weight:
            return Category.GRADIENT
        return Category.TEMPORARY

    def _phases_by_time(self) -> list[Phase]:
        """The part of the step that each instruction belongs to; where its name is silent, its place in time tells."""
        order = self._lives.order
        found = [self._origin(instruction).phase for instruction in order]
        if Phase.BACKWARD not in found:
            return [Phase.FORWARD] * max(1, len(found))
        turn = self._turned = self._turn(found)
        end = _end_of_backward(found)
        phases: list[Phase] = []
        for time, phase in enumerate(found):
            if phase is not None:
                phases.append(phase)
            elif time < turn:
                phases.append(Phase.FORWARD)
            elif time >= end or self._origin(order[time]).is_named:
                phases.append(Phase.OPTIMIZER)
            else:
                phases.append(phases[-1])
        return phases

    def _turn(self, found: list[Phase | None]) -> int:
        """When the backward pass begins."""
        # Names that tell the backward pass alone: what comes before it is the forward pass.
        other = None if Phase.FORWARD in found else Phase.FORWARD
        ahead = found[: _end_of_backward(found)]
        sizes = (self._lives.order[time].shape.size_bytes for time in range(len(ahead)))
        return min(turn_of(zip((phase or other for phase in ahead), sizes, strict=True)), len(found) - 1)

    def _marks(self, ticks: dict[int, int]) -> tuple[Mark, ...]:
        marks = [Mark(0, Phase.SETUP, 0), Mark(ticks[0], Phase.FORWARD, 1)]
        if Phase.BACKWARD in self._phases:
            end = _end_of_backward(self._phases)
            turn = min(self._turn(list(self._phases)), end)
            marks += [Mark(ticks[turn], Phase.BACKWARD, 1), Mark(ticks[end], Phase.OPTIMIZER, 1)]
        return tuple(marks)


def held_before(timeline: Timeline, held: Sequence[tuple[int, Category, str]]) -> Timeline:
    """The timeline with blocks in front that live all the time, given as (bytes, category, module)."""
    shift = len(held)
    first = [
        Block(size, tick, None, category, Phase.SETUP, module, str(category))
        for tick, (size, category, module) in enumerate(held)
    ]
    later = (
        replace(block, start=block.start + shift, end=None if block.end is None else block.end + shift)
        for block in timeline.blocks
    )
    marks = (mark if mark.phase is Phase.SETUP else replace(mark, tick=mark.tick + shift) for mark in timeline.marks)
    return Timeline((*first, *later), timeline.num_ticks + shift, tuple(marks))


def turn_of(made: Iterable[tuple[Phase | None, int]]) -> int:
    """How many of the (phase, bytes) that a step makes one after the other come before its backward pass.

    The odd one of the backward pass, such as zeros to add to, is made ahead of it: most bytes decide.
    """
    most, best, sum_so_far = 0, 0, 0
    for number, (phase, size) in enumerate(made, 1):
        sum_so_far += size if phase is Phase.FORWARD else -size if phase is Phase.BACKWARD else 0
        if sum_so_far > most:
            most, best = sum_so_far, number
    return best


def _end_of_backward(phases: Sequence[Phase | None]) -> int:
    """The place after the last instruction of the backward pass."""
    return len(phases) - phases[::-1].index(Phase.BACKWARD)


def num_processors() -> int:
    """That this process may use, which is how many threads XLA has."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1
