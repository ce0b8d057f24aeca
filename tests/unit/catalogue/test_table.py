import runpy
from pathlib import Path

import pytest

from memfit.catalogue.rows import read_rows
from memfit.catalogue.table import render_document

PAGE = Path(__file__).parents[3] / "docs" / "devices.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == render_document(), (
        "run `python -m memfit.catalogue.table > docs/devices.md`"
    )


@pytest.mark.parametrize("row", read_rows(), ids=lambda row: row.device.name)
def test_every_device_and_its_source_are_on_the_page(row):
    lines = [line for line in render_document().splitlines() if line.startswith(f"| `{row.device.name}` |")]
    assert any(row.device.source in line and row.device.date in line for line in lines)


def test_tables_are_well_formed():
    # A cell with a bar in it would shift the rest of its line.
    widths = {}
    for line in render_document().splitlines():
        if line.startswith("| name "):
            width = line.count("|")
        if line.startswith("|"):
            widths.setdefault(width, set()).add(line.count("|"))
    assert all(counts == {width} for width, counts in widths.items())
    assert len(widths) >= 2


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_module_prints_the_page(capsys):
    runpy.run_module("memfit.catalogue.table", run_name="__main__")
    assert capsys.readouterr().out == render_document()
