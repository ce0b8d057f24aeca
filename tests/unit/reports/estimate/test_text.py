from pathlib import Path

from memfit.core.estimate import HostMemory, Note
from memfit.core.timeline import Category, Phase, Timeline
from memfit.core.units import MIB
from memfit.reports.estimate.text import format_estimate
from tests.unit.reports.builders import MYSTERY, Recorder, make_estimate, make_failed_estimate

GOLDEN = Path(__file__).parents[1] / "golden"


def test_text_is_as_agreed():
    """The whole text; to change it, write `format_estimate(make_estimate())` to the golden file and read the change."""
    assert format_estimate(make_estimate()) + "\n" == (GOLDEN / "estimate.txt").read_text(encoding="utf-8")


def test_text_of_a_failure_is_as_agreed():
    assert format_estimate(make_failed_estimate()) + "\n" == (GOLDEN / "failed.txt").read_text(encoding="utf-8")


def test_text_is_ascii_and_narrow():
    text = format_estimate(make_estimate(notes=()))

    assert text.isascii()
    assert "Notes" not in text
    assert not text.endswith("\n")


def test_unknown_is_spelled_out():
    text = format_estimate(make_estimate(device=MYSTERY, context_bytes=0, host=HostMemory({})))

    assert "unknown usable on Mystery accelerator: whether it fits is unknown" in text
    assert "Host memory: unknown" in text
    assert " 0 B" not in text


def test_names_cannot_steer_the_terminal():
    # GIVEN names with escape sequences
    bad = "\x1b[31mred\n"
    record = Recorder()
    record.mark(Phase.SETUP, 0)
    record.allocate(MIB, Category.PARAMETER, bad, bad, bad)

    # WHEN they are written
    text = format_estimate(make_estimate(record.timeline(), subject=bad, notes=(Note(bad, bad, bad),)))

    # THEN only the text's own line ends are left
    assert "\x1b" not in text
    assert all(line.isprintable() for line in text.split("\n"))


def test_nothing_allocated_is_no_error():
    assert "Peak nothing is allocated" in format_estimate(make_estimate(Timeline((), 0)))
