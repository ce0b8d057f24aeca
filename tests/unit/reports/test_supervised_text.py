import re

from memfit.reports.supervised_text import format_supervised
from tests.unit.core.supervised_builders import make_lost, make_supervised


def test_the_whole_run():
    lines = format_supervised(make_supervised()).splitlines()

    assert lines[0].startswith("train.py: completed after 2 attempts")
    assert lines[3] == "Attempts"
    assert re.split(r"  +", lines[4].strip()) == [
        "attempt",
        "run with",
        "time",
        "peak",
        "steps",
        "started from",
        "ended",
    ]
    assert "killed for its memory" in lines[5]
    assert lines[-1] == "  attempt 2 was to use micro-batches of at most 8 but used 16"


def test_one_attempt_needs_no_table():
    assert "Attempts" not in format_supervised(make_lost())
