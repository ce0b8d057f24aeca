import dataclasses
import json
import os
import re
import stat

import pytest

from memfit.core.estimate import Note
from memfit.core.plan import PlannedMove, Point, Refusal
from memfit.core.settings import Keeps, Settings
from memfit.core.timeline import Category, Phase
from memfit.core.units import MIB
from memfit.reports.page import embed_json, render_page, write_page
from tests.unit.reports.builders import RTX_3090, Recorder, make_estimate, make_large_estimate, make_timeline
from tests.unit.reports.plan_builders import MOVES, make_easy_plan, make_plan, make_small_plan
from tests.unit.reports.run_builders import make_dead_run, make_failure, make_run, make_scan

SHOWN = r"</script><img src=x onerror=alert(1)><!-- {{data}} \u2028 &amp;"
EVIL = "</script><img src=x onerror=alert(1)><!-- {{data}} \u2028 &amp;"


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_page_holds_the_figures():
    estimate = make_estimate()

    data = data_of(render_page(estimate))

    assert data["demand"] == "1.13 GiB needed, 23.7 GiB usable on NVIDIA GeForce RTX 3090"
    assert data["answer"] == "fits (99%)"
    assert data["needed"] == estimate.peak_bytes
    assert data["peakTick"] == estimate.peak_tick


@pytest.mark.parametrize("render", [lambda: render_page(make_estimate()), lambda: render_page(make_plan())])
def test_page_needs_no_network(render):
    text = render()

    assert "http://" not in text
    assert "https://" not in text
    assert "default-src 'none'" in text
    assert not re.search(r"<(?:link|iframe|img|object)\b|\b(?:src|href)\s*=|@import|url\(", text)


@pytest.mark.parametrize("render", [lambda: render_page(make_estimate()), lambda: render_page(make_plan())])
def test_script_never_parses_text_as_markup(render):
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", render())


def test_names_cannot_leave_their_place():
    # GIVEN names, paths and notes that would be markup
    record = Recorder()
    record.mark(Phase.SETUP, 0)
    record.allocate(MIB, Category.PARAMETER, EVIL, EVIL, EVIL)
    device = dataclasses.replace(RTX_3090, title=EVIL, source=EVIL)

    # WHEN the page is made
    text = render_page(make_estimate(record.timeline(), device, subject=EVIL, notes=(Note(EVIL, EVIL, EVIL),)))

    # THEN the page has the elements of the template and no others, and the names arrive whole
    harmless = render_page(make_estimate())
    for tag in ("<script", "</script", "<img", "<!--", "\u2028"):
        assert text.count(tag) == harmless.count(tag)
    assert data_of(text)["notes"] == [[SHOWN, SHOWN, SHOWN]]
    assert data_of(text)["strings"] == [SHOWN]


def test_embedded_json_ends_nothing():
    text = embed_json([EVIL, "\u2029", "\ud800"])

    assert "<" not in text
    assert "\u2028" not in text
    assert "\u2029" not in text
    assert json.loads(text) == [SHOWN, r"\u2029", r"\ud800"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\x1b[31mb", r"a\u001b[31mb"),
        ("\u202egpj", r"\u202egpj"),
        ("\x07\x9b\x7f", r"\u0007\x9b\x7f"),
        ("c:\\users\\b", "c:\\users\\b"),
        ("\\\x1b", "\\\\u001b"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("модель 模型", "модель 模型"),
    ],
)
def test_what_steers_a_terminal_or_turns_text_around_is_shown_as_an_escape(name, shown):
    assert json.loads(embed_json({name: [name]})) == {shown: [shown]}


def test_page_of_a_resnet_is_small():
    estimate = make_large_estimate()
    assert len(estimate.timeline.blocks) > 5000
    assert estimate.timeline.num_ticks > 9000

    assert len(render_page(estimate).encode()) < 1_000_000


def test_page_stays_small_however_long_the_timeline():
    estimate = make_estimate(make_timeline(num_layers=2500, num_steps=3))
    assert estimate.timeline.num_ticks > 90_000

    assert len(render_page(estimate).encode()) < 1_500_000


def test_placeholders_are_all_filled():
    assert "{{" not in render_page(make_estimate())


def test_write_gives_the_path_and_nothing_else(tmp_path):
    target = tmp_path / "memory.html"

    assert write_page(make_estimate(), target) == target
    assert write_page(make_estimate(), str(target)) == target

    assert target.read_text(encoding="utf-8") == render_page(make_estimate())
    assert os.listdir(tmp_path) == ["memory.html"]


def test_written_page_can_be_read_by_others(tmp_path):
    plain = tmp_path / "plain.txt"
    plain.touch()

    target = write_page(make_estimate(), tmp_path / "memory.html")

    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_failed_write_leaves_the_old_page(tmp_path, monkeypatch):
    # GIVEN a page from before
    target = tmp_path / "memory.html"
    target.write_text("old")

    # WHEN writing the next one fails at the last moment
    def fail(source, destination):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_page(make_estimate(), target)

    # THEN the old page is still there, alone
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["memory.html"]


def test_missing_folder_is_reported(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_page(make_estimate(), tmp_path / "missing" / "memory.html")


def test_page_of_a_run_tells_what_happened():
    run = make_dead_run()
    text = render_page(run)

    data = data_of(text)
    assert data["run"]["failure"]["source"] == "train.py:88"
    assert "<title>memfit: train.py would run out of memory on" in text
    assert "would run out of memory" in re.search(r"<noscript><pre>(.*?)</pre>", text, re.DOTALL)[1]
    assert data_of(render_page(make_estimate()))["run"] is None


def test_what_a_script_says_cannot_leave_its_place():
    # GIVEN markup wherever a script can put text
    failure = make_failure(message=EVIL, source=EVIL, code=EVIL, module=EVIL, op=EVIL, by_category={EVIL: 1})
    run = make_dead_run(
        script=EVIL,
        arguments=(EVIL,),
        error=EVIL,
        failures=(failure,),
        redirected={EVIL: EVIL},
        scan=make_scan(problem=EVIL, failure=failure),
    )

    text = render_page(run)

    harmless = render_page(make_dead_run())
    for tag in ("<script", "</script", "<img", "<!--", "\u2028"):
        assert text.count(tag) == harmless.count(tag)
    assert data_of(text)["run"]["failure"]["message"] == SHOWN


def test_page_of_a_run_is_written_whole(tmp_path):
    path = write_page(make_run(), tmp_path / "run.html")

    assert path.read_text(encoding="utf-8") == render_page(make_run())
    with pytest.raises(OSError, match="it is not a file"):
        write_page(make_run(), tmp_path)


@pytest.mark.parametrize("plan", [make_plan(), make_easy_plan(), make_small_plan()])
def test_page_of_a_plan_holds_it(plan):
    text = render_page(plan)

    data = data_of(text)
    assert not re.search(r"\{\{\w+\}\}", text)
    assert data["fits"] is plan.fits
    assert [row[0] for row in data["moves"]] == [move.title for move in plan.moves]
    assert len(text.encode()) < 1_000_000
    assert "budget" in re.search(r"<noscript><pre>(.*?)</pre>", text, re.DOTALL)[1]


def test_what_a_plan_says_cannot_leave_its_place():
    # GIVEN markup wherever text of others comes in
    origin = MOVES[0].saves_origin
    plan = make_plan(
        subject=EVIL,
        settings=Settings(checkpoint=(EVIL,)),
        moves=(PlannedMove(EVIL, EVIL, Keeps.CHANGES, 1, origin, 1.0, origin, EVIL),),
        front=(Point(1, 1.0, EVIL, Settings()),),
        refused=(Refusal(EVIL, EVIL),),
        notes=(Note(EVIL, EVIL, EVIL),),
    )

    text = render_page(plan)

    harmless = render_page(make_plan())
    for tag in ("<script", "</script", "<img", "<!--", "\u2028"):
        assert text.count(tag) == harmless.count(tag)
    assert data_of(text)["refused"] == [[SHOWN, SHOWN]]


def test_page_of_a_plan_is_written_whole(tmp_path):
    path = write_page(make_plan(), tmp_path / "plan.html")

    assert path.read_text(encoding="utf-8") == render_page(make_plan())
    assert os.listdir(tmp_path) == ["plan.html"]
