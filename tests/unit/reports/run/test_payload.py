import json

from memfit.core.units import GIB, MIB
from memfit.reports.page import render_page, write_page
from memfit.reports.run.figures import build_supervised_payload
from tests.unit.core.supervised_builders import make_lost, make_supervised


def test_what_the_page_shows():
    payload = build_supervised_payload(make_supervised())

    assert payload["headline"] == "memfit run: train.py --lr 1"
    assert (payload["fits"], payload["answer"], payload["limit"]) == (True, "completed", GIB)
    assert payload["times"] == [0.2, 4.1, 7.0]
    assert [name for name, _ in payload["series"]] == ["script", "its other processes", "whole container"]
    assert payload["series"][2][1] == [150 * MIB, 1010 * MIB, None]
    assert payload["spans"] == [[0.1, 4.3], [4.4, 10.0]]
    assert payload["marks"][1] == [4.3, "killed", "attempt 1: the kernel killed it"]
    assert [row[-1] for row in payload["attempts"]][1] == ""
    assert payload["notes"][0][1].startswith("attempt 2 was to use")
    json.dumps(payload)


def test_what_was_not_seen_is_not_drawn():
    payload = build_supervised_payload(make_supervised(history=(), limit_bytes=None))

    assert payload["series"] == [["script", []]]
    assert payload["limit"] is None


def test_the_page_needs_nothing_but_itself(tmp_path):
    path = write_page(make_lost(), tmp_path / "page.html")

    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "{{" not in text.replace("${{", "")
    assert "http://" not in text.replace("http://www.w3.org", "") and "https://" not in text


def test_names_stay_names():
    page = render_page(make_supervised(script="</script><b>x</b>", notes=("<img src=x>",)))

    assert "</script><b>" not in page
    assert "<img" not in page
