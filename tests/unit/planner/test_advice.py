import dataclasses

import pytest

from memfit.allocator import replay
from memfit.core.device import Origin
from memfit.core.replay import AllocatorOptions
from memfit.core.settings import Settings
from memfit.core.timeline import Timeline
from memfit.core.units import MIB
from memfit.planner import advice as module
from memfit.planner import advise
from memfit.planner.timeline_moves import Situation, checkpoint_units
from tests.unit.planner.builders import training

OPTIONS = AllocatorOptions()


def of(timeline, *, situation=None, **options):
    known = Situation(timeline, OPTIONS, **(situation or {}))
    return advise(known, replay(timeline, OPTIONS), **options)


def test_the_largest_savings_come_first():
    found = of(training(8), limit=20)

    savings = [advice.saves_bytes for advice in found]
    assert savings == sorted(savings, reverse=True)
    titles = [advice.title for advice in found]
    assert titles[0] == "checkpoint activations of 8 blocks"
    assert "halve the batch and accumulate gradients over two" in titles


def test_no_more_than_asked_for_and_the_same_every_time():
    timeline = training(8)

    # Half a batch counts once, whether an update follows each half or both.
    kinds = [advice.title.split()[0] for advice in of(timeline)]
    assert len(set(kinds)) == 3
    assert of(timeline) == of(timeline, limit=20)[: len(kinds)]
    assert of(timeline, limit=0) == ()


def test_the_peak_after_a_change_counts_the_context():
    timeline = training(8)
    before = replay(timeline, OPTIONS).reserved_peak_bytes

    for advice in of(timeline, context_bytes=100 * MIB):
        assert advice.peak_bytes == before - advice.saves_bytes + 100 * MIB


def test_a_guessed_saving_is_that_of_a_replay_or_of_live_bytes():
    timeline = training(8)
    (best, *_) = of(timeline)
    move = checkpoint_units(Situation(timeline, OPTIONS))

    assert best.title == move.title
    replayed = replay(timeline, OPTIONS).reserved_peak_bytes - replay(move.timeline, OPTIONS).reserved_peak_bytes
    assert best.saves_bytes == min(replayed, timeline.peak()[1] - move.timeline.peak()[1])


def test_gaps_that_happen_to_close_are_no_saving_of_a_guess():
    for advice in of(training(8, weight=3 * MIB), limit=20):
        if advice.title.startswith("keep the optimizer's state"):
            # Two states of eight layers.
            assert advice.saves_bytes <= 2 * 8 * 3 * MIB


def test_a_run_with_the_change_has_the_last_word():
    # GIVEN runs in which half a batch needs a third, and recomputation all that it did before
    timeline = training(8)
    before = replay(timeline, OPTIONS).reserved_peak_bytes
    asked = []

    def peak_with(move):
        settings = move.settings
        asked.append(settings)
        if settings.micro_batches == 2:
            return before // 3 + 100 * MIB
        return before + 100 * MIB if settings.checkpoint else None

    found = {a.title: a for a in of(timeline, limit=20, context_bytes=100 * MIB, peak_with=peak_with)}

    halved = found["halve the batch and accumulate gradients over two"]
    assert (halved.peak_bytes, halved.origin) == (before // 3 + 100 * MIB, Origin.SIMULATED)
    assert halved.saves_bytes + halved.peak_bytes == before + 100 * MIB
    assert not any(title.startswith("checkpoint") for title in found)
    assert all(settings.set_to_none is (settings == Settings()) for settings in asked)


@pytest.mark.parametrize(
    ("plain", "accumulated", "named"),
    [
        # Gradients that wait for the second half take memory: both are named, each with its own figure.
        (0.4, 0.6, {"halve the batch": 0.4, "halve the batch and accumulate gradients over two": 0.6}),
        (0.6, 0.4, {"halve the batch": 0.6, "halve the batch and accumulate gradients over two": 0.4}),
        # Where they need the same, the one that keeps the size of the batch.
        (0.4, 0.4, {"halve the batch and accumulate gradients over two": 0.4}),
        # Where one could not be run, nothing is guessed beside what was.
        (0.4, None, {"halve the batch": 0.4}),
        (None, 0.4, {"halve the batch and accumulate gradients over two": 0.4}),
    ],
)
def test_half_a_batch_needs_what_a_run_with_half_a_batch_needs(plain, accumulated, named):
    timeline = training(8)
    before = replay(timeline, OPTIONS).reserved_peak_bytes

    def peak_with(move):
        if move.settings.micro_batches == 1:
            return before
        share = accumulated if move.accumulates else plain
        return None if share is None else int(share * before)

    found = of(timeline, limit=20, peak_with=peak_with)

    halves = {a.title: a for a in found if a.title.startswith("halve")}
    assert {title: a.peak_bytes for title, a in halves.items()} == {t: int(s * before) for t, s in named.items()}
    assert all(a.origin is Origin.SIMULATED for a in halves.values())
    assert halves.get("halve the batch") is None or halves["halve the batch"].keeps == "changes training"


def test_only_so_many_runs_as_there_are_suggestions():
    asked = []
    of(training(8), limit=2, peak_with=lambda move: asked.append(move.settings))

    assert 1 <= len(set(asked)) <= 2


@pytest.mark.parametrize(
    ("situation", "missing"),
    [
        ({"batch_size": 1}, "halve the batch and accumulate gradients over two"),
        ({"uses_autocast": True, "num_parameters": 16 * MIB}, "compute in 16 bits with autocast"),
    ],
)
def test_what_cannot_apply_is_not_named(situation, missing):
    timeline = training(8)
    possible = {"batch_size": 2, "num_parameters": 16 * MIB}

    assert missing in {a.title for a in of(timeline, limit=20, situation=possible)}
    assert missing not in {a.title for a in of(timeline, limit=20, situation=situation)}


def test_what_the_run_released_by_hand_is_no_saving():
    # GIVEN a run whose allocator held less than a replay of its timeline would
    timeline = training(8)
    held = dataclasses.replace(replay(timeline, OPTIONS), reserved_peak_bytes=300 * MIB)

    for advice in advise(Situation(timeline, OPTIONS), held, 20):
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
    titles = [a.title for a in of(training(8, weight=64 * MIB), limit=20, situation={"num_devices": num_devices})]

    assert any(title.startswith("shard parameters") for title in titles) is offered


def test_only_what_needs_no_guess_is_called_simulated():
    origins = {a.title: a.origin for a in of(training(8, zero_late=True), limit=20)}

    assert origins["free gradients right after the optimizer step"] is Origin.SIMULATED
    assert origins["halve the batch and accumulate gradients over two"] is Origin.ASSUMED


def test_every_move_is_tried():
    assert len(module.MOVES) == len(set(module.MOVES)) == 10
