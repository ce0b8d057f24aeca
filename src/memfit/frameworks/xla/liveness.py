"""How long each value of a scheduled program lives, and which values share memory.

XLA's own rules, as its buffer assignment applies them: tuples, bitcasts and calls pass values on; what a loop carries
lies in one place throughout; a dynamic-update-slice or scatter writes into its operand; and an elementwise instruction
writes over an operand of the same shape that nobody needs any more.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from memfit.frameworks.xla.hlo import Aliases, Computation, Instruction, Module, Shape

# Their value is their first operand's.
_FORWARDS = frozenset({"bitcast", "opt-barrier", "optimization-barrier", "domain", "add-dependency"})
_IN_PLACE = frozenset({"dynamic-update-slice", "scatter"})
_ELEMENTWISE = frozenset({
    "abs", "add", "and", "atan2", "cbrt", "ceil", "clamp", "clz", "compare", "complex", "convert", "copy", "cosine",
    "divide", "erf", "exponential", "exponential-minus-one", "floor", "imag", "is-finite", "log", "log-plus-one",
    "logistic", "maximum", "minimum", "multiply", "negate", "not", "or", "popcnt", "power", "real",
    "reduce-precision", "remainder", "round-nearest-afz", "round-nearest-even", "rsqrt", "select", "shift-left",
    "shift-right-arithmetic", "shift-right-logical", "sign", "sine", "sqrt", "stochastic-convert", "subtract", "tan",
    "tanh", "xor",
})  # fmt: skip


@dataclass(slots=True)
class Value:
    """An array that an instruction makes."""

    size_bytes: int
    start: int  # when it is made
    end: int  # when it is last read
    instruction: Instruction
    argument: int | None = None  # number of the program's argument that it is
    is_constant: bool = False  # part of the program
    is_result: bool = False  # the program gives it to its caller
    path: tuple[int, ...] = ()  # its place in the tuple that the instruction makes
    users: list[tuple[int, Instruction, int]] = field(default_factory=list)  # (time, instruction, operand)


@dataclass(frozen=True, slots=True)
class ProgramBuffer:
    """Values that lie in one place, in the order in which they are made."""

    values: tuple[Value, ...]
    size_bytes: int  # of the largest
    overwrites: frozenset[int]  # buffers whose values end where one of its own may be written over them
    start: int  # when the first value is made
    end: int  # when the last value is read for the last time
    argument: int | None  # number of the argument that lies there first
    is_result: bool  # the program gives it to its caller
    is_constant: bool  # part of the program


@dataclass(frozen=True, slots=True)
class Lives:
    """The buffers of a program, with their lifetimes."""

    buffers: tuple[ProgramBuffer, ...]  # in the order in which they begin
    num_times: int  # instructions that run, those of loops counted once
    order: tuple[Instruction, ...]  # the instructions, by time
    results: tuple[int, ...]  # index in `buffers` of each leaf of the result
    table_bytes: int  # of the table of pointers to the results


def lives_of(module: Module) -> Lives:
    """Walks the program once."""
    return _Walk(module).run()


class _Walk:
    def __init__(self, module: Module) -> None:
        self._module = module
        self._values: list[Value] = []
        self._parents: list[int] = []
        self._order: list[Instruction] = []
        self._fusions: dict[str, _Fusion] = {}

    def run(self) -> Lives:
        module = self._module
        arguments: dict[int, object] = {}
        for instruction in module.entry.instructions:
            if instruction.opcode == "parameter":
                made = self._made(instruction.shape, instruction, 0)
                arguments[instruction.number] = made
                for leaf in _leaves(made):
                    self._values[leaf].argument = instruction.number
        result = self._run(module.entry, arguments)
        last = len(self._order)
        for leaf in _leaves(result):
            self._values[leaf].is_result = True
            self._values[leaf].end = last
        for path, number, inner in module.aliases:
            if number in arguments:
                self._unite_trees(_at(arguments[number], inner), _at(result, path))
        aliased = {self._find(leaf) for tree in arguments.values() for leaf in _leaves(tree)} & {
            self._find(leaf) for leaf in _leaves(result)
        }
        for tree in arguments.values():
            for leaf in _leaves(tree):
                if self._find(leaf) not in aliased:
                    # Its caller still has it.
                    self._values[leaf].end = last
        root = module.entry.root.shape
        return self._lives(result, root.size_bytes if root.parts is not None else 0)

    def _run(self, computation: Computation, bound: dict[int, object]) -> object:
        """The value that a computation gives for these arguments, each instruction at its time."""
        known: dict[str, object] = {}
        for instruction in computation.instructions:
            if instruction.opcode == "parameter":
                known[instruction.name] = bound[instruction.number]
                continue
            operands = [known[name] for name in instruction.operands if name in known]
            known[instruction.name] = self._value(instruction, operands)
        result = known[computation.root.name]
        self._read(result, len(self._order), computation.root)
        return result

    def _value(self, instruction: Instruction, operands: list[object]) -> object:
        opcode, called = instruction.opcode, instruction.called
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            whole = operands[0]
            assert isinstance(whole, tuple)  # XLA checks its programs
            return whole[instruction.index]
        if opcode in _FORWARDS and operands:
            return operands[0]
        if opcode == "constant":
            made = self._made(instruction.shape, instruction, len(self._order))
            for leaf in _leaves(made):
                self._values[leaf].is_constant = True
            return made
        if opcode == "while":
            return self._loop(instruction, operands[0])
        if opcode == "call" and "to_apply" in called:
            result = self._run(self._module.computations[called["to_apply"]], dict(enumerate(operands)))
            self._order.append(instruction)
            return result
        results = []
        if opcode == "conditional":
            names = [called[key] for key in ("true_computation", "false_computation") if key in called]
            names = names or [called[f"branch{place}"] for place in range(len(called))]
            for place, name in enumerate(names):
                operand = operands[place + 1] if place + 1 < len(operands) else ()
                self._read(operand, len(self._order), instruction)
                results.append(self._run(self._module.computations[name], {0: operand}))
        time = len(self._order)
        self._order.append(instruction)
        for number, operand in enumerate(operands):
            self._read(operand, time, instruction, number)
        made = self._made(instruction.shape, instruction, time)
        for result in results:
            self._unite_trees(result, made)
        for path, number, inner in self._in_place(instruction):
            if number < len(operands):
                self._unite_trees(_at(operands[number], inner), _at(made, path))
        return made

    def _in_place(self, instruction: Instruction) -> Aliases:
        """What shares memory whatever comes later."""
        if instruction.opcode == "dynamic-update-slice":
            return (*instruction.aliases, ((), 0, ()))
        if instruction.opcode == "scatter":
            # All arrays, then the places, then all updates.
            arrays = len(instruction.operands) // 2
            return (*instruction.aliases, *((() if arrays == 1 else (one,), one, ()) for one in range(arrays)))
        if instruction.opcode == "fusion":
            return (*instruction.aliases, *self._fusion(instruction).in_place)
        return instruction.aliases

    def _fusion(self, instruction: Instruction) -> "_Fusion":
        name = instruction.called["calls"]
        if name not in self._fusions:
            self._fusions[name] = _Fusion(self._module.computations[name])
        return self._fusions[name]

    def _loop(self, instruction: Instruction, carried: object) -> object:
        self._read(carried, len(self._order), instruction)
        for kind in ("condition", "body"):
            inside = self._made_like(carried, instruction, len(self._order))
            self._unite_trees(carried, inside)
            result = self._run(self._module.computations[instruction.called[kind]], {0: inside})
        self._unite_trees(carried, result)
        self._order.append(instruction)
        after = self._made_like(carried, instruction, len(self._order) - 1)
        self._unite_trees(carried, after)
        return after

    def _made(self, shape: Shape, instruction: Instruction, time: int, path: tuple[int, ...] = ()) -> object:
        if shape.parts is not None:
            parts = enumerate(shape.parts)
            return tuple(self._made(part, instruction, time, (*path, place)) for place, part in parts)
        return self._add(Value(shape.size_bytes, time, time, instruction, path=path))

    def _made_like(self, tree: object, instruction: Instruction, time: int, path: tuple[int, ...] = ()) -> object:
        """Values of the same sizes."""
        if isinstance(tree, tuple):
            parts = enumerate(tree)
            return tuple(self._made_like(part, instruction, time, (*path, place)) for place, part in parts)
        assert isinstance(tree, int)  # leaves are numbers
        return self._add(Value(self._values[tree].size_bytes, time, time, instruction, path=path))

    def _add(self, value: Value) -> int:
        self._values.append(value)
        self._parents.append(len(self._parents))
        return len(self._values) - 1

    def _read(self, tree: object, time: int, instruction: Instruction, number: int = -1) -> None:
        for leaf in _leaves(tree):
            value = self._values[leaf]
            value.end = max(value.end, time)
            value.users.append((time, instruction, number))

    def _find(self, leaf: int) -> int:
        while self._parents[leaf] != leaf:
            self._parents[leaf] = self._parents[self._parents[leaf]]
            leaf = self._parents[leaf]
        return leaf

    def _unite_trees(self, first: object, second: object) -> None:
        for a, b in zip(_leaves(first), _leaves(second), strict=False):
            self._parents[self._find(b)] = self._find(a)

    def _can_overwrite(self, operand: Value, value: Value) -> bool:
        """Whether what makes `value` may write it over `operand`."""
        instruction = value.instruction
        if operand.size_bytes != value.size_bytes or operand.start >= value.start:
            return False
        numbers = [number for time, user, number in operand.users if time == value.start and user is instruction]
        if instruction.opcode == "fusion":
            return any(self._fusion(instruction).overwrites(number, value.path, instruction) for number in numbers)
        return bool(numbers) and (instruction.opcode in _ELEMENTWISE or instruction.opcode == "sort")

    def _lives(self, result: object, table_bytes: int) -> Lives:
        groups: dict[int, list[int]] = {}
        for leaf in range(len(self._values)):
            groups.setdefault(self._find(leaf), []).append(leaf)
        values = self._values
        order = sorted(groups, key=lambda group: min(values[leaf].start for leaf in groups[group]))
        places = {group: place for place, group in enumerate(order)}
        ending: dict[int, list[int]] = {}
        for leaf, value in enumerate(values):
            if not value.is_constant:
                ending.setdefault(value.end, []).append(leaf)
        buffers = []
        for group in order:
            inside = sorted((values[leaf] for leaf in groups[group]), key=lambda value: value.start)
            overwrites = {
                places[self._find(leaf)]
                for value in inside
                if value.argument is None and not value.is_constant
                for leaf in ending.get(value.start, ())
                if self._can_overwrite(values[leaf], value)
            }
            buffers.append(
                ProgramBuffer(
                    tuple(inside),
                    max(value.size_bytes for value in inside),
                    frozenset(overwrites - {places[group]}),
                    inside[0].start,
                    max(value.end for value in inside),
                    next((value.argument for value in inside if value.argument is not None), None),
                    any(value.is_result for value in inside),
                    any(value.is_constant for value in inside),
                )
            )
        results = tuple(places[self._find(leaf)] for leaf in _leaves(result))
        return Lives(tuple(buffers), len(self._order), tuple(self._order), results, table_bytes)


class _Fusion:
    """What a fused computation writes over."""

    def __init__(self, computation: Computation) -> None:
        by_name = {instruction.name: instruction for instruction in computation.instructions}
        self._users: dict[str, list[Instruction]] = {}
        for instruction in computation.instructions:
            for name in instruction.operands:
                self._users.setdefault(name, []).append(instruction)
        self._parameters = {one.number: one for one in computation.instructions if one.opcode == "parameter"}

        def behind_bitcasts(name: str) -> Instruction:
            while by_name[name].opcode == "bitcast":
                name = by_name[name].operands[0]
            return by_name[name]

        root = computation.root
        self.in_place: list[tuple[tuple[int, ...], int, tuple[int, ...]]] = []
        for place, name in enumerate(root.operands if root.opcode == "tuple" else (root.name,)):
            output = behind_bitcasts(name)
            target = behind_bitcasts(output.operands[0]) if output.opcode in _IN_PLACE else output
            if output.opcode in _IN_PLACE and target.opcode == "parameter":
                self.in_place.append(((place,) if root.opcode == "tuple" else (), target.number, ()))

    def overwrites(self, number: int, path: tuple[int, ...], instruction: Instruction) -> bool:
        """Whether an output may be written over a parameter: one of its shape, read only element by element."""
        parameter = self._parameters.get(number)
        output = instruction.shape
        for place in path:
            output = (output.parts or ())[place]
        if parameter is None or parameter.shape.text != output.text:
            return False
        waiting, seen = [parameter.name], {parameter.name}
        while waiting:
            for user in self._users.get(waiting.pop(), ()):
                if user.opcode != "tuple" and user.opcode not in _ELEMENTWISE:
                    return False
                if user.name not in seen:
                    seen.add(user.name)
                    waiting.append(user.name)
        return True


def _leaves(tree: object) -> Iterator[int]:
    if isinstance(tree, tuple):
        for part in tree:
            yield from _leaves(part)
    elif isinstance(tree, int):
        yield tree


def _at(tree: object, path: tuple[int, ...]) -> object:
    for place in path:
        if not isinstance(tree, tuple) or place >= len(tree):
            return ()
        tree = tree[place]
    return tree


@dataclass(frozen=True, slots=True)
class ProgramLayout:
    """Bytes that XLA sets aside; outputs are those that don't take an argument's place, and their table."""

    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    constant_bytes: int

    @property
    def total_bytes(self) -> int:
        """All that is taken while the program runs."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes


def lay_out(lives: Lives) -> ProgramLayout:
    """What XLA sets aside for a program, from the lives of its buffers alone.

    XLA gives each argument and each result a range of its own for as long as the program runs, puts what it can into
    the ranges that results (and the donated arguments that become results) leave unused, and packs the rest into one
    range, which is taken to be as large as the most that lives there at once: of 24 training steps it was 3% larger at
    most. Where XLA's own figure is at hand it is the truth; TensorFlow gives none.
    """
    buffers = lives.buffers
    # (bytes, buffers in it) of each argument or result that others may use while it waits for its value.
    ranges: list[tuple[int, list[int]]] = []
    packed: list[int] = []
    arguments = outputs = constants = 0
    order = sorted(
        range(len(buffers)),
        key=lambda place: (-buffers[place].size_bytes, not buffers[place].is_result, buffers[place].start),
    )
    for place in order:
        buffer = buffers[place]
        size = buffer.size_bytes
        if buffer.is_constant:
            constants += size
        elif buffer.argument is not None or buffer.is_result:
            arguments += size if buffer.argument is not None else 0
            outputs += size if buffer.argument is None else 0
            if buffer.is_result:
                ranges.append((size, [place]))
        else:
            # The smallest range that is free while the buffer lives.
            for width, inside in reversed(ranges):
                if width >= size and not any(_collide(buffers, other, place) for other in inside):
                    inside.append(place)
                    break
            else:
                packed.append(place)
    return ProgramLayout(arguments, outputs + lives.table_bytes, _most_at_once(buffers, packed), constants)


def _most_at_once(buffers: tuple[ProgramBuffer, ...], places: Sequence[int]) -> int:
    """The greatest sum of some buffers that live at one time; where one is written over another, both count once."""
    left, gone = set(places), set[int]()
    changes: Counter[int] = Counter()
    for place in sorted(places, key=lambda place: buffers[place].start):
        buffer = buffers[place]
        ending = (other for other in sorted(buffer.overwrites & left - gone) if buffers[other].end == buffer.start)
        gone.update(itertools.islice(ending, 1))
        changes[buffer.start] += buffer.size_bytes
    for place in places:
        changes[buffers[place].end + (place not in gone)] -= buffers[place].size_bytes
    return max(itertools.accumulate(changes[time] for time in sorted(changes)), default=0)


def _collide(buffers: tuple[ProgramBuffer, ...], one: int, other: int) -> bool:
    """Whether two buffers can't lie in one place: they live at once, and the first isn't written over the other."""
    first, second = buffers[one], buffers[other]
    return any(
        a.start <= b.end and b.start <= a.end and not (a.start == b.end and other in first.overwrites)
        for a in first.values
        for b in second.values
    )
