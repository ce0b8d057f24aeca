import pytest

from memfit.catalogue.rows import read_rows
from scripts.generate_device_docs import PAGE, render_document


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == render_document(), "run `python scripts/generate_device_docs.py`"


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
