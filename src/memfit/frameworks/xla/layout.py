"""What XLA sets aside for a program, from the lives of its buffers alone.

XLA gives each argument and each result a range of its own for as long as the program runs, puts what it can into the
ranges that results (and the donated arguments that become results) leave unused, and packs the rest into one range:
largest first, or longest-lived first, each at the tightest gap; the better of the two orders counts. Where XLA's own
figure is at hand it is the truth; TensorFlow gives none.
"""

from dataclasses import dataclass
from typing import NamedTuple

from memfit.frameworks.xla.liveness import Buffer, Lives

_ALIGNMENT_BYTES = 64
# Packing compares each buffer with all others; beyond so many the smallest, which hardly matter, are added up.
_MOST_PACKED = 2500

_Spans = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Layout:
    """Bytes that XLA sets aside; outputs are those that don't take an argument's place, and their table."""

    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    constant_bytes: int

    @property
    def total_bytes(self) -> int:
        """All that is taken while the program runs."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes


def lay_out(lives: Lives) -> Layout:
    """The layout of a program."""
    buffers = lives.buffers
    # (bytes, buffers in it) of each argument or result that others may use while it waits for its value.
    ranges: list[tuple[int, list[int]]] = []
    packed: dict[int, Buffer] = {}
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
                if size:
                    packed[place] = buffer
    groups = sorted(_overwritten(packed), key=lambda group: -group.size_bytes)
    groups, rest = groups[:_MOST_PACKED], groups[_MOST_PACKED:]
    by_life = sorted(groups, key=lambda group: (group.start - group.end, -group.size_bytes))
    by_size = sorted(groups, key=lambda group: (-group.size_bytes, group.start - group.end))
    temporary = min(_best_fit(by_size), _best_fit(by_life)) + sum(group.size_bytes for group in rest)
    return Layout(arguments, outputs + lives.table_bytes, temporary, constants)


def _collide(buffers: tuple[Buffer, ...], one: int, other: int) -> bool:
    """Whether two buffers can't lie in one place: they live at once, and the first isn't written over the other."""
    first, second = buffers[one], buffers[other]
    return any(
        a.start <= b.end and b.start <= a.end and not (a.start == b.end and other in first.overwrites)
        for a in first.values
        for b in second.values
    )


class _Group(NamedTuple):
    """Buffers of which one is written over the other."""

    size_bytes: int
    start: int
    end: int
    spans: _Spans


def _overwritten(buffers: dict[int, Buffer]) -> list[_Group]:
    """All buffers, those joined of which one is written over the other."""
    groups: dict[int, _Group] = {}
    belongs: dict[int, int] = {}
    for place in sorted(buffers, key=lambda place: buffers[place].start):
        buffer = buffers[place]
        joined = (belongs[other] for other in sorted(buffer.overwrites) if other in belongs)
        target = next((group for group in joined if groups[group].end == buffer.start), place)
        belongs[place] = target
        size, start, end, spans = groups.get(target, (buffer.size_bytes, buffer.start, buffer.end, []))
        spans = [*spans, *((value.start, value.end) for value in buffer.values)]
        groups[target] = _Group(size, min(start, buffer.start), max(end, buffer.end), spans)
    return list(groups.values())


def _best_fit(groups: list[_Group]) -> int:
    """Bytes of the range when each group, in this order, is put into the tightest gap that is free all along."""
    placed: list[tuple[int, int, int, int, _Spans]] = []
    total = 0
    for group in groups:
        size = -(-group.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        first, last, spans = group.start, group.end, group.spans
        taken = sorted(
            (offset, offset + width)
            for offset, width, start, end, others in placed
            if start <= last and first <= end and any(a <= d and c <= b for a, b in others for c, d in spans)
        )
        best, tightest, free = None, None, 0
        for start, end in taken:
            if start - free >= size and (tightest is None or start - free < tightest):
                best, tightest = free, start - free
            free = max(free, end)
        offset = free if best is None else best
        placed.append((offset, size, first, last, spans))
        total = max(total, offset + size)
    return total
