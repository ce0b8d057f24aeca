import json
from itertools import accumulate

from memfit.reports.plan import figures as plan_figures
from memfit.reports.plan.code import format_code
from memfit.reports.plan.payload import build_plan_payload
from tests.unit.reports.plan_builders import MOVES, make_easy_plan, make_plan, make_small_plan


def test_the_head_says_what_the_text_says():
    plan = make_plan()
    payload = build_plan_payload(plan)

    assert payload["headline"] == f"memfit plan: {plan_figures.headline(plan)}"
    assert (payload["demand"], payload["answer"], payload["fits"]) == (plan_figures.demand(plan), "fits", True)
    assert payload["details"] == plan_figures.details(plan)
    assert ["time of a step as planned", "203 ms", "assumed"] in payload["figures"]
    assert payload["code"] == format_code(plan)
    assert json.loads(json.dumps(payload))["seconds"] == 3.21


def test_moves_have_signs_origins_and_caveats():
    rows = build_plan_payload(make_plan())["moves"]

    assert rows[0] == [
        MOVES[0].title,
        "same up to rounding",
        "310.0 MiB",
        "simulated",
        "+21.0 ms",
        "assumed",
        MOVES[0].caveat,
    ]
    assert [row[4:6] for row in rows[2:]] == [["-1.50 ms", "assumed"], ["unknown", ""]]


def test_the_front_is_whole_and_marks_the_plan():
    front = build_plan_payload(make_plan())["front"]

    assert len(front) == 10
    assert [row[4] for row in front].index(True) == 4
    assert sum(row[4] for row in front) == 1
    assert front[0][:4] == [1160 * 2**20, 0.171, "171 ms", "as it is"]
    assert [row[1] for row in build_plan_payload(make_small_plan())["front"]] == [None, None]


def test_timelines_are_those_of_both_steps():
    plan = make_plan()
    before, after = build_plan_payload(plan)["timelines"]

    assert before["title"].startswith("Before: peak 1.13 GiB in the backward pass of step 2")
    assert after["title"].startswith("After: peak 900.0 MiB")
    assert after["peak"] == plan.after.peak_bytes
    assert max(accumulate(after["reserved"])) == plan.estimate_after.reserved_peak_bytes
    assert max(map(len, (before["ticks"], after["ticks"]))) <= 2000


def test_a_step_that_fits_is_drawn_once():
    (only,) = build_plan_payload(make_easy_plan())["timelines"]

    assert only["title"].startswith("Peak 1.13 GiB in the backward pass")


def test_a_loaded_plan_has_no_timelines():
    payload = build_plan_payload(make_small_plan())

    assert payload["timelines"] == []
    assert ["further host memory", "96.0 MiB", "simulated"] in payload["figures"]
    assert ["time of a step as it is", "unknown", ""] in payload["figures"]
    assert payload["byCategory"][0][0] == "activation"
