"""XLA's own buffer assignment: what it set aside, and what lies where.

`CompiledMemoryStats.serialized_buffer_assignment_proto` of JAX carries it as a `BufferAssignmentProto` (hlo.proto of
XLA); field numbers are part of that public format.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from memfit.adapters.xla.placement import Placement, Slice
from memfit.adapters.xla.wire import fields, numbers


@dataclass(frozen=True, slots=True)
class Allocation:
    """One range of memory.

    Args:
        index: its number.
        size_bytes: of the range.
        argument: number of the argument that it holds; None for all others.
        is_constant: part of the program.
        is_thread_local: on the stack of a thread.
        is_tuple: a table of pointers.
        lives_out: it holds a result.
        is_aliased: an argument's, taken over by a result.
        buffers: (offset, size) of each buffer inside by its number.
    """

    index: int
    size_bytes: int
    argument: int | None
    is_constant: bool
    is_thread_local: bool
    is_tuple: bool
    lives_out: bool
    is_aliased: bool
    buffers: dict[int, tuple[int, int]]

    @property
    def is_temporary(self) -> bool:
        """Whether it is needed only while the program runs."""
        return not (self.argument is not None or self.is_constant or self.is_thread_local or self.lives_out)


@dataclass(frozen=True, slots=True)
class Assignment:
    """All ranges.

    Args:
        allocations: in XLA's order.
        at_peak: buffers that live when an allocation is fullest, by the allocation's number.
        makers: (number of the instruction, place in the tuple that it makes) of each buffer by the buffer's number.
    """

    allocations: tuple[Allocation, ...]
    at_peak: dict[int, tuple[int, ...]] = field(default_factory=dict)
    makers: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)

    @property
    def constant_bytes(self) -> int:
        """Of arrays that are part of the program."""
        return sum(allocation.size_bytes for allocation in self.allocations if allocation.is_constant)

    @property
    def temporary_bytes(self) -> int:
        """Of what is needed only while the program runs."""
        return sum(allocation.size_bytes for allocation in self.allocations if allocation.is_temporary)

    def placement(self, names: Mapping[int, str]) -> Placement:
        """Where values lie.

        Args:
            names: of instructions by their numbers.
        """
        slices = {}
        for allocation in self.allocations:
            for buffer, (offset, size) in allocation.buffers.items():
                number, path = self.makers.get(buffer, (-1, ()))
                if number in names:
                    slices[names[number], path] = Slice(allocation.index, offset, size)
        ranges = {
            one.index: one.size_bytes
            for one in self.allocations
            if one.argument is None and not one.is_constant and not one.is_thread_local
        }
        return Placement(slices, ranges)


def read_names(data: bytes) -> dict[int, str]:
    """Names of instructions by their numbers, in a serialized `HloModuleProto`."""
    found = {}
    for number, computation in fields(data):
        if number == 3 and isinstance(computation, bytes):
            for inner, instruction in fields(computation):
                if inner == 2 and isinstance(instruction, bytes):
                    parts = dict(fields(instruction))
                    name, unique = parts.get(1, b""), parts.get(35, 0)
                    assert isinstance(name, bytes) and isinstance(unique, int)  # that's how the format has them
                    found[unique] = name.decode()
    return found


def read_assignment(data: bytes) -> Assignment:
    """The assignment in a serialized `BufferAssignmentProto`."""
    allocations, at_peak, makers = [], {}, {}
    for number, value in fields(data):
        if number == 3 and isinstance(value, bytes):
            allocations.append(_allocation(value))
        elif number == 1 and isinstance(value, bytes):
            buffer, maker, path = _buffer(value)
            makers[buffer] = (maker, path)
        elif number == 5 and isinstance(value, bytes):
            index, found = 0, list[int]()
            for inner, part in fields(value):
                if inner == 1 and isinstance(part, int):
                    index = part
                elif inner == 2:
                    found.extend(numbers(part))
            at_peak[index] = tuple(found)
    return Assignment(tuple(allocations), at_peak, makers)


def _buffer(data: bytes) -> tuple[int, int, tuple[int, ...]]:
    """(number, number of the instruction that makes it, place in the tuple) of a logical buffer."""
    buffer, maker, path = 0, 0, list[int]()
    for number, value in fields(data):
        if number == 1 and isinstance(value, int):
            buffer = value
        elif number == 3 and isinstance(value, bytes):
            for inner, part in fields(value):
                if inner == 3:
                    path.extend(numbers(part))
                elif inner == 4 and isinstance(part, int):
                    maker = part
    return buffer, maker, tuple(path)


def _allocation(data: bytes) -> Allocation:
    plain: dict[int, int] = {}
    buffers: dict[int, tuple[int, int]] = {}
    for number, value in fields(data):
        if isinstance(value, int):
            plain[number] = value
        elif number == 9:
            # A field that is 0 is left out.
            inside = {inner: part for inner, part in fields(value) if isinstance(part, int)}
            buffers[inside.get(1, 0)] = (inside.get(2, 0), inside.get(3, 0))
    return Allocation(
        index=plain.get(1, 0),
        size_bytes=plain.get(2, 0),
        argument=plain.get(6, 0) if plain.get(5) else None,
        is_constant=bool(plain.get(12)),
        is_thread_local=bool(plain.get(3)),
        is_tuple=bool(plain.get(11)),
        lives_out=bool(plain.get(7)),
        is_aliased=bool(plain.get(13)),
        buffers=buffers,
    )
