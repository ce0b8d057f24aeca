"""The documentation site builds without a warning, and its pages need nothing from elsewhere."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}
"""Elements that a browser loads by itself, and the attribute that says from where."""


class Loads(HTMLParser):
    """Collects what a page makes a browser load."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if tag in LOADED and attributes.get("rel") not in ("canonical", "prev", "next"):
            self.addresses.append(attributes.get(LOADED[tag]) or "")


def loaded_from_elsewhere(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    parser = Loads()
    parser.feed(text)
    styles = re.findall(r"(?:url\(|@import )['\"]?((?:https?:)?//[^'\")\s]+)", text)
    return [address for address in parser.addresses if re.match(r"(https?:)?//", address)] + styles


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_no_page_needs_the_network(site):
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]

    assert len(pages) > 60
    assert {str(page): found for page in pages if (found := loaded_from_elsewhere(page))} == {}


def test_what_comes_from_elsewhere_is_noticed(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        '<a href="https://example.com/read">fine</a><script src="../a.js"></script>'
        '<script src="https://example.com/b.js"></script><link rel="stylesheet" href="//example.com/c.css">'
        "<style>@import 'https://example.com/d.css'; p {background: url(https://example.com/e.png)}</style>"
    )

    assert [address.rpartition("/")[2] for address in loaded_from_elsewhere(page)] == [
        "b.js",
        "c.css",
        "d.css",
        "e.png",
    ]


def test_search_works_on_pages_opened_from_disk(site):
    assert "Micro-batches" in (site / "search" / "search_index.js").read_text(encoding="utf-8")
    start = (site / "index.html").read_text(encoding="utf-8")
    assert 'src="javascripts/iframe-worker.js"' in start


def test_every_public_name_has_its_docstring_on_a_page(site):
    import memfit

    reference = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))
    names = [name for name in memfit.__all__ if name != "__version__"]
    assert [name for name in names if f'id="memfit.{name}"' not in reference] == []
