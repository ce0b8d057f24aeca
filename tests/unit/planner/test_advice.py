import dataclasses

import pytest

from memfit.allocator import replay
from memfit.core.device import Origin
from memfit.core.replay import AllocatorOptions
from memfit.core.timeline import Timeline
from memfit.core.units import MIB
from memfit.planner import advice as module
from memfit.planner import advise
from tests.unit.planner.builders import training

OPTIONS = AllocatorOptions()


def of(timeline, **options):
    return advise(timeline, replay(timeline, OPTIONS), OPTIONS, **options)


def test_the_largest_savings_come_first():
    found = of(training(8), limit=20)

    savings = [advice.saves_bytes for advice in found]
    assert savings == sorted(savings, reverse=True)
    titles = [advice.title for advice in found]
    assert titles[0] == "checkpoint activations of 8 blocks"
    assert "halve the micro-batch and accumulate twice" in titles


def test_no_more_than_asked_for_and_the_same_every_time():
    timeline = training(8)

    assert len(of(timeline)) == 3
    assert of(timeline) == of(timeline, limit=20)[:3]
    assert of(timeline, limit=0) == ()


def test_the_peak_after_a_change_counts_the_context():
    timeline = training(8)
    before = replay(timeline, OPTIONS).reserved_peak_bytes

    for advice in of(timeline, context_bytes=100 * MIB):
        assert advice.peak_bytes == before - advice.saves_bytes + 100 * MIB


def test_a_saving_is_that_of_a_replay():
    timeline = training(8)
    (best, *_) = of(timeline)
    move = module.activation_moves.checkpoint_units(module.Situation(timeline, OPTIONS))

    assert best.title == move.title
    assert best.saves_bytes == (
        replay(timeline, OPTIONS).reserved_peak_bytes - replay(move.timeline, OPTIONS).reserved_peak_bytes
    )


def test_what_the_run_released_by_hand_is_no_saving():
    # GIVEN a run whose allocator held less than a replay of its timeline would
    timeline = training(8)
    held = dataclasses.replace(replay(timeline, OPTIONS), reserved_peak_bytes=300 * MIB)

    for advice in advise(timeline, held, OPTIONS, 20):
        assert advice.peak_bytes == 300 * MIB - advice.saves_bytes >= 0


def test_little_savings_are_not_named(monkeypatch):
    timeline = training(8)
    all_of_them = of(timeline, limit=20)
    monkeypatch.setattr(module, "MIN_SHARE", 0.3)

    some = of(timeline, limit=20)

    total = replay(timeline, OPTIONS).reserved_peak_bytes
    assert some == tuple(a for a in all_of_them if a.saves_bytes >= 0.3 * total)
    assert 0 < len(some) < len(all_of_them)


def test_nothing_can_be_saved_of_nothing():
    assert of(Timeline((), 0)) == ()


@pytest.mark.parametrize(("num_devices", "offered"), [(1, True), (4, False)])
def test_sharding_is_for_those_who_have_not_sharded(num_devices, offered):
    # Most of this step is parameters and states.
    titles = [a.title for a in of(training(8, weight=64 * MIB), limit=20, num_devices=num_devices)]

    assert any(title.startswith("shard parameters") for title in titles) is offered


def test_only_what_needs_no_guess_is_called_simulated():
    origins = {a.title: a.origin for a in of(training(8, zero_late=True), limit=20)}

    assert origins["free gradients right after the optimizer step"] is Origin.SIMULATED
    assert origins["halve the micro-batch and accumulate twice"] is Origin.ASSUMED


def test_every_move_is_tried():
    assert len(module.MOVES) == len(set(module.MOVES)) == 9
