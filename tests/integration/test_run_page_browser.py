"""The page of a dry run in a real browser: what happened to the script, in each kind of end."""

from pathlib import Path

import pytest

from memfit.core.dryrun import Outcome
from tests.browser import Browser
from tests.unit.reports.run_builders import ADVICE, make_dead_run, make_failure, make_run, make_scan

pytestmark = pytest.mark.browser


def test_a_script_that_died(browser: Browser, tmp_path: Path) -> None:
    page = browser.show(make_dead_run(), tmp_path)

    assert page.text("#badge").endswith("does not fit")
    assert "would run out of memory on" in page.text("#verdict")
    assert page.text("#failure").startswith("aten.convolution in layer2.3.conv asked for 64.0 MiB")
    assert page.text("#run pre") == "train.py:88  logits = model(tokens)"
    assert page.count("#run table") == 2
    assert page.count("#run .wide tbody tr") == 3
    assert page.run("[...document.querySelectorAll('#run .wide .good')].map(e => e.textContent)") == ["fits"]


def test_a_script_that_runs_has_no_section_to_fill(browser: Browser, tmp_path: Path) -> None:
    page = browser.show(make_run(), tmp_path)

    assert page.run("document.getElementById('run').hidden") is True
    assert page.run("document.getElementById('host-section').hidden") is True
    assert page.text("#badge") == "✓ fits (99%)"
    assert "run in 8.2 s" in page.text("#footer")


def test_a_scan(browser: Browser, tmp_path: Path) -> None:
    page = browser.show(make_run(scan=make_scan(), advice=ADVICE, redirected={"a.pt": "b/a.pt"}), tmp_path)

    titles = page.run("[...document.querySelectorAll('#run h3')].map(e => e.textContent)")
    assert titles == [
        "Batches of the script's loader",
        "Held in step 2, forward",
        "Changes that would save most, each alone",
        "Files that went elsewhere, so that yours were not overwritten",
    ]


def test_a_script_that_failed(browser: Browser, tmp_path: Path) -> None:
    page = browser.show(make_run(outcome=Outcome.FAILED, num_steps=1, error="ValueError: no"), tmp_path)

    assert page.text("#badge").endswith("failed")
    assert page.text("#run li").startswith("until then: peak")


def test_names_are_text(browser: Browser, tmp_path: Path) -> None:
    evil = "<img src=x onerror='window.hit=1'>"
    run = make_dead_run(script=evil, failures=(make_failure(code=evil, message=evil, by_category={evil: 1}),))

    page = browser.show(run, tmp_path)

    assert page.count("img") == 0
    assert page.run("window.hit") is None
    assert evil in page.text("#run pre")


def test_tables_scroll_where_there_is_no_room(browser: Browser, tmp_path: Path) -> None:
    browser.show(make_dead_run(), tmp_path)
    browser.resize(420, 900)

    assert browser.run("document.documentElement.scrollWidth <= window.innerWidth") is True
