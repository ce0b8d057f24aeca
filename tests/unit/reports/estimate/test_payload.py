import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.core.timeline import Timeline
from memfit.reports.estimate import payload
from memfit.reports.estimate.payload import build_payload, differences, sample_ticks
from tests.unit.reports.builders import make_estimate, make_large_estimate, make_stopped_estimate


def restore(changes):
    return list(itertools.accumulate(changes))


@given(st.lists(st.integers(0, 10**12)))
def test_differences_can_be_added_up_again(values):
    assert restore(differences(values)) == values


def test_short_curves_are_kept_whole():
    assert sample_ticks([3, 1, 2], [], budget=3) == [0, 1, 2]
    assert sample_ticks([], [], budget=3) == []


@given(st.lists(st.integers(0, 6), min_size=30, max_size=60))
def test_the_ticks_to_keep_are_kept_in_order(curve):
    chosen = sample_ticks(curve, keep=[7], budget=len(curve) - 1)

    assert {0, 7, len(curve) - 1} <= set(chosen)
    assert chosen == sorted(set(chosen))


@given(st.lists(st.integers(0, 1000), min_size=200, max_size=400))
def test_a_tight_budget_keeps_the_peak(curve):
    chosen = sample_ticks(curve, keep=[], budget=20)

    assert len(chosen) <= 22
    assert max(curve[tick] for tick in chosen) == max(curve)


def test_a_tight_budget_keeps_the_highest_of_each_stretch():
    # GIVEN a comb of 1,000 spikes of growing height
    curve = [height for spike in range(1000) for height in (0, spike + 1)]

    # WHEN only 20 ticks may be kept
    chosen = sample_ticks(curve, keep=[], budget=20)

    # THEN each tenth keeps its highest spike and a valley
    assert {curve[tick] for tick in chosen if curve[tick]} >= {100 * tenth for tenth in range(1, 11)} - {1000}
    assert curve[chosen[-1]] == 1000


def test_curves_are_exact_at_the_samples():
    # GIVEN a timeline too long to keep whole
    estimate = make_large_estimate()
    data = build_payload(estimate)
    ticks = restore(data["ticks"])
    series = [restore(changes) for changes in data["series"]]

    # THEN the samples hold the peak, every mark, and the true sums
    assert len(ticks) < estimate.timeline.num_ticks
    assert estimate.peak_tick in ticks
    assert {mark.tick for mark in estimate.timeline.marks} <= set(ticks)
    live = estimate.timeline.curve()
    assert [sum(values) for values in zip(*series, strict=True)] == [live[tick] for tick in ticks]
    assert restore(data["allocated"]) == [estimate.replay.allocated[tick] for tick in ticks]
    assert restore(data["reserved"]) == [estimate.replay.reserved[tick] for tick in ticks]


def test_breakdowns_add_up_to_the_peak():
    estimate = make_estimate()

    for view in build_payload(estimate)["breakdown"].values():
        assert sum(size for _, size in view) == estimate.peak_bytes


def test_a_replay_that_ran_out_is_shorter_than_the_timeline():
    estimate = make_stopped_estimate()

    data = build_payload(estimate)

    assert len(data["ticks"]) == estimate.timeline.num_ticks
    assert len(data["allocated"]) == len(data["reserved"]) == data["failureTick"] == 200


def test_only_the_smallest_blocks_are_left_out(monkeypatch):
    monkeypatch.setattr(payload, "MAX_BLOCKS", 100)
    estimate = make_estimate()

    data = build_payload(estimate)

    assert len(data["blocks"]) == 100
    assert data["numLeftOut"] == len(estimate.timeline.blocks) - 100
    sizes = sorted((block.size_bytes for block in estimate.timeline.blocks), reverse=True)
    assert sorted((row[0] for row in data["blocks"]), reverse=True) == sizes[:100]
    assert [row[1] for row in data["blocks"]] == sorted(row[1] for row in data["blocks"])


@pytest.mark.parametrize("key", ["ticks", "series", "allocated", "blocks"])
def test_an_empty_timeline_gives_empty_lists(key):
    assert build_payload(make_estimate(Timeline((), 0)))[key] == []
