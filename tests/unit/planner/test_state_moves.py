import dataclasses

from memfit.core.timeline import Category, Timeline
from memfit.core.units import KIB, MIB
from memfit.planner.state_moves import fuse_optimizer, shard, shrink_states
from memfit.planner.structure import Spans
from tests.unit.planner.builders import Script, is_sound, live, most, situation, training

WEIGHT = 8 * MIB


def temporaries_of_updates(timeline):
    updates = [span for span in Spans(timeline).all if span.phase == "optimizer"]
    return max(live(timeline, Category.TEMPORARY, tick) for span in updates for tick in range(span.start, span.end))


def test_a_fused_optimizer_has_one_temporary_at_a_time():
    timeline = training(4)
    moved = fuse_optimizer(situation(timeline)).timeline

    assert temporaries_of_updates(timeline) == 4 * WEIGHT
    assert temporaries_of_updates(moved) == WEIGHT
    assert most(moved, Category.ACTIVATION) == most(timeline, Category.ACTIVATION)
    assert is_sound(moved)


def test_an_optimizer_that_works_one_by_one_is_left_alone():
    assert fuse_optimizer(situation(training(foreach=False))) is None


def test_states_in_8_bits_have_a_scale_for_each_256():
    timeline = training(4, num_steps=1)
    move = shrink_states(situation(timeline))

    elements = WEIGHT // 4
    assert most(move.timeline, Category.OPTIMIZER_STATE) == 8 * (elements + 4 * elements // 256)
    assert most(move.timeline, Category.PARAMETER) == most(timeline, Category.PARAMETER)
    assert move.keeps == "changes training"


def test_small_states_stay_as_they_are():
    assert shrink_states(situation(training(weight=16 * KIB - 4))) is None
    assert shrink_states(situation(Timeline((), 0))) is None


def test_two_devices_hold_half_each_and_gather_units():
    timeline = training(8)
    move = shard(situation(timeline))

    for category in (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE):
        assert most(move.timeline, category) == most(timeline, category) // 2
    gathered = [b.size_bytes for b in move.timeline.blocks if b.op == "all_gather"]
    # Two layers forward, three backward, in each of two steps; nothing lies outside of the layers.
    assert gathered == [2 * WEIGHT, 3 * WEIGHT] * 2
    assert most(move.timeline, Category.ACTIVATION) == most(timeline, Category.ACTIVATION)
    assert "fully_shard(block) for each of layers.0 to layers.7" in move.how
    assert is_sound(move.timeline)


def test_what_lies_outside_of_the_units_is_gathered_as_a_whole():
    script = Script()
    script.allocate(100 * MIB, Category.PARAMETER, "embedding")
    timeline = training(4)
    shifted = Timeline((*script.blocks, *(_later(b) for b in timeline.blocks)), timeline.num_ticks + 1, timeline.marks)

    gathered = [b.size_bytes for b in shard(situation(shifted)).timeline.blocks if b.op == "all_gather"]

    assert gathered[0] == 100 * MIB + 2 * WEIGHT


def _later(block):
    return dataclasses.replace(block, start=block.start + 1, end=None if block.end is None else block.end + 1)


def test_sharding_needs_units_parameters_and_a_single_device():
    assert shard(situation(training(4), num_devices=2)) is None
    assert shard(situation(training(1))) is None
    assert shard(situation(training(4).without(lambda block: block.category is Category.PARAMETER))) is None
