from hypothesis import given
from hypothesis import strategies as st

from memfit.core.timeline import Block, Category, Mark, Phase, Timeline
from memfit.planner.retiming import BEFORE, Life, lives, rebuild, resized
from tests.unit.planner.builders import is_sound, training


def block(size_bytes=1, start=0, end=None):
    return Block(size_bytes, start, end, Category.TEMPORARY, Phase.FORWARD)


def test_an_unchanged_timeline_stays_as_it_is():
    timeline = training()

    assert rebuild(lives(timeline), timeline.marks) == timeline


def test_a_block_that_ends_sooner_makes_room_for_the_next():
    # GIVEN a block of 5 that is freed after one of 7 is allocated
    timeline = Timeline((block(5, 0, 2), block(7, 1, None)), 3)
    assert timeline.peak()[1] == 12

    # WHEN it ends just before
    first, second = lives(timeline)
    moved = rebuild([first._replace(end=1 + BEFORE), second], ())

    # THEN they never meet
    assert moved.peak()[1] == 7
    assert is_sound(moved)


def test_marks_stay_between_the_same_events():
    timeline = Timeline((block(1, 0, 3), block(1, 1, 2)), 4, (Mark(0, Phase.SETUP, 0), Mark(2, Phase.FORWARD, 1)))
    first, second = lives(timeline)

    assert rebuild([first], timeline.marks).marks == (Mark(0, Phase.SETUP, 0), Mark(1, Phase.FORWARD, 1))
    earlier = second._replace(start=BEFORE, end=0 + BEFORE / 2)
    assert rebuild([earlier, first], timeline.marks).marks[1].tick == 3


def test_what_never_lives_is_left_out():
    assert rebuild([Life(block(), 3, 3), Life(block(), 3, 2), Life(block(0), 0, None)], ()) == Timeline((), 0)


def test_at_one_moment_frees_come_first():
    moved = rebuild([Life(block(5), 0, 4), Life(block(5), 4, None)], ())

    assert moved.peak()[1] == 5


def test_resized_keeps_the_life():
    life = Life(block(8, 1, 2), 1, 2)

    assert resized(life, 3) == Life(block(3, 1, 2), 1, 2)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20), st.integers(0, 20) | st.none()), max_size=20))
def test_any_lives_make_a_sound_timeline(given_lives):
    moved = rebuild([Life(block(size), start, end) for size, start, end in given_lives], ())

    assert is_sound(moved)
    assert len(moved.blocks) == sum(end is None or start < end for _, start, end in given_lives)
