import dataclasses

import pytest

from memfit.core.device import Origin
from memfit.core.estimate import Note
from memfit.core.plan import Refusal, Seconds
from memfit.core.settings import Keeps, Settings
from memfit.core.units import MIB
from memfit.planner.moves import DROPOUT
from memfit.reports.parts import shown_notes
from memfit.reports.plan import figures as plan_figures
from tests.unit.reports.plan_builders import MOVES, make_easy_plan, make_front, make_plan, make_small_plan


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "unknown"),
        (0.0, "0 us"),
        (0.00005, "50 us"),
        (0.001, "1.00 ms"),
        (0.0999, "99.9 ms"),
        (0.4123, "412 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (12.34, "12.3 s"),
        (4000.0, "4,000.0 s"),
        (-0.25, "-250 ms"),
    ],
)
def test_times_as_people_read_them(seconds, text):
    assert plan_figures.format_seconds(seconds) == text


def test_the_verdict_has_both_peaks_and_the_budget():
    assert plan_figures.verdict(make_plan()) == (
        "ResNet on NVIDIA GeForce RTX 3090: 1.13 GiB -> 900.0 MiB (simulated), budget 900.0 MiB: fits"
    )
    assert plan_figures.verdict(make_easy_plan()).endswith(": 1.13 GiB as it is, budget 23.7 GiB: fits")
    assert plan_figures.verdict(make_small_plan()).endswith("budget 512.0 MiB: does not fit")


def test_several_devices_are_counted():
    plan = make_plan(settings=Settings(num_devices=8))

    assert plan_figures.verdict(plan).startswith("ResNet on 8 x NVIDIA GeForce RTX 3090")
    assert "8 x NVIDIA" in plan_figures.headline(plan)
    assert "memory is that of one device" in plan_figures.details(plan)


def test_times_have_their_origin():
    plan = make_plan(seconds_after=Seconds(0.2, Origin.MEASURED))

    assert plan_figures.pace(plan) == "time of a step: 171 ms (assumed) -> 200 ms (measured), 1.17 times as long"
    assert plan_figures.pace(make_easy_plan()) == "time of a step: 171 ms (assumed)"
    assert plan_figures.pace(make_small_plan()) == "time of a step: unknown, because the speed of the device is unknown"
    half = make_plan(seconds_before=Seconds(None))
    assert plan_figures.pace(half) == "time of a step: unknown -> 203 ms (assumed)"


def test_a_slowdown_of_nothing_is_called_so():
    assert plan_figures.slowdown(make_plan(seconds_after=Seconds(0.1711))) == "as long as before"
    assert plan_figures.slowdown(make_small_plan()) == "unknown"
    assert plan_figures.slowdown(make_plan(seconds_after=Seconds(0.1))) == "0.58 times as long"


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        ((), "results: unchanged, the step runs as it is"),
        (MOVES[1:2], "results: gradients and updates are identical to those of the step as it is"),
        (
            MOVES[1:3],
            "results: the same up to floating-point rounding, because of: fused optimizer. "
            "Identical: recompute 3 of 16 blocks",
        ),
        (MOVES[2:3], "results: the same up to floating-point rounding, because of: fused optimizer"),
        (
            (dataclasses.replace(MOVES[2], title="2 micro-batches", caveat=DROPOUT),),
            "results: the same up to floating-point rounding except for dropout masks, because of: 2 micro-batches",
        ),
        (
            (dataclasses.replace(MOVES[1], keeps=Keeps.CHANGES, title="adapters"), *MOVES[2:]),
            "results: training changes, because of: adapters. The same up to rounding: fused optimizer. "
            "Identical: channels last",
        ),
    ],
)
def test_one_sentence_says_what_stays_equal(moves, expected):
    assert plan_figures.numbers(make_plan(moves=moves)) == expected


def test_what_is_missing_is_said():
    lines = plan_figures.details(make_small_plan())

    assert lines[0] == "388.0 MiB more than the budget, with every move that was allowed and helps"
    assert "96.0 MiB of host memory for what is offloaded (simulated)" in lines
    assert not any("host" in line or "more than" in line for line in plan_figures.details(make_plan()))


def test_moves_show_origins_signs_and_caveats():
    grid = plan_figures.parts(make_plan())[0].grid

    assert [line.cells[2:] for line in grid.lines] == [
        ("310.0 MiB (simulated)", "+21.0 ms (assumed)"),
        ("120.0 MiB (simulated)", "+12.3 ms (assumed)"),
        ("-2.00 MiB (assumed)", "-1.50 ms (assumed)"),
        ("0 B (assumed)", "unknown"),
    ]
    assert [line.remarks for line in grid.lines][:2] == [(MOVES[0].caveat,), ()]


def test_categories_are_those_of_either_side():
    plan = make_plan()
    plan = dataclasses.replace(
        plan,
        before=dataclasses.replace(plan.before, by_category={"activation": 10, "parameter": 5}),
        after=dataclasses.replace(plan.after, by_category={"parameter": 5, "workspace": 7}),
    )

    assert plan_figures.categories(plan) == [("activation", 10, 0), ("workspace", 0, 7), ("parameter", 5, 5)]


def test_a_few_points_show_the_front():
    plan = make_plan(front=make_front() * 5)
    chosen = dataclasses.replace(plan, front=make_front())

    assert len(plan_figures.few_points(plan)) <= plan_figures.NUM_POINTS + 5
    few = plan_figures.few_points(chosen)
    assert few[0] == make_front()[0]
    assert few[-1] == make_front()[-1]
    assert sum(plan_figures.is_chosen(point, chosen) for point in few) == 1
    assert len(few) <= plan_figures.NUM_POINTS
    assert plan_figures.few_points(make_plan(front=make_front()[:3])) == list(make_front()[:3])


def test_one_point_is_the_plan():
    # GIVEN another point with the plan's settings, as where gradients are freed early beside it
    plan = make_plan()
    (chosen,) = [point for point in plan.front if plan_figures.is_chosen(point, plan)]
    twin = dataclasses.replace(chosen, peak_bytes=chosen.peak_bytes - MIB, verified=False)
    plan = dataclasses.replace(plan, front=(*plan.front, twin))

    assert [point for point in plan.front if plan_figures.is_chosen(point, plan)] == [chosen]
    assert [line.startswith("  > ") for line in str(plan).splitlines()].count(True) == 1


def test_a_peak_that_is_computed_is_not_called_simulated():
    plan = make_plan()
    computed = dataclasses.replace(plan, after=dataclasses.replace(plan.after, origin=Origin.ASSUMED))

    assert "(simulated)" in plan_figures.demand(plan)
    assert "(assumed)" in plan_figures.demand(computed)
    assert "(simulated)" not in plan_figures.demand(computed)


def test_points_say_how_they_are_known():
    assert [plan_figures.point_origin(point) for point in make_front()[3:5]] == ["assumed", "simulated"]


def test_long_lists_of_refusals_are_cut():
    plan = make_plan(refused=tuple(Refusal(f"move-{index}", "because") for index in range(10)))

    assert plan_figures.refusal_lines(plan, 8)[-2:] == ["move-7: because", "and 2 more"]
    assert len(plan_figures.refusal_lines(plan, 10)) == 10


def test_parts_that_hold_nothing_are_left_out():
    titles = [part.title for part in plan_figures.parts(make_plan())]

    assert titles == [
        "Moves",
        "At the peak, before and after",
        "Memory against time: the best plans known",
        "Not considered",
        "Notes",
    ]
    assert plan_figures.parts(make_easy_plan()) == []


def test_the_table_adds_up():
    plan = make_plan()
    total = sum(before for _, before, _ in plan_figures.categories(plan))

    assert abs(total - plan.before.peak_bytes) < MIB


def test_values_that_were_read_are_one_note():
    read = tuple(Note("stand-in-value", "a value was read", f"a.py:{line}") for line in (1, 2))
    plan = make_plan(notes=(read[0], *make_plan().notes, read[1]))

    assert [note.code for note in shown_notes(plan.notes)] == ["time-model", "stand-in-value"]
    assert shown_notes(make_plan().notes) == list(make_plan().notes)
