import pytest

from memfit.core.reporters import Reporters


def test_until_something_is_set_a_result_is_a_line_and_has_no_page():
    reporters = Reporters()

    assert reporters.describe("3") == "'3'"
    with pytest.raises(NotImplementedError, match="import memfit"):
        reporters.write_page(3, "page.html")


def test_what_is_set_is_used():
    pages = []
    reporters = Reporters()

    reporters.use(lambda result: f"more about {result}", lambda result, path: pages.append((result, path)))
    reporters.write_page(3, "page.html")

    assert reporters.describe(3) == "more about 3"
    assert pages == [(3, "page.html")]
