"""A table for a terminal of any width. Too narrow, it drops bars, wraps text, then lists each row; figures stay whole.

rich alone would crop figures: a narrow terminal would show "86" of "86.3%".
"""

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
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

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        sign = "#" if options.ascii_only else "\u2588"
        yield Text(sign * round(self.share * options.max_width), style=self.style)


class FittingTable:
    """Rows of cells, laid out when the width is known.

    Args:
        columns: their titles; those of figures begin with ">" and are flush right. They and columns whose titles begin
            with "|" are never folded.
        rows: a cell for each column.
        remarks: for each row, lines that stand below its first cell.
        bars: for each row, share and style of a bar; none by default.
        least_width: of the first column, so that lists below each other line up where there is room.
    """

    def __init__(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str | Text]],
        *,
        remarks: Sequence[Sequence[str]] = (),
        bars: Sequence[tuple[float, str]] = (),
        least_width: int = 0,
    ) -> None:
        self._titles = [title.lstrip(">|") for title in columns]
        self._is_figure = [title.startswith(">") for title in columns]
        self._is_whole = [title.startswith((">", "|")) for title in columns]
        self._rows = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
        self._remarks = remarks or [() for _ in rows]
        self._bars = [_Bar(*bar) for bar in bars]
        self._natural = [
            max([cell_len(title), *(cell_len(line) for row in self._rows for line in row[index].plain.split("\n"))])
            for index, title in enumerate(self._titles)
        ]
        # Lists line up, and remarks stand in one line.
        self._wished = max([self._natural[0], least_width, *(cell_len(r) + 2 for row in remarks for r in row)])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, widths = options.max_width, list(self._natural)
        room = width - _total(widths)
        if room >= 0:
            widths[0] = min(widths[0] + room, self._wished)
            bar_width = min(BAR_WIDTH, width - _total(widths) - _GAP)
            yield self._table(widths, bar_width if self._bars and bar_width >= _LEAST_BAR else 0)
            return
        least = [
            width if is_whole else min(width, _LEAST_TEXT)
            for width, is_whole in zip(widths, self._is_whole, strict=True)
        ]
        if _total(least) > width:
            yield self._stacked(width)
            return
        # The widest texts are made narrower until all fit.
        while _total(widths) > width:
            widths[max(range(len(widths)), key=lambda index: widths[index] - least[index])] -= 1
        yield self._table(widths)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        wanted = _total([self._wished, *self._natural[1:]]) + (_GAP + BAR_WIDTH if self._bars else 0)
        return Measurement(min(_LEAST_TEXT, options.max_width), min(wanted, options.max_width))

    def _table(self, widths: list[int], bar_width: int = 0) -> RenderableType:
        table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
        table.show_header = any(self._titles)
        for title, width, is_figure, is_whole in zip(
            self._titles, widths, self._is_figure, self._is_whole, strict=True
        ):
            justify = "right" if is_figure else "left"
            table.add_column(Text(title), width=width, justify=justify, no_wrap=is_whole, overflow="fold")  # type: ignore[arg-type]
        if bar_width:
            table.add_column(width=bar_width)
        for index, (row, remarks) in enumerate(zip(self._rows, self._remarks, strict=True)):
            first, *rest = row
            below = [Padding(Text(remark, style="dim"), (0, 0, 0, 2), expand=False) for remark in remarks]
            table.add_row(Group(first, *below), *rest, *(self._bars[index : index + 1] if bar_width else ()))
        return table

    def _stacked(self, width: int) -> RenderableType:
        """Every row as lines of its own: its name, then a title and a cell each."""
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
