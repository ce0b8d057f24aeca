"""The page of a real GPU's snapshot against its simulation, in a real browser."""

from pathlib import Path

import pytest

from memfit.snapshots.difference import DifferenceKind, Group, Levels, SnapshotDifference
from tests.browser import Browser

pytestmark = pytest.mark.browser


def test_tables_and_names_as_text(browser: Browser, tmp_path: Path) -> None:
    groups = (
        Group(
            DifferenceKind.MISSING,
            "aten.sum",
            "<b id=planted>net.py</b>:3",
            "",
            "gpu_reduce_kernel",
            5,
            5000,
            ((1000, 5),),
            1000,
        ),
        Group(DifferenceKind.INVENTED, "aten.clone", "net.py:4", "net.0", "", 2, 64, ((32, 2),), -64),
    )
    levels = Levels(1000, 0, 2**30, 2**30, 2**30)
    result = SnapshotDifference("s.pickle", "train.py", "a GPU", levels, levels, 995, 0, groups, True, 1, 0, 2, False)
    browser.show(result, tmp_path)

    assert browser.text("#headline") == "memfit diff: s.pickle"
    # Memory, and a table for each kind that there is.
    assert browser.count("#groups table") == 3
    assert browser.count("#groups tbody tr") == 6
    assert browser.count("#planted") == 0
    assert "<b id=planted>net.py" in browser.text("#groups")
