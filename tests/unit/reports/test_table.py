import io

import pytest
from rich.console import Console
from rich.text import Text

from memfit.reports.table import FittingTable

COLUMNS = ("name", "maker", ">memory", ">speed")
ROWS = [
    ("a100-40gb", "NVIDIA A100 40GB with a long title", "39.5 GiB", "1.41 TiB/s"),
    ("t4", "NVIDIA", "14.6 GiB", "-"),
]


def drawn(table, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_with_room_it_is_a_plain_table():
    assert drawn(FittingTable(COLUMNS, ROWS), 100) == [
        "name       maker                                 memory       speed",
        "a100-40gb  NVIDIA A100 40GB with a long title  39.5 GiB  1.41 TiB/s",
        "t4         NVIDIA                              14.6 GiB           -",
    ]


def test_texts_are_folded_first():
    assert drawn(FittingTable(COLUMNS, ROWS), 50) == [
        "name       maker                memory       speed",
        "a100-40gb  NVIDIA A100 40GB   39.5 GiB  1.41 TiB/s",
        "           with a long title",
        "t4         NVIDIA             14.6 GiB           -",
    ]


def test_names_that_are_whole_are_never_folded():
    titles = ("|name", "maker", ">memory", ">speed")

    assert drawn(FittingTable(titles, ROWS), 100) == drawn(FittingTable(COLUMNS, ROWS), 100)
    for width in range(30, 60):
        assert any("a100-40gb" in line for line in drawn(FittingTable(titles, ROWS), width))
    # Where the name alone leaves no room for a table, its rows have lines of their own.
    assert drawn(FittingTable(("|name", "maker"), [("a.name.of.thirty.characters.ok", "someone")]), 36) == [
        "a.name.of.thirty.characters.ok",
        "  maker  someone",
    ]


def test_at_last_every_row_has_lines_of_its_own():
    assert drawn(FittingTable(COLUMNS, ROWS[1:]), 20) == [
        "t4",
        "  maker   NVIDIA",
        "  memory  14.6 GiB",
        "  speed   -",
    ]


def test_a_mark_stays_with_its_row():
    table = FittingTable(("", ">batch size", ">peak (simulated)", ">fits"), [(">", "8", "1.00 GiB", "yes")])

    assert drawn(table, 28) == ["> 8", "  peak          1.00 GiB", "  (simulated)", "  fits          yes"]


@pytest.mark.parametrize(("width", "bar"), [(60, 20), (42, 9), (34, 0)])
def test_bars_take_what_is_left(width, bar):
    table = FittingTable(("", ">"), [("activation of layers", "656.0 MiB")], bars=[(1.0, "red")])

    assert drawn(table, width)[0].count("\u2588") == bar


def test_remarks_stand_below_in_one_line_where_there_is_room():
    table = FittingTable(("move", ">saves"), [("a", "1 B")], remarks=[("a remark on it",)])

    assert drawn(table, 60) == ["move              saves", "a                   1 B", "  a remark on it"]


def test_cells_may_have_a_style_of_their_own():
    console = Console(file=io.StringIO(), width=40, force_terminal=True, color_system="standard")
    console.print(FittingTable(("",), [(Text("yes", style="green"),)]))

    assert "\x1b[32myes" in console.file.getvalue()
