"""The page of an estimate in a real browser."""

import dataclasses
import json
from itertools import accumulate
from pathlib import Path

import pytest

from memfit.core.estimate import Estimate, Note
from memfit.core.timeline import Category, Phase, Timeline
from memfit.core.units import MIB, format_size
from memfit.reports.estimate.payload import build_payload
from memfit.reports.page import write_page
from tests.browser import Browser
from tests.unit.core.supervised_builders import make_supervised
from tests.unit.reports import builders
from tests.unit.reports.plan_builders import make_plan
from tests.unit.reports.run_builders import make_dead_run

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def estimate() -> Estimate:
    """A step that fits."""
    return builders.make_estimate()


@pytest.fixture
def page(browser: Browser, estimate: Estimate, tmp_path: Path) -> Browser:
    """The browser with the estimate's page open."""
    browser.resize(1280, 1600)
    browser.open(write_page(estimate, tmp_path / "memory.html"))
    return browser


def point(browser: Browser, tick: int, num_ticks: int) -> tuple[float, float]:
    """Where a tick is on the screen: the areas span the whole plot."""
    box = browser.run(
        "(b => [b.left, b.top, b.width, b.height])(document.querySelector('path.area').getBoundingClientRect())"
    )
    left, top, width, height = box
    return left + width * (tick + 0.5) / num_ticks, top + height / 2


def test_page_loads_from_disk_without_complaints_or_requests(page: Browser) -> None:
    # GIVEN the page opened from a file
    # THEN nothing is logged and nothing but the file itself is fetched
    assert page.problems == []
    assert len(page.requests) == 1
    assert page.requests[0].startswith("file://")
    assert page.count("[src], link, a[href], image, use") == 0


def test_console_errors_are_seen(page: Browser) -> None:
    """The check above can fail: an error logged by the page reaches it."""
    page.run("console.error('seen')")

    assert any("seen" in problem for problem in page.problems)


def test_policy_blocks_injected_scripts_and_requests(page: Browser) -> None:
    # WHEN markup with a handler and a remote picture gets into the page all the same
    image = '<img src="https://example.invalid/x.png" onerror="window.hit=1">'
    page.run(f"document.body.insertAdjacentHTML('beforeend', {json.dumps(image)})")
    page.run("new Promise(done => setTimeout(done, 100))")

    # THEN neither runs
    assert page.run("window.hit") is None
    assert any("Content Security Policy" in problem for problem in page.problems)


def test_chart_has_an_area_per_category_and_a_line_per_curve(page: Browser, estimate: Estimate) -> None:
    categories = {str(block.category) for block in estimate.timeline.blocks}
    names = page.run("[...document.querySelectorAll('path.area')].map(path => path.dataset.name)")

    assert sorted(names) == sorted([*categories, "CUDA context"])
    assert page.run("[...document.querySelectorAll('path.line')].map(p => p.dataset.name)") == ["allocated", "reserved"]
    assert page.count("rect.band") == len(estimate.timeline.marks)


def test_peak_label_and_verdict_match_the_estimate(page: Browser, estimate: Estimate) -> None:
    assert page.text("#peak-label") == f"peak: {format_size(estimate.peak_bytes)}"
    assert page.text("#verdict").startswith(f"{format_size(estimate.peak_bytes)} needed")
    assert "fits" in page.text("#badge")
    assert page.text("title").startswith("memfit: ResNet")


def test_sizes_read_as_in_the_text(page: Browser, estimate: Estimate) -> None:
    # GIVEN the view by category
    page.run("[...document.querySelectorAll('#views button')].at(-1).click()")

    # THEN every size of the table is worded as Python words it
    cells = page.run("[...document.querySelectorAll('#breakdown td:nth-child(2)')].map(cell => cell.textContent)")
    sizes = sorted(estimate.breakdown.by_category.values(), reverse=True)
    assert cells == [format_size(size) for size in sizes]


def test_peak_is_pinned_at_first(page: Browser, estimate: Estimate) -> None:
    assert page.text("#pinned-title") == f"Largest live blocks at tick {estimate.peak_tick:,}, the peak"
    largest = max(block.size_bytes for block in estimate.timeline.live_at(estimate.peak_tick))
    assert page.text("#pinned td") == format_size(largest)


def test_address_pins_a_moment(browser: Browser, estimate: Estimate, tmp_path: Path) -> None:
    browser.open(write_page(estimate, tmp_path / "memory.html"), "#tick=123")

    assert browser.text("#pinned-title") == "Largest live blocks at tick 123"
    event = next(b for b in estimate.timeline.blocks if 123 in (b.start, b.end))
    assert event.op in browser.text("#pinned-event")
    assert browser.count("#pinned tbody tr") == 10


def test_hover_shows_the_moment_and_click_pins_it(page: Browser, estimate: Estimate) -> None:
    # GIVEN the pointer over the peak
    timeline = estimate.timeline
    x, y = point(page, estimate.peak_tick, timeline.num_ticks)

    # WHEN it rests there
    page.mouse("mouseMoved", x, y)

    # THEN the tip tells the tick, the event and the totals
    tip = page.text("#tip")
    assert page.run("document.getElementById('tip').hidden") is False
    assert f"Tick {estimate.peak_tick:,}" in tip
    assert estimate.peak_block is not None
    assert estimate.peak_block.op in tip
    for category, size in timeline.breakdown(estimate.peak_tick, lambda block: str(block.category)).items():
        assert f"{category}{format_size(size)}" in tip
    assert f"allocated{format_size(estimate.allocated_peak_bytes)}" in tip

    # WHEN another moment is clicked
    x, y = point(page, 40, timeline.num_ticks)
    page.mouse("mouseMoved", x, y)
    page.mouse("mousePressed", x, y)
    page.mouse("mouseReleased", x, y)

    # THEN it is pinned, in the list and in the address
    pinned = int(page.run("location.hash").removeprefix("#tick="))
    assert abs(pinned - 40) <= 5
    assert page.text("#pinned-title") == f"Largest live blocks at tick {pinned}"


def test_keyboard_moves_and_pins(page: Browser, estimate: Estimate) -> None:
    page.run("document.getElementById('chart').focus()")
    page.press("Home")
    page.press("ArrowRight")
    page.press("Enter")

    assert page.text("#pinned-title") == "Largest live blocks at tick 1"
    page.press("p")
    assert f"Tick {estimate.peak_tick:,}" in page.text("#tip")


def test_treemap_zooms_in_and_out(page: Browser) -> None:
    # GIVEN the whole peak
    label = "[...document.querySelectorAll('.cell')].find(cell => cell.ariaLabel.startsWith('layer1:'))"
    before = page.count(".cell")

    # WHEN a module is opened
    page.run(f"{label}.click()")

    # THEN its children fill the map
    assert page.run("document.querySelector('[aria-current]').textContent") == "layer1"
    assert page.count(".cell") == 13

    # WHEN the first crumb is chosen, everything is back
    page.run("document.querySelector('#crumbs button').click()")
    assert page.count(".cell") == before


def test_treemap_cells_are_proportional(page: Browser, estimate: Estimate) -> None:
    area = page.run(
        "(cell => cell.offsetWidth * cell.offsetHeight)"
        "([...document.querySelectorAll('.cell')].find(cell => cell.ariaLabel.startsWith('layer1:')))"
        " / (map => map.offsetWidth * map.offsetHeight)(document.getElementById('map'))"
    )
    size = sum(size for name, size in estimate.breakdown.by_module.items() if name.startswith("layer1."))
    assert area == pytest.approx(size / estimate.peak_bytes, rel=0.02)


def test_table_sorts_and_switches(page: Browser) -> None:
    names = "[...document.querySelectorAll('#breakdown td:first-child')].map(cell => cell.textContent)"

    page.run("document.querySelector('#breakdown th button').click()")
    ascending = page.run(names)
    assert ascending.index("layer1.2.conv") < ascending.index("layer1.10.conv")
    assert page.run("document.querySelector('#breakdown th').ariaSort") == "ascending"

    page.run("document.querySelectorAll('#views button')[2].click()")
    assert "model.py:31" in page.run(names)


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_wider_than_the_window(browser: Browser, estimate: Estimate, tmp_path: Path, width: int) -> None:
    browser.resize(width, 1600)
    browser.open(write_page(estimate, tmp_path / "memory.html"))

    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.problems == []


def test_chart_labels_do_not_overlap(browser: Browser, tmp_path: Path) -> None:
    # GIVEN a capacity just above the peak, on a narrow screen
    device = dataclasses.replace(builders.RTX_3090, usable_bytes=1200 * MIB)
    browser.resize(400, 1600)
    browser.open(write_page(builders.make_estimate(device=device), tmp_path / "memory.html"))

    # THEN no two texts of the chart share a place
    boxes = browser.run(
        "[...document.querySelectorAll('#plot text')].map(text => text.getBoundingClientRect())"
        ".map(box => [box.left, box.right, box.top, box.bottom])"
    )
    overlaps = [
        (a, b)
        for index, a in enumerate(boxes)
        for b in boxes[index + 1 :]
        if a[0] < b[1] and b[0] < a[1] and a[2] + 2 < b[3] and b[2] + 2 < a[3]
    ]
    assert overlaps == []
    assert browser.text("text.limit") == "usable: 1.17 GiB"


def test_a_label_without_room_is_left_to_the_legend(browser: Browser, tmp_path: Path) -> None:
    # GIVEN a script that dies at once of a limit that its curve crosses twice
    browser.resize(400, 1600)
    browser.open(write_page(make_dead_run(), tmp_path / "run.html"))

    # THEN nothing is written across the curve, and the legend says what the line is
    assert browser.count("line.capacity") == 1
    assert browser.count("text.limit") == 0
    assert "usable on the device: 900.0 MiB" in browser.text("#legend")


@pytest.mark.parametrize("width", [360, 400, 600])
def test_no_table_is_cut_on_a_narrow_screen(browser: Browser, estimate: Estimate, tmp_path: Path, width: int) -> None:
    browser.resize(width, 1600)
    for path in (
        write_page(estimate, tmp_path / "estimate.html"),
        write_page(make_dead_run(), tmp_path / "dryrun.html"),
        write_page(make_plan(), tmp_path / "plan.html"),
        write_page(make_supervised(), tmp_path / "run.html"),
    ):
        browser.open(path)
        cut = browser.run(
            "[...document.querySelectorAll('.scroll, pre, table, h1, h2, p')]"
            ".filter(part => part.scrollWidth > part.clientWidth + 1).map(part => part.outerHTML.slice(0, 80))"
        )
        assert cut == [], path.name
        # Every cell of a card says what it is.
        assert browser.run("[...document.querySelectorAll('.cards td')].every(cell => 'title' in cell.dataset)")
        assert browser.problems == []


def test_a_map_is_never_one_rectangle(browser: Browser, tmp_path: Path) -> None:
    # GIVEN a model of which one module holds nearly everything, as a language model's "model.layers"
    record = builders.Recorder()
    record.mark(Phase.FORWARD, 1)
    for layer in range(8):
        record.allocate(64 * MIB, Category.ACTIVATION, f"model.layers.{layer}.mlp", "op", "train.py:1")
    record.allocate(MIB, Category.ACTIVATION, "model.norm", "op", "train.py:1")
    record.allocate(MIB, Category.ACTIVATION, "head", "op", "train.py:1")

    # WHEN the page is opened
    browser.resize(1280, 1600)
    browser.open(write_page(builders.make_estimate(record.timeline()), tmp_path / "memory.html"))

    # THEN its layers are seen at once
    labels = browser.run("[...document.querySelectorAll('.cell')].map(cell => cell.ariaLabel.split(':')[0])")
    assert {f"model.layers.{layer}.mlp" for layer in range(8)} <= set(labels)


def test_names_stay_text(browser: Browser, tmp_path: Path) -> None:
    # GIVEN names that would be markup
    evil = "</script><img src=x onerror=\"window.hit='yes'\"><!--"
    record = builders.Recorder()
    record.mark(Phase.SETUP, 0)
    record.allocate(MIB, Category.PARAMETER, evil, evil, evil)
    notes = (Note(evil, evil, evil),)
    estimate = builders.make_estimate(record.timeline(), subject=evil, notes=notes)

    # WHEN they are shown
    browser.open(write_page(estimate, tmp_path / "memory.html"))

    # THEN they are text and nothing ran
    assert browser.problems == []
    assert browser.run("window.hit") is None
    assert browser.count("img") == 0
    assert evil in browser.text("#notes")
    assert evil in browser.text("#headline")
    assert evil in browser.text("#pinned")


def test_unknown_capacity_and_failure_are_told(browser: Browser, tmp_path: Path) -> None:
    browser.open(write_page(builders.make_estimate(device=builders.MYSTERY), tmp_path / "unknown.html"))
    assert browser.problems == []
    assert "unknown" in browser.text("#badge")
    assert browser.count("line.capacity") == 0

    browser.open(write_page(builders.make_failed_estimate(), tmp_path / "failed.html"))
    assert browser.problems == []
    assert browser.text("#failure").startswith("runs out in the forward pass of step 1")
    assert browser.count("line.lost") == 1


def test_empty_and_huge_timelines_draw(browser: Browser, tmp_path: Path) -> None:
    browser.open(write_page(builders.make_estimate(Timeline((), 0)), tmp_path / "empty.html"))
    assert browser.problems == []
    assert browser.text("#moment") == "Peak nothing is allocated"

    huge = builders.make_estimate(builders.make_timeline(num_layers=2500, num_steps=4))
    browser.open(write_page(huge, tmp_path / "huge.html"), "#tick=5000")
    assert browser.problems == []
    assert browser.text("#peak-label") == f"peak: {format_size(huge.peak_bytes)}"
    assert "blocks of" in browser.text("#footer")


def test_values_between_samples_are_called_approximate(browser: Browser, tmp_path: Path) -> None:
    # GIVEN a timeline whose curves were thinned out
    estimate = builders.make_large_estimate()
    skipped = next(tick for tick in range(3000, 9000) if tick not in kept_ticks(estimate))
    browser.resize(1280, 1600)
    browser.open(write_page(estimate, tmp_path / "memory.html"), f"#tick={skipped - 1}")

    # WHEN the keyboard moves on to a tick that was left out
    browser.run("document.getElementById('chart').focus()")
    browser.press("ArrowRight")

    # THEN what comes from the blocks is exact and what comes from the curve says "about"
    tip = browser.text("#tip")
    assert f"Tick {skipped:,}" in tip
    assert "allocatedabout " in tip
    for category, size in estimate.timeline.breakdown(skipped, lambda block: str(block.category)).items():
        assert f"{category}{format_size(size)}" in tip


def kept_ticks(estimate: Estimate) -> set[int]:
    """Ticks at which the page knows the curves."""
    return set(accumulate(build_payload(estimate)["ticks"]))
