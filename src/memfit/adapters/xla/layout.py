"""What XLA sets aside for a program, from the lives of its buffers alone.

XLA gives each argument and each result a range of its own for as long as the program runs, puts what it can into the
ranges that results (and the donated arguments that become results) leave unused, and packs the rest into one range:
largest first, or longest-lived first, each at the tightest gap; the better of the two orders counts. Where XLA's own
figure is at hand it is the truth; TensorFlow gives none.
"""

from dataclasses import dataclass

from memfit.adapters.xla.liveness import Buffer, Lives
from memfit.adapters.xla.placement import Placement, Slice

_ALIGNMENT_BYTES = 64
# Packing compares each buffer with all others; beyond so many the smallest, which hardly matter, are added up.
_MOST_PACKED = 2500

_Spans = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Layout:
    """Bytes that XLA sets aside.

    Args:
        argument_bytes: of all arguments.
        output_bytes: of results that don't take an argument's place, and of their table.
        temporary_bytes: of the range that all else shares.
        constant_bytes: of arrays that are part of the program.
        placement: of all values.
    """

    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    constant_bytes: int
    placement: Placement

    @property
    def total_bytes(self) -> int:
        """All that is taken while the program runs."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes


@dataclass(slots=True)
class _Range:
    size_bytes: int
    holds: list[int]
    is_reusable: bool


def lay_out(lives: Lives) -> Layout:
    """The layout of a program."""
    ranges: list[_Range] = []
    packed: dict[int, Buffer] = {}
    arguments = outputs = constants = 0
    for place in sorted(
        range(len(lives.buffers)),
        key=lambda place: (
            -lives.buffers[place].size_bytes,
            not lives.buffers[place].is_result,
            lives.buffers[place].start,
        ),
    ):
        buffer = lives.buffers[place]
        if buffer.is_constant:
            constants += buffer.size_bytes
            ranges.append(_Range(buffer.size_bytes, [place], is_reusable=False))
        elif buffer.argument is not None:
            arguments += buffer.size_bytes
            ranges.append(_Range(buffer.size_bytes, [place], is_reusable=buffer.is_result))
        elif buffer.is_result:
            outputs += buffer.size_bytes
            ranges.append(_Range(buffer.size_bytes, [place], is_reusable=True))
        elif (found := _free_range(ranges, place, lives.buffers)) is not None:
            found.holds.append(place)
        elif buffer.size_bytes:
            packed[place] = buffer
    offsets, temporary = _packed(packed)
    places = {place: (number, 0) for number, one in enumerate(ranges) for place in one.holds}
    places |= {place: (len(ranges), offset) for place, offset in offsets.items()}
    taken = {number: one.size_bytes for number, one in enumerate(ranges) if _is_result_only(one, lives.buffers)}
    placement = Placement(
        {
            (value.instruction.name, value.path): Slice(*places[place], value.size_bytes)
            for place, buffer in enumerate(lives.buffers)
            if place in places
            for value in buffer.values
        },
        {**taken, len(ranges): temporary},
    )
    return Layout(arguments, outputs + lives.table_bytes, temporary, constants, placement)


def _is_result_only(one: _Range, buffers: tuple[Buffer, ...]) -> bool:
    first = buffers[one.holds[0]]
    return first.argument is None and not first.is_constant


def _free_range(ranges: list[_Range], place: int, buffers: tuple[Buffer, ...]) -> _Range | None:
    """The smallest range that is free while a buffer lives."""
    size_bytes = buffers[place].size_bytes
    for candidate in reversed(ranges):
        is_large_enough = candidate.is_reusable and candidate.size_bytes >= size_bytes
        if is_large_enough and not any(_collide(buffers, other, place) for other in candidate.holds):
            return candidate
    return None


def _collide(buffers: tuple[Buffer, ...], one: int, other: int) -> bool:
    """Whether two buffers can't lie in one place: they live at once, and the first isn't written over the other."""
    first, second = buffers[one], buffers[other]
    for a in first.values:
        for b in second.values:
            is_overwritten = a.start == b.end and other in first.overwrites
            if a.start <= b.end and b.start <= a.end and not is_overwritten:
                return True
    return False


def _meet(first: _Spans, second: _Spans) -> bool:
    return any(a <= d and c <= b for a, b in first for c, d in second)


def _packed(buffers: dict[int, Buffer]) -> tuple[dict[int, int], int]:
    """(offset of each buffer, size) of the range in which they find place one beside or after the other."""
    groups = _overwritten(buffers)
    groups.sort(key=lambda group: -group.size_bytes)
    rest = groups[_MOST_PACKED:]
    del groups[_MOST_PACKED:]
    by_life = sorted(groups, key=lambda group: (-_length(group.spans), -group.size_bytes))
    by_size = sorted(groups, key=lambda group: (-group.size_bytes, -_length(group.spans)))
    offsets, total = min((_best_fit(by_size), _best_fit(by_life)), key=lambda found: found[1])
    for group in rest:
        offsets |= dict.fromkeys(group.places, total)
        total += group.size_bytes
    return offsets, total


def _length(spans: _Spans) -> int:
    return max(end for _, end in spans) - min(start for start, _ in spans)


@dataclass(slots=True)
class _Group:
    """Buffers of which one is written over the other."""

    size_bytes: int
    spans: _Spans
    places: list[int]


def _overwritten(buffers: dict[int, Buffer]) -> list[_Group]:
    """All buffers, those joined of which one is written over the other."""
    groups: dict[int, _Group] = {}
    belongs: dict[int, int] = {}
    ends: dict[int, int] = {}
    for place in sorted(buffers, key=lambda place: buffers[place].start):
        buffer = buffers[place]
        spans = [(value.start, value.end) for value in buffer.values]
        target = next(
            (belongs[o] for o in sorted(buffer.overwrites) if o in belongs and ends[belongs[o]] == buffer.start), None
        )
        if target is None:
            target = place
            groups[place] = _Group(buffer.size_bytes, [], [])
        belongs[place] = target
        groups[target].spans.extend(spans)
        groups[target].places.append(place)
        ends[target] = max(ends.get(target, 0), buffer.end)
    return list(groups.values())


def _best_fit(groups: list[_Group]) -> tuple[dict[int, int], int]:
    """(offset of each buffer, size of the range) when each group is put into the tightest gap that is free all along.

    Args:
        groups: in the order in which they are put.
    """
    placed: list[tuple[int, int, int, int, _Spans]] = []
    offsets: dict[int, int] = {}
    total = 0
    for group in groups:
        size = -(-group.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        first, last = min(start for start, _ in group.spans), max(end for _, end in group.spans)
        taken = sorted(
            (offset, offset + width)
            for offset, width, start, end, others in placed
            if start <= last and first <= end and _meet(others, group.spans)
        )
        best, tightest, free = None, None, 0
        for start, end in taken:
            if start - free >= size and (tightest is None or start - free < tightest):
                best, tightest = free, start - free
            free = max(free, end)
        offset = free if best is None else best
        placed.append((offset, size, first, last, group.spans))
        offsets |= dict.fromkeys(group.places, offset)
        total = max(total, offset + size)
    return offsets, total
