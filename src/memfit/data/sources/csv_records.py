r"""Where the records of a CSV file begin and end, and what stands in their cells.

Most files have no quotes, and then every line is a record. Where there are some, a line break may belong to a value, so
that records are matched by a pattern that reads quotes as Arrow and Python's `csv` do: they count at the beginning of a
cell only, two of them in a quoted cell stand for one, and what follows the closing one up to the delimiter is taken as
it is. A carriage return that no line feed follows would end a record for some readers and not for others; it is refused
outside quotes.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memfit.data.source import Array

_LINE_FEED, _CARRIAGE_RETURN, _QUOTE = b'\n\r"'


class Malformed(Exception):
    """Bytes that can't be part of a CSV file.

    Args:
        position: offset in the bytes that were given.
        text: what was found, and what was expected.
    """

    def __init__(self, position: int, text: str) -> None:
        super().__init__(text)
        self.position = position
        self.text = text


@dataclass(frozen=True, slots=True)
class _Patterns:
    record: re.Pattern[bytes]
    prefix: re.Pattern[bytes]
    cell: re.Pattern[bytes]


@functools.cache
def _patterns(delimiter: str) -> _Patterns:
    mark = re.escape(delimiter.encode())
    rest = rb"[^\r\n" + mark + rb"]*+"
    quoted = rb'"([^"]*+(?:""[^"]*+)*+)"(' + rest + rb")"
    plain = rb'([^"\r\n' + mark + rb"]" + rest + rb"|)"
    cell = rb"(?:" + quoted + rb"|" + plain + rb")"
    anonymous = re.sub(rb"\((?!\?)", b"(?:", cell)
    prefix = anonymous + rb"(?:" + mark + anonymous + rb")*+"
    return _Patterns(
        re.compile(prefix + rb"\r?\n"),
        re.compile(prefix),
        re.compile(cell + rb"(" + mark + rb"|\r?\n)"),
    )


def split_records(data: bytes, delimiter: str) -> tuple[Array, Array]:
    """Offsets after each complete record in `data`, which begins with one, and for each whether it is a blank line.

    Raises:
        Malformed: there is a carriage return that isn't part of a line's end.
    """
    if b'"' not in data:
        ends = _split_plain(data)
    else:
        found = _split_by_parity(data, delimiter)
        ends = _split_by_pattern(data, delimiter) if found is None else found
    starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    lengths = ends - starts
    is_blank = lengths == 1
    for pair in np.flatnonzero(lengths == 2).tolist():
        is_blank[pair] = data[int(starts[pair])] == _CARRIAGE_RETURN
    return ends, is_blank


def _split_plain(data: bytes) -> Array:
    codes = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(codes == _LINE_FEED) + 1
    complete = int(ends[-1]) if len(ends) else len(data) - 1
    if data.count(b"\r", 0, complete) != data.count(b"\r\n", 0, complete):
        returns = np.flatnonzero(codes[:complete] == _CARRIAGE_RETURN)
        lone = returns[codes[returns + 1] != _LINE_FEED]
        raise lone_return(int(lone[0]))
    return ends


def _split_by_parity(data: bytes, delimiter: str) -> Array | None:
    """A line break ends a record where an even number of quotes precedes it; None where that isn't sure to hold.

    It holds where every odd quote begins a cell or follows the one before it, which makes the two stand for one.
    """
    if data.count(b"\r") != data.count(b"\r\n"):
        return None
    codes = np.frombuffer(data, np.uint8)
    quotes = np.flatnonzero(codes == _QUOTE)
    opening = quotes[0::2]
    before = codes[opening - 1]
    is_start = (before == ord(delimiter)) | (before == _LINE_FEED) | (opening == 0)
    is_start[1:] |= opening[1:] == quotes[1 : 2 * len(opening) - 1 : 2] + 1
    if not is_start.all():
        return None
    feeds = np.flatnonzero(codes == _LINE_FEED)
    ends: Array = feeds[np.searchsorted(quotes, feeds) % 2 == 0] + 1
    return ends


def _split_by_pattern(data: bytes, delimiter: str) -> Array:
    match = _patterns(delimiter).record.match
    ends: list[int] = []
    position = 0
    while found := match(data, position):
        position = found.end()
        ends.append(position)
    stuck = find_stop(data, position, delimiter)
    if stuck < len(data) - 1 and data[stuck] == _CARRIAGE_RETURN:
        raise lone_return(stuck)
    return np.array(ends, np.int64)


def lone_return(position: int) -> Malformed:
    """An error for a line that ends as on the first Macintosh computers."""
    return Malformed(
        position,
        "a carriage return without a line feed; lines must end with \\n or \\r\\n. Convert the file, for instance "
        "with `tr '\\r' '\\n'`",
    )


def find_stop(data: bytes, start: int, delimiter: str) -> int:
    """Where the record that begins at `start` can't be read on: at its end, or at a quote that isn't closed."""
    found = _patterns(delimiter).prefix.match(data, start)
    return start if found is None else found.end()


def is_unclosed(data: bytes, position: int) -> bool:
    """Whether a record that stopped there stopped at a quote that isn't closed."""
    return position < len(data) and data[position] == _QUOTE


def iterate_cells(data: bytes, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Offset and cells of each complete record that isn't a blank line; bytes that aren't UTF-8 are replaced."""
    match = _patterns(delimiter).cell.match
    start = position = 0
    cells: list[str] = []
    while found := match(data, position):
        quoted, rest, plain, mark = found.groups()
        value = plain if quoted is None else quoted.replace(b'""', b'"') + rest
        cells.append(value.decode("utf-8", errors="replace"))
        position = found.end()
        if mark[-1:] == b"\n":
            if len(cells) > 1 or quoted is not None or plain:
                yield start, cells
            start, cells = position, []
