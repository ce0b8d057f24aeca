"""A table for a terminal of any width. Too narrow, it drops bars, wraps text, then lists each row; figures stay whole.

rich alone would crop figures: a narrow terminal would show "86" of "86.3%".
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.measure import Measurement
    from rich.text import Text

BAR_WIDTH = 20
_LEAST_BAR = 8
_GAP = 2
# A text may be folded to this width; names of modules and lines of code are still told apart then.
_LEAST_TEXT = 14


class _Bar:
    """A bar of a given share of the width there is, in ASCII where the console has nothing better."""

    def __init__(self, share: float, style: str) -> None:
        self.share, self.style = share, style

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        sign = "#" if options.ascii_only else "\u2588"
        yield Text(sign * round(self.share * options.max_width), style=self.style)


class FittingTable:
    """Rows of cells, laid out when the width is known.

    Args:
        columns: their titles; those of figures begin with ">", are flush right and never folded.
        rows: a cell for each column.
        remarks: for each row, lines that stand below its first cell.
        bars: for each row, share and style of a bar; none by default.
        least_width: of the first column, so that lists below each other line up where there is room.
    """

    def __init__(
        self,
        columns: Sequence[str],
        rows: "Sequence[Sequence[str | Text]]",
        *,
        remarks: Sequence[Sequence[str]] = (),
        bars: Sequence[tuple[float, str]] = (),
        least_width: int = 0,
    ) -> None:
        from rich.text import Text

        self._titles = [title.removeprefix(">") for title in columns]
        self._is_figure = [title.startswith(">") for title in columns]
        self._rows = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
        self._remarks = remarks or [() for _ in rows]
        self._bars = [_Bar(*bar) for bar in bars]
        self._least_width = least_width

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        width, natural = options.max_width, self._natural()
        room = width - _total(natural)
        if room >= 0:
            for_first = min(room, max(0, self._wished_width() - natural[0]))
            bar_width = min(BAR_WIDTH, room - for_first - _GAP)
            widths = [natural[0] + for_first, *natural[1:]]
            yield self._table(widths, bar_width if self._bars and bar_width >= _LEAST_BAR else 0)
        elif _total(self._least(natural)) <= width:
            yield self._table(self._shrunk(natural, width))
        else:
            yield self._stacked(width)

    def __rich_measure__(self, console: "Console", options: "ConsoleOptions") -> "Measurement":
        from rich.measure import Measurement

        natural = self._natural()
        wanted = _total([max(natural[0], self._wished_width()), *natural[1:]])
        wanted += _GAP + BAR_WIDTH if self._bars else 0
        return Measurement(min(_LEAST_TEXT, options.max_width), min(wanted, options.max_width))

    def _natural(self) -> list[int]:
        from rich.cells import cell_len

        return [
            max(cell_len(title), *(max(map(cell_len, row[index].plain.split("\n"))) for row in self._rows), 0)
            for index, title in enumerate(self._titles)
        ]

    def _wished_width(self) -> int:
        """Of the first column: lists line up, and remarks stand in one line."""
        from rich.cells import cell_len

        longest = max((cell_len(remark) + 2 for remarks in self._remarks for remark in remarks), default=0)
        return max(self._least_width, longest)

    def _least(self, natural: list[int]) -> list[int]:
        return [
            width if is_figure else min(width, _LEAST_TEXT)
            for width, is_figure in zip(natural, self._is_figure, strict=True)
        ]

    def _shrunk(self, natural: list[int], width: int) -> list[int]:
        """The widths of the columns, the widest texts made narrower until all fit."""
        widths, least = list(natural), self._least(natural)
        while _total(widths) > width:
            widest = max(range(len(widths)), key=lambda index: widths[index] - least[index])
            widths[widest] -= 1
        return widths

    def _table(self, widths: list[int], bar_width: int = 0) -> "RenderableType":
        from rich.console import Group
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
        table.show_header = any(self._titles)
        for title, width, is_figure in zip(self._titles, widths, self._is_figure, strict=True):
            justify = "right" if is_figure else "left"
            table.add_column(Text(title), width=width, justify=justify, no_wrap=is_figure, overflow="fold")  # type: ignore[arg-type]
        if bar_width:
            table.add_column(width=bar_width)
        for index, (row, remarks) in enumerate(zip(self._rows, self._remarks, strict=True)):
            first, *rest = row
            below = [Padding(Text(remark, style="dim"), (0, 0, 0, 2), expand=False) for remark in remarks]
            table.add_row(Group(first, *below), *rest, *(self._bars[index : index + 1] if bar_width else ()))
        return table

    def _stacked(self, width: int) -> "RenderableType":
        """Every row as lines of its own: its name, then a title and a cell each."""
        from rich.console import Group
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        parts: list[RenderableType] = []
        heads = {index for index, title in enumerate(self._titles) if not title}
        if all(len(row[index].plain) < 2 for row in self._rows for index in heads):
            # Marks alone don't say what a row is about; the first column with a title does.
            heads.add(next((index for index, title in enumerate(self._titles) if title), 0))
        for row, remarks in zip(self._rows, self._remarks, strict=True):
            named = [row[index] for index in sorted(heads) if row[index].plain]
            parts.append(Text(" ").join(named) if named else Text("-"))
            table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, show_header=False)
            # Long titles fold before a figure would.
            table.add_column(style="dim", overflow="fold", max_width=(width - 2 - _GAP) // 2)
            table.add_column(overflow="fold")
            for index, title in enumerate(self._titles):
                if index not in heads:
                    table.add_row(Text(title), row[index])
            parts.append(Padding(table, (0, 0, 0, 2), expand=False))
            parts += [Padding(Text(remark, style="dim"), (0, 0, 0, 2), expand=False) for remark in remarks]
        return Group(*parts)


def _total(widths: list[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)
