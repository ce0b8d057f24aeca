"""The pieces of a program that XLA's CPU runtime runs ("thunks"), and which of them wait for which.

The runtime keeps no order but this: what reads a piece of memory waits for who wrote it, and what writes there waits
for all who wrote or read it before. Memory that several values share one after the other makes them wait, too.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from memfit.adapters.xla.hlo import Module
from memfit.adapters.xla.host_kernels import Kernel, Kernels
from memfit.adapters.xla.liveness import FORWARDS, Lives
from memfit.adapters.xla.placement import Placement, Slice

_NOTHING_TO_RUN = FORWARDS | {"parameter", "constant", "tuple", "get-tuple-element", "after-all"}


@dataclass(slots=True)
class Thunk:
    """A piece of a program.

    Args:
        kernel: how it runs.
        times: of its first and its last instruction in the program's order.
        waits_for: the thunks that must have ended.
        then: those that wait for it, in the program's order.
        writes: where.
    """

    kernel: Kernel
    times: tuple[int, int]
    waits_for: set[int] = field(default_factory=set)
    then: list[int] = field(default_factory=list)
    writes: tuple[Slice, ...] = ()


def thunks_of(module: Module, lives: Lives, placement: Placement, num_threads: int) -> list[Thunk]:
    """The pieces of a program's entry computation, in its order.

    Args:
        module: the program.
        lives: of its values.
        placement: where they lie.
        num_threads: that may run them.
    """
    instructions = [one for one in module.entry.instructions if one.opcode not in _NOTHING_TO_RUN]
    if not instructions:
        return []
    owners, times = _owners(lives, {one.name: number for number, one in enumerate(instructions)})
    reads, writes = _uses(lives, placement, owners, len(instructions))
    kernels = Kernels(module, num_threads)
    by_name = {one.name: one for one in module.entry.instructions}
    thunks = []
    for number, one in enumerate(instructions):
        moved = sum(piece.size_bytes for piece in reads[number] | writes[number])
        held = tuple(sorted(piece for piece in writes[number] if piece.range in placement.ranges))
        thunks.append(Thunk(kernels.of(one, by_name, moved), times.get(number, (0, 0)), writes=held))
    seen: dict[int, _Trail] = {}
    for number, thunk in enumerate(thunks):
        for piece in sorted(reads[number]):
            thunk.waits_for |= seen.setdefault(piece.range, _Trail()).read(piece, number)
        for piece in sorted(writes[number]):
            thunk.waits_for |= seen.setdefault(piece.range, _Trail()).write(piece, number)
        thunk.waits_for.discard(number)
        for other in thunk.waits_for:
            thunks[other].then.append(number)
    return thunks


def _owners(lives: Lives, numbers: dict[str, int]) -> tuple[list[int], dict[int, tuple[int, int]]]:
    """(the thunk that runs at each time, the first and last time of each thunk).

    What a loop or a call runs comes before the instruction itself.
    """
    owners: list[int] = []
    times: dict[int, tuple[int, int]] = {}
    begun = 0
    for time, instruction in enumerate(lives.order):
        number = numbers.get(instruction.name)
        if number is not None:
            owners.extend([number] * (time + 1 - begun))
            times[number] = (begun, time)
            begun = time + 1
    owners.extend([len(numbers) - 1] * (len(lives.order) - begun))
    return owners, times


def _uses(
    lives: Lives, placement: Placement, owners: list[int], num_thunks: int
) -> tuple[list[set[Slice]], list[set[Slice]]]:
    """(what each thunk reads, what it writes)."""
    reads: list[set[Slice]] = [set() for _ in range(num_thunks)]
    writes: list[set[Slice]] = [set() for _ in range(num_thunks)]
    for place, buffer in enumerate(lives.buffers):
        known = [placement.slices.get((value.instruction.name, value.path)) for value in buffer.values]
        # Values of a buffer lie in one place; one that XLA names nowhere has a place that nobody else has.
        shared = next((piece for piece in known if piece is not None), Slice(-1 - place, 0, max(1, buffer.size_bytes)))
        for value, found in zip(buffer.values, known, strict=True):
            piece = found or shared
            if not piece.size_bytes:
                continue
            if value.argument is None and not value.is_constant and value.start < len(owners):
                writes[owners[value.start]].add(piece)
            for time, _, _ in value.users:
                if time < len(owners):
                    reads[owners[time]].add(piece)
    return reads, writes


class _Trail:
    """Who wrote last, and who has read since, for each part of a range of placement."""

    def __init__(self) -> None:
        self._starts = [0]
        self._users: list[tuple[int, set[int]]] = [(-1, set())]

    def read(self, piece: Slice, number: int) -> set[int]:
        """Notes that a thunk reads; gives those that it waits for."""
        first, last = self._cut(piece)
        found = set()
        for writer, readers in self._users[first:last]:
            found.add(writer)
            readers.add(number)
        return found - {-1}

    def write(self, piece: Slice, number: int) -> set[int]:
        """Notes that a thunk writes; gives those that it waits for."""
        first, last = self._cut(piece)
        found = set()
        for writer, readers in self._users[first:last]:
            found |= readers
            found.add(writer)
        self._starts[first:last] = [piece.offset]
        self._users[first:last] = [(number, set())]
        return found - {-1}

    def _cut(self, piece: Slice) -> tuple[int, int]:
        """Places of the parts that make up a piece."""
        for offset in (piece.offset, piece.offset + piece.size_bytes):
            place = bisect_right(self._starts, offset) - 1
            if self._starts[place] != offset:
                writer, readers = self._users[place]
                self._starts.insert(place + 1, offset)
                self._users.insert(place + 1, (writer, set(readers)))
        return bisect_left(self._starts, piece.offset), bisect_left(self._starts, piece.offset + piece.size_bytes)
