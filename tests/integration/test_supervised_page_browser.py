"""The page of a supervised run in a real browser: memory, its limit, events and attempts."""

from pathlib import Path

import pytest

from tests.browser import Browser
from tests.unit.core.supervised_builders import make_lost, make_supervised

pytestmark = pytest.mark.browser


def test_a_run_that_got_through(browser: Browser, tmp_path: Path) -> None:
    page = browser.show(make_supervised(), tmp_path)

    assert page.text("#badge").endswith("completed")
    assert page.text("#headline") == "memfit run: train.py --lr 1"
    assert page.text("#plot text.limit") == "limit of the container: 1.00 GiB"
    # Two attempts: the first has two samples, the second one, which is a dot.
    assert page.count("#plot rect.attempt") == 2
    assert page.count("#plot path.line.series-0") == 1
    assert page.count("#plot path.line.series-2") == 1
    assert page.count("#plot circle.dot") >= 1
    assert page.count("#plot circle.sign.bad") == 1
    assert page.count("#attempts tbody tr") == 2
    assert page.count("#events tbody tr") == 2


def test_names_are_text(browser: Browser, tmp_path: Path) -> None:
    run = make_supervised(script="<b id=planted>train.py</b>", notes=("<img src=x id=other>",))
    page = browser.show(run, tmp_path)

    assert page.count("#planted") == 0
    assert page.count("#other") == 0
    assert "<b id=planted>" in page.text("#headline")
    assert "<img src=x id=other>" in page.text("#notes")


def test_a_narrow_window(browser: Browser, tmp_path: Path) -> None:
    page = browser.show(make_lost(), tmp_path, width=420)

    assert page.text("#badge").endswith("out of memory")
    assert page.run("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_run_that_was_never_seen(browser: Browser, tmp_path: Path) -> None:
    page = browser.show(make_supervised(history=(), limit_bytes=None), tmp_path)

    assert page.run("document.getElementById('memory-section').hidden")
    assert page.count("#attempts tbody tr") == 2
