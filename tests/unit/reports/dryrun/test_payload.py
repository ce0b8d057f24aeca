import json

import pytest

from memfit.core.dryrun import Outcome
from memfit.core.errors import BadInput
from memfit.reports.dryrun import figures as run_figures
from memfit.reports.dryrun.figures import build_run_payload
from memfit.reports.estimate.payload import build_payload
from tests.unit.reports.builders import MYSTERY
from tests.unit.reports.run_builders import ADVICE, make_dead_run, make_run, make_run_estimate, make_scan


def test_it_is_that_of_the_estimate_with_the_run_added():
    run = make_run()
    payload, plain = build_run_payload(run), build_payload(run.estimate)

    assert plain["run"] is None
    assert set(payload) == set(plain)
    for key in ("ticks", "series", "allocated", "blocks", "strings", "breakdown", "peakBytes", "capacity", "marks"):
        assert payload[key] == plain[key]
    assert json.loads(json.dumps(payload))["run"]["advice"] == []


def test_the_head_speaks_of_the_run():
    payload = build_run_payload(make_run(outcome=Outcome.ENDED, num_steps=2))

    assert payload["headline"] == "memfit dryrun: train.py --batch-size 64"
    assert payload["demand"].startswith("train.py on NVIDIA GeForce RTX 3090: ended by itself after 2 of 3 steps")
    assert (payload["answer"], payload["fits"], payload["failure"]) == ("fits (99%)", True, None)
    assert payload["seconds"] == 8.2


def test_a_death_is_told_once():
    payload = build_run_payload(make_dead_run())
    run = payload["run"]

    assert payload["failure"] == run_figures.asked(make_dead_run(), make_dead_run().fatal)
    assert run["failure"]["code"] == "logits = model(tokens)"
    assert run["failure"]["rows"][0] == ["activation", 470 * 2**20, 470 / 860]
    assert sum(share for _, _, share in run["failure"]["rows"]) == pytest.approx(1)
    assert [line.split()[0] for line in run["details"]] == ["without", "that", "none", "memfit"]
    assert payload["failureTick"] == 200


def test_advice_says_whether_it_would_be_enough():
    rows = build_run_payload(make_dead_run())["run"]["advice"]

    assert [(row[0], row[3], row[4], row[5]) for row in rows] == [
        ("checkpoint activations of 12 blocks", True, "same results", "assumed"),
        ("let the allocator grow", False, "same up to rounding", "simulated"),
        ("keep the state in 8 bits", False, "changes training", "assumed"),
    ]
    unknown = make_run(estimate=make_run_estimate(MYSTERY), advice=ADVICE)
    assert [row[3] for row in build_run_payload(unknown)["run"]["advice"]] == [None] * 3


def test_a_scan_has_its_failure_beside_it():
    run = build_run_payload(make_run(scan=make_scan()))["run"]

    assert run["scanFailure"]["title"] == "Held in step 2, forward"
    assert run["scan"][-1] == "it runs out at train.py:88, in step 2, forward"
    assert run["failure"] is None


def test_stand_ins_are_one_note():
    notes = build_run_payload(make_run())["notes"]

    assert [code for code, _, _ in notes] == ["data-dependent-shape", "stand-in-value"]
    assert notes[1][1].startswith("2 values were read")


def test_a_run_that_broke_off_has_no_interval():
    assert build_run_payload(make_run(outcome=Outcome.NO_STEP))["certainty"] == ""
    assert build_run_payload(make_run())["certainty"].startswith("95% interval")


def test_redirected_files_are_pairs():
    run = make_run(redirected={"a": "b", "c": ""})

    assert build_run_payload(run)["run"]["redirected"] == [("a", "b"), ("c", "not kept")]


def test_without_an_estimate_there_is_nothing_to_draw():
    crashed = make_run(estimate=None, outcome=Outcome.CRASHED, error="the process was ended by SIGKILL")

    with pytest.raises(BadInput, match=r"there is nothing to draw: train.py crashed: the process was ended by SIGKILL"):
        build_run_payload(crashed)
