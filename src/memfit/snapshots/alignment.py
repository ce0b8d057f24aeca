"""Alignment of two sequences: a longest common subsequence, quick enough for 100,000 entries on either side.

Rows of the usual table are kept as the bits of one integer (Hyyrö, "Bit-parallel LCS-length computation revisited",
2004): the bit of a column is off where the table's entry is larger than that to its left. What is too large for a
table is halved where both halves' common subsequences are longest together (Hirschberg, 1975).
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import accumulate

MOST_BITS = 1 << 29
"""Bits of one table that is kept to find the way back through it."""
_COMMON = 8
"""From so many occurrences on, the columns of a symbol are kept as one integer."""

_Columns = dict[Hashable, list[int]]


def align(
    first: Sequence[Hashable], second: Sequence[Hashable], *, most_bits: int = MOST_BITS
) -> list[tuple[int, int]]:
    """(index in `first`, index in `second`) of a longest common subsequence, in order.

    Of several such, the first pairs that there are; tables of more bits are halved.

    >>> align("abcbdab", "bdcaba")
    [(1, 0), (4, 1), (5, 3), (6, 4)]
    """
    pairs: list[tuple[int, int]] = []
    # Ranges to be aligned, the first on top.
    stack = [(0, len(first), 0, len(second))]
    while stack:
        start, end, other_start, other_end = stack.pop()
        while start < end and other_start < other_end and first[start] == second[other_start]:
            pairs.append((start, other_start))
            start, other_start = start + 1, other_start + 1
        last, other_last = end, other_end
        while start < last and other_start < other_last and first[last - 1] == second[other_last - 1]:
            last, other_last = last - 1, other_last - 1
        if (last, other_last) != (end, other_end):
            stack.append((last, end, other_last, other_end))
        if start == last or other_start == other_last:
            continue
        rows, columns = first[start:last], second[other_start:other_last]
        if len(rows) * len(columns) <= most_bits or len(rows) == 1:
            pairs += [(start + row, other_start + column) for row, column in _traced(rows, columns)]
        else:
            middle, column = _halved(rows, columns)
            stack.append((start + middle, last, other_start + column, other_last))
            stack.append((start, start + middle, other_start, other_start + column))
    return pairs


def _columns(symbols: Sequence[Hashable]) -> tuple[_Columns, dict[Hashable, int]]:
    """Where each symbol occurs, and the same as bits for those that are common."""
    places: _Columns = defaultdict(list)
    for column, symbol in enumerate(symbols):
        places[symbol].append(column)
    common = {symbol: _bits(columns, len(symbols)) for symbol, columns in places.items() if len(columns) >= _COMMON}
    return places, common


def _bits(columns: Sequence[int], length: int) -> int:
    content = bytearray(length // 8 + 1)
    for column in columns:
        content[column >> 3] |= 1 << (column & 7)
    return int.from_bytes(content, "little")


def _rows(rows: Sequence[Hashable], columns: Sequence[Hashable], *, keep: bool) -> list[int]:
    """The table's rows as bits: all of them, or the last alone."""
    places, common = _columns(columns)
    everywhere = (1 << len(columns)) - 1
    row = everywhere
    kept: list[int] = []
    for symbol in rows:
        matches = common.get(symbol)
        if matches is None:
            known = places.get(symbol)
            matches = 0 if known is None else sum(1 << column for column in known)
        if matches:
            met = row & matches
            row = ((row + met) | (row - met)) & everywhere
        if keep:
            kept.append(row)
    return kept if keep else [row]


def _traced(rows: Sequence[Hashable], columns: Sequence[Hashable]) -> list[tuple[int, int]]:
    """The pairs of a longest common subsequence, found by the way back through the table."""
    table = _rows(rows, columns, keep=True)
    everywhere = (1 << len(columns)) - 1
    pairs: list[tuple[int, int]] = []
    row, left = len(rows) - 1, everywhere
    while row >= 0:
        # The last column, up to where we are, that made this row's subsequences longer.
        column = (~table[row] & left).bit_length() - 1
        if column < 0:
            break
        above = table[row - 1] if row else everywhere
        if above >> column & 1:
            pairs.append((row, column))
            left = (1 << column) - 1
        row -= 1
    pairs.reverse()
    return pairs


def _halved(rows: Sequence[Hashable], columns: Sequence[Hashable]) -> tuple[int, int]:
    """(row, column) at which both can be cut without losing any of the common subsequence."""
    middle = len(rows) // 2
    before = _lengths(_rows(rows[:middle], columns, keep=False)[0], len(columns))
    after = _lengths(_rows(rows[middle:][::-1], columns[::-1], keep=False)[0], len(columns))
    sums = [one + other for one, other in zip(before, reversed(after), strict=True)]
    return middle, sums.index(max(sums))


def _lengths(row: int, num_columns: int) -> list[int]:
    """Length of the longest common subsequence with the first 0, 1, ... columns."""
    bits = f"{row:0{num_columns}b}"[::-1]
    return [0, *accumulate(bit == "0" for bit in bits)]
