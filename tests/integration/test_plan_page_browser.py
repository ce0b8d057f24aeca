"""The page of a plan in a real browser: the front, both timelines, the code and its button."""

import dataclasses
from itertools import pairwise
from pathlib import Path

import pytest

from memfit.core.estimate import Note
from memfit.core.plan import Point, Refusal
from memfit.core.settings import Settings
from memfit.reports.plan.code import format_code
from tests.browser import Browser
from tests.unit.reports.plan_builders import MOVES, make_easy_plan, make_plan, make_small_plan

pytestmark = pytest.mark.browser


def texts(page: Browser, selector: str) -> list[str]:
    return list(page.run(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)"))


def middle(page: Browser, selector: str) -> tuple[float, float]:
    box = page.run(
        f"(b => [b.x + b.width / 2, b.y + b.height / 2])(document.querySelector({selector!r}).getBoundingClientRect())"
    )
    return box[0], box[1]


def hidden(page: Browser, name: str) -> bool:
    return bool(page.run(f"document.getElementById({name!r}).hidden"))


def test_head_and_moves(browser: Browser, tmp_path: Path) -> None:
    page = browser.show(make_plan(), tmp_path)

    assert page.text("#badge").endswith("fits")
    assert page.text("#verdict") == "1.13 GiB -> 900.0 MiB (simulated), budget 900.0 MiB"
    assert page.count("#moves tbody tr") == 4
    cells = texts(page, "#moves tbody tr:first-child td")[1:]
    assert cells == ["same up to rounding", "310.0 MiBsimulated", "+21.0 msassumed"]
    assert page.text("#moves .caveat") == MOVES[0].caveat
    assert "Planned in 3.21 s" in page.text("#footer")


def test_the_front_has_every_plan_and_the_budget(browser: Browser, tmp_path: Path) -> None:
    page = browser.show(make_plan(), tmp_path)

    assert page.count("circle.point") == 10
    assert page.count("circle.point.chosen") == 1
    assert page.count("circle.point.verified") == 2
    assert page.text("#plot text.limit") == "budget: 900.0 MiB"
    assert page.count("#points tbody tr") == 10
    # The plan lies on the line of its budget: their peaks are the same.
    chosen, line = (
        page.run(f"document.querySelector('{name}').getAttribute('{key}')")
        for name, key in (("#plot .chosen", "cx"), ("#plot line.capacity", "x1"))
    )
    assert float(chosen) == pytest.approx(float(line), abs=0.01)


def test_less_memory_is_left_and_less_time_below(browser: Browser, tmp_path: Path) -> None:
    page = browser.show(make_plan(), tmp_path)

    places = page.run(
        "[...document.querySelectorAll('circle.point:not(.chosen)')]"
        ".map(c => [+c.getAttribute('cx'), +c.getAttribute('cy')])"
    )
    # The front begins with the largest memory.
    assert places == sorted(places, reverse=True)
    assert [y for _, y in places] == sorted((y for _, y in places), reverse=True)


def test_times_far_apart_have_a_logarithmic_scale(browser: Browser, tmp_path: Path) -> None:
    front = tuple(dataclasses.replace(point, seconds=0.02 * 2**index) for index, point in enumerate(make_plan().front))
    page = browser.show(make_plan(front=front), tmp_path)

    heights = page.run(
        "[...document.querySelectorAll('circle.point')].map(c => +c.getAttribute('cy')).sort((a, b) => a - b)"
    )
    steps = [after - before for before, after in pairwise(heights)]
    assert steps == pytest.approx([steps[0]] * 9)
    assert "logarithmic" in page.text("#plot text.strong")
    assert {"50 ms", "1 s", "10 s"} <= set(texts(page, "#plot text"))

    assert "logarithmic" not in browser.show(make_plan(), tmp_path).text("#plot text.strong")


def test_pointing_at_a_plan_names_it(browser: Browser, tmp_path: Path) -> None:
    page = browser.show(make_plan(), tmp_path)
    page.mouse("mouseMoved", *middle(page, "circle.point.chosen"))

    tip = page.text("#tip")
    assert not hidden(page, "tip")
    assert tip == "4 micro-batches, recompute 3 blocks, fusedmemory900.0 MiB (simulated)time203 ms (assumed)the plan"
    page.mouse("mouseMoved", 5, 5)
    assert hidden(page, "tip")


def test_arrows_move_between_plans(browser: Browser, tmp_path: Path) -> None:
    page = browser.show(make_plan(), tmp_path)
    page.run("document.getElementById('front').focus()")
    page.press("ArrowLeft")
    assert page.text("#tip").startswith("4 micro-batches, recompute")
    page.press("ArrowLeft")
    assert page.text("#tip").startswith("6 micro-batches")
    page.press("End")
    assert page.text("#tip").startswith("as it is")
    page.press("Escape")
    assert hidden(page, "tip")


@pytest.mark.parametrize("width", [1280, 400])
def test_labels_of_the_front_do_not_overlap(browser: Browser, tmp_path: Path, width: int) -> None:
    page = browser.show(make_plan(), tmp_path, width)

    boxes = page.run(
        "[...document.querySelectorAll('#plot text')].map(text => text.getBoundingClientRect())"
        ".map(box => [box.left, box.right, box.top, box.bottom])"
    )
    overlaps = [
        (a, b)
        for index, a in enumerate(boxes)
        for b in boxes[index + 1 :]
        if a[0] < b[1] and b[0] < a[1] and a[2] + 2 < b[3] and b[2] + 2 < a[3]
    ]
    assert len(boxes) > 5
    assert overlaps == []


def test_both_timelines_have_one_scale(browser: Browser, tmp_path: Path) -> None:
    page = browser.show(make_plan(), tmp_path)

    titles = texts(page, ".timeline h3")
    assert [title.split(":")[0] for title in titles] == ["Before", "After"]
    lines = page.run("[...document.querySelectorAll('.timeline line.capacity')].map(l => l.getAttribute('y1'))")
    assert len(lines) == 2
    assert lines[0] == lines[1]
    labels = page.run(
        "[...document.querySelectorAll('.timeline svg')]"
        ".map(s => [...s.querySelectorAll('text:not(.phase)')].map(t => t.textContent).join())"
    )
    assert labels[0] == labels[1]
    tops = page.run("[...document.querySelectorAll('.timeline path.reserved')].map(p => p.getBBox().y)")
    assert tops[0] < tops[1]


def test_categories_are_drawn_in_proportion(browser: Browser, tmp_path: Path) -> None:
    page = browser.show(make_plan(), tmp_path)

    widths = page.run("[...document.querySelectorAll('#categories tr:last-child .pair span')].map(s => s.offsetWidth)")
    assert widths[1] / widths[0] == pytest.approx(900 / 1160, rel=0.02)
    assert texts(page, "#categories tr:last-child td")[:3] == ["total", "1.13 GiB", "900.0 MiB"]


def test_the_code_can_be_copied(browser: Browser, tmp_path: Path) -> None:
    page = browser.show(make_plan(), tmp_path)
    assert page.text("#code") == format_code(make_plan())

    # A page in the background has no clipboard; what is selected then is what is copied.
    page.run("document.addEventListener('copy', () => (window.copied = getSelection().toString()))")
    page.run("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.run("document.getElementById('copy').click()")
    page.run("new Promise(done => setTimeout(done, 50))")

    assert page.text("#copy") in ("Copied", "Select and copy by hand")
    assert page.run("(window.copied ?? getSelection().toString()).trim()") == format_code(make_plan()).strip()


def test_without_times_there_is_a_list_only(browser: Browser, tmp_path: Path) -> None:
    page = browser.show(make_small_plan(), tmp_path)

    assert page.text("#badge").endswith("does not fit")
    assert hidden(page, "front")
    assert page.count("#points tbody tr") == 2
    assert "Times are unknown" in page.text("#front-text")
    assert hidden(page, "timelines-section")


def test_a_step_that_fits_has_little_to_show(browser: Browser, tmp_path: Path) -> None:
    page = browser.show(make_easy_plan(), tmp_path)

    assert hidden(page, "moves-section")
    assert hidden(page, "front-section")
    assert page.count(".timeline") == 1
    assert page.text("#refused") == "None."


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_wider_than_the_window(browser: Browser, tmp_path: Path, width: int) -> None:
    page = browser.show(make_plan(), tmp_path, width)

    assert page.run("document.documentElement.scrollWidth") <= width


def test_a_new_width_is_drawn_anew(browser: Browser, tmp_path: Path) -> None:
    page = browser.show(make_plan(), tmp_path)
    page.resize(500, 3600)
    page.run("new Promise(done => setTimeout(done, 100))")

    assert page.run("document.getElementById('plot').viewBox.baseVal.width") < 500
    assert page.count("circle.point") == 10


def test_names_are_text(browser: Browser, tmp_path: Path) -> None:
    evil = "<img src=x onerror='window.hit=1'>"
    move = dataclasses.replace(MOVES[0], title=evil, caveat=evil)
    front = (Point(1, 0.1, evil, Settings()), Point(2, 0.2, evil, Settings(micro_batches=2)))
    plan = make_plan(
        subject=evil, moves=(move,), front=front, refused=(Refusal(evil, evil),), notes=(Note(evil, evil, evil),)
    )

    page = browser.show(plan, tmp_path)
    page.mouse("mouseMoved", *middle(page, "circle.point"))

    assert page.count("img") == 0
    assert page.run("window.hit") is None
    for place in ("#headline", "#moves", "#tip", "#points", "#refused", "#notes", "#code"):
        assert evil in page.text(place)
