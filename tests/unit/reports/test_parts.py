import pytest

from memfit.core.estimate import Note
from memfit.reports.parts import Figure, Grid, Line, Part, Report, Row, format_grid, listed, note_line, sum_up


def test_a_report_is_a_verdict_lines_and_parts():
    parts = [
        Part("Rows", rows=(Row("parameter", 1024, 0.5),)),
        Part("Sizes", rows=(Row("batch", 2048, 0.5),), with_share=False, figures=(Figure("peak", "1 B", "simulated"),)),
        Part("Table", grid=Grid(("a", ">b"), (Line(("x", "1")),)), lines=("below",)),
    ]

    assert str(Report("verdict", ["detail"], parts, True)).split("\n") == [
        "verdict",
        "  detail",
        "",
        "Rows",
        "  parameter                                     1.00 KiB   50.0%",
        "",
        "Sizes",
        "  batch                                         2.00 KiB",
        "  peak                                               1 B  simulated",
        "",
        "Table",
        "  a  b",
        "  x  1",
        "  below",
    ]


def test_words_without_shares_are_not_cut():
    name = "model while it is built, before it moves to the device"
    cut, whole = (
        str(Report("", [], [Part("", rows=(Row(name, 1024, 0.5),), with_share=s)], True)) for s in (True, False)
    )

    assert "..." in cut
    assert f"{name} " in whole and "1.00 KiB" in whole


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (Part("empty"), False),
        (Part("empty table", grid=Grid(("a",), ())), False),
        (Part("table", grid=Grid(("a",), (Line(("x",)),))), True),
        (Part("lines", lines=("x",)), True),
        (Part("rows", rows=(Row("x", 1, 1.0),)), True),
    ],
)
def test_what_holds_nothing_is_known(part, expected):
    assert part.holds_something is expected


def test_long_cells_are_wrapped_and_stay_in_their_column():
    text = "many words that will never fit into a single cell of this table, however wide"
    lines = format_grid(Grid(("move", ">saves"), (Line((text, "5 B"), ("remark",)), Line(("short", "10 B")))))

    assert len(lines) == 5
    assert " ".join((lines[1].removesuffix("5 B").strip(), lines[2])) == text
    assert lines[1].endswith("5 B")
    assert lines[3] == "  remark"
    assert len(lines[0]) == len(lines[1]) == len(lines[4])


def test_empty_cells_keep_their_place():
    assert format_grid(Grid(("", "b"), (Line(("", "x")), Line((">", "y"))))) == ["   b", "   x", ">  y"]


def test_notes_name_their_place():
    assert note_line(Note("data-dependent-shape", "upper bound used", "a.py:3")) == (
        "data-dependent shape at a.py:3: upper bound used"
    )
    assert note_line(Note("time-model", "peak rates\x1b")) == "time model: peak rates\\x1b"


def test_few_names_are_listed_whole():
    assert listed([]) == ""
    assert listed(["a", "b", "c"]) == "a, b, c"
    assert listed(["a", "b", "c", "d"]) == "a, b, c and 1 more"


def test_stand_ins_are_one_line():
    notes = [Note("stand-in-value", "x", f"a.py:{line}") for line in (1, 1, 2)]

    assert sum_up(notes) == (
        "3 values were read from the device and replaced by a stand-in, which changes no size by itself: a.py:1, a.py:2"
    )
    assert sum_up(notes[:1]).startswith("1 value was read")
    assert sum_up([Note("other", "x")]) == ""
