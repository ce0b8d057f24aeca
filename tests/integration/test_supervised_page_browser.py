"""The page of a supervised run in a real browser: memory, its limit, events and attempts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from memfit.core.supervised import SupervisedRun
from memfit.reports.page import write_page
from tests.integration.test_page_browser import CHROMIUM, NAMES, Browser
from tests.unit.core.supervised_builders import make_lost, make_supervised

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason=f"no browser: none of {', '.join(NAMES)} is on PATH"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser shared by the tests of this file."""
    browser = Browser(tmp_path_factory.mktemp("chromium") / "profile")
    yield browser
    browser.close()


def show(browser: Browser, run: SupervisedRun, folder: Path, width: int = 1280) -> Browser:
    browser.resize(width, 2400)
    browser.open(write_page(run, folder / "run.html"))
    assert browser.problems == []
    assert len(browser.requests) == 1
    return browser


def test_a_run_that_got_through(browser: Browser, tmp_path: Path) -> None:
    page = show(browser, make_supervised(), tmp_path)

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
    page = show(browser, run, tmp_path)

    assert page.count("#planted") == 0
    assert page.count("#other") == 0
    assert "<b id=planted>" in page.text("#headline")
    assert "<img src=x id=other>" in page.text("#notes")


def test_a_narrow_window(browser: Browser, tmp_path: Path) -> None:
    page = show(browser, make_lost(), tmp_path, width=420)

    assert page.text("#badge").endswith("out of memory")
    assert page.run("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_run_that_was_never_seen(browser: Browser, tmp_path: Path) -> None:
    page = show(browser, make_supervised(history=(), limit_bytes=None), tmp_path)

    assert page.run("document.getElementById('memory-section').hidden")
    assert page.count("#attempts tbody tr") == 2
