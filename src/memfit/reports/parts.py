"""The shape that all reports share: a verdict, a few lines below it, and titled parts.

A part holds rows of a breakdown, figures, a table, or lines of text. What is said is decided elsewhere (the `report` of
each verb's figures); `str(report)` is its plain text, `terminal.render_report` shows the same in colour.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memfit.core.estimate import Note
from memfit.core.printing import printable
from memfit.core.units import format_size

KEEPS = {"exact": "same results", "rounding": "same up to rounding", "changes training": "changes training"}

HARMLESS = "stand-in-value"
"""Code of the notes on values read from the device, which are summed up: they change no size by themselves."""

_NUM_LISTED = 3
# Longer cells are wrapped, so that a table still reads as one in a log of 120 columns.
_CELL_WIDTH = 46
_NAME_WIDTH = 44
_BAR_WIDTH = 20
RULE = "-" * 72


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a breakdown: what holds the memory, how much, and its share of the peak, from 0 to 1."""

    name: str
    size_bytes: int
    share: float


@dataclass(frozen=True, slots=True)
class Figure:
    """A number as a report shows it, with its origin; `origin` is "" where the value is unknown."""

    label: str
    value: str
    origin: str


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table, with remarks that stand below it over its whole width."""

    cells: tuple[str, ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of text; titles of columns with numbers begin with ">", and these are flush right.

    Those of columns that are never folded, however narrow the terminal is, begin with "|".
    """

    columns: tuple[str, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a report: rows of a breakdown, figures with their origins, a table, or lines of text.

    Args:
        title: of the part, or "".
        rows: of a breakdown.
        lines: of text.
        with_bar: whether rows have bars of their shares.
        grid: a table.
        with_share: whether rows have their shares in percent.
        figures: with their origins.
        labelled: whether lines begin with a label that ends with a colon.
    """

    title: str
    rows: tuple[Row, ...] = ()
    lines: tuple[str, ...] = ()
    with_bar: bool = False
    grid: Grid | None = None
    with_share: bool = True
    figures: tuple[Figure, ...] = ()
    labelled: bool = False

    @property
    def holds_something(self) -> bool:
        """Whether there is anything to show below the title."""
        return bool(self.rows or self.lines or self.figures or (self.grid and self.grid.lines))


@dataclass(frozen=True, slots=True)
class Report:
    """All that is said about a result; as text it is plain ASCII of our own, for logs and terminals of any encoding.

    Args:
        verdict: the first line.
        details: lines below it.
        parts: titled parts.
        is_good: whether the verdict is good news; None where it is neither.
        with_rule: whether a rule sets it off from what a script has printed.
    """

    verdict: str
    details: Sequence[str]
    parts: Sequence[Part]
    is_good: bool | None
    with_rule: bool = False

    def __str__(self) -> str:
        lines = [*([RULE] if self.with_rule else []), self.verdict, *(f"  {line}" for line in self.details)]
        for part in self.parts:
            lines += ["", part.title] if part.title else []
            # A path says enough without its middle; the words of a part of host memory don't.
            width = _NAME_WIDTH if part.with_share else max([_NAME_WIDTH, *(len(row.name) + 1 for row in part.rows)])
            for row in part.rows:
                share = format_share(row.share) if part.with_share else ""
                bar = "#" * round(min(1.0, row.share) * _BAR_WIDTH) if part.with_bar else ""
                name = f"  {shorten(row.name, width):<{width}}"
                lines.append(f"{name}{format_size(row.size_bytes):>10}{share:>8}  {bar}")
            lines += [f"  {figure.label:<34}{figure.value:>20}  {figure.origin}" for figure in part.figures]
            if part.grid is not None:
                lines += [f"  {line}" for line in format_grid(part.grid)]
            lines += [f"  {line}" for line in part.lines]
        return "\n".join(line.rstrip() for line in lines)


def shorten(text: str, width: int) -> str:
    """Text of at most `width` characters, cut in the middle, where paths say least.

    >>> shorten("encoder.layers.0.attention", 15)
    'encode...ention'
    """
    if len(text) <= width:
        return text
    tail = (width - 3) // 2
    return f"{text[: width - 3 - tail]}...{text[len(text) - tail :]}"


def format_share(share: float) -> str:
    """A share of the peak in percent.

    >>> format_share(0.625), format_share(0.0001), format_share(0.0)
    ('62.5%', '<0.1%', '0.0%')
    """
    return "<0.1%" if 0 < share < 0.001 else f"{share:.1%}"


def format_grid(grid: Grid) -> list[str]:
    """A table as lines of plain text, cells that are too long wrapped.

    >>> format_grid(Grid(("move", ">saves"), (Line(("a", "1 B"), ("remark",)), Line(("bcdefg", "23 B")))))
    ['move    saves', 'a         1 B', '  remark', 'bcdefg   23 B']
    """
    flush_right = [title.startswith(">") for title in grid.columns]
    titles = [title.lstrip(">|") for title in grid.columns]
    wrapped = [[textwrap.wrap(cell, _CELL_WIDTH) or [""] for cell in line.cells] for line in grid.lines]
    widths = [
        max([len(title), *(len(text) for cells in wrapped for text in cells[index])])
        for index, title in enumerate(titles)
    ]

    def aligned(cells: list[str]) -> str:
        placed = zip(cells, widths, flush_right, strict=True)
        return "  ".join(f"{cell:>{width}}" if right else f"{cell:<{width}}" for cell, width, right in placed).rstrip()

    lines = [aligned(titles)]
    for line, cells in zip(grid.lines, wrapped, strict=True):
        for depth in range(max(map(len, cells))):
            lines.append(aligned([texts[depth] if depth < len(texts) else "" for texts in cells]))
        lines += [f"  {remark}" for remark in line.remarks]
    return lines


def note_line(note: Note) -> str:
    """A note with its place: "data-dependent shape at train.py:88: upper bound used"."""
    where = f" at {printable(note.source)}" if note.source else ""
    name = note.code.replace("-", " ").replace("data dependent", "data-dependent")
    return f"{printable(name)}{where}: {printable(note.text)}"


def sum_up(notes: Iterable[Note]) -> str:
    """All values that were read from the device in one line; "" where there are none."""
    read = [note for note in notes if note.code == HARMLESS]
    if not read:
        return ""
    sources = list(dict.fromkeys(printable(note.source) for note in read if note.source))
    places = f": {listed(sources)}" if sources else ""
    values = "1 value was" if len(read) == 1 else f"{len(read)} values were"
    return f"{values} read from the device and replaced by a stand-in, which changes no size by itself{places}"


def shown_notes(notes: Sequence[Note]) -> list[Note]:
    """The notes, with one for all values that were read from the device."""
    summed_up = sum_up(notes)
    shown = [note for note in notes if note.code != HARMLESS]
    return [*shown, Note(HARMLESS, summed_up)] if summed_up else shown


def notes_of(results: Sequence[tuple[str, Sequence[Note]]]) -> list[Part]:
    """The notes of several results by name: once where one holds for all of them, with their names otherwise."""
    holds_for: dict[str, list[str]] = {}
    for name, notes in results:
        shown = [note_line(note) for note in notes if note.code != HARMLESS]
        for line in filter(None, dict.fromkeys([*shown, sum_up(notes)])):
            holds_for.setdefault(line, []).append(name)
    lines = [line if len(names) == len(results) else f"{', '.join(names)}: {line}" for line, names in holds_for.items()]
    return [Part("Notes", lines=tuple(lines))] if lines else []


def listed(names: list[str]) -> str:
    """The first few names, and how many more there are.

    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = len(names) - _NUM_LISTED
    return ", ".join(names[:_NUM_LISTED]) + (f" and {more} more" if more > 0 else "")
