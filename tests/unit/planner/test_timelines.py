import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.core.timeline import Block, Category, Mark, Phase, Timeline
from memfit.planner.timeline_moves import (
    BEFORE,
    Life,
    Span,
    Spans,
    has_batch_norm,
    lives,
    of_the_graph,
    parameter_sizes,
    rebuild,
    repeated_units,
    resized,
    unit_of,
)
from tests.unit.planner.builders import Script, is_sound, training


def test_spans_follow_the_marks():
    timeline = training(num_layers=1, num_steps=2)
    spans = Spans(timeline)

    assert [(s.phase.value, s.step) for s in spans.all] == [
        ("setup", 0),
        ("forward", 1),
        ("backward", 1),
        ("optimizer", 1),
        ("forward", 2),
        ("backward", 2),
        ("optimizer", 2),
    ]
    assert spans.all[0].start == 0
    assert spans.all[-1].end == timeline.num_ticks
    assert all(a.end == b.start for a, b in zip(spans.all, spans.all[1:], strict=False))


def test_places_in_time():
    spans = Spans(training(num_layers=1, num_steps=2))
    _, forward, backward, _, second, *_ = spans.all

    assert spans.index(backward.start) == spans.index(backward.end - 1) == 2
    assert spans.forward_of(backward.start) == forward
    assert spans.after_step(forward.start) == second.start
    assert spans.after_step(second.start) is None
    assert spans.after_step(0) == forward.start


def test_without_marks_there_are_no_places():
    spans = Spans(Timeline((), 0))

    assert spans.all == []
    assert (spans.index(0), spans.forward_of(0), spans.after_step(0)) == (-1, None, None)


def test_a_phase_without_events_is_no_span():
    script = Script()
    script.enter(Phase.FORWARD, 1)
    script.enter(Phase.BACKWARD, 1)
    script.allocate(1, Category.TEMPORARY)

    assert Spans(script.timeline()).all == [Span(Phase.BACKWARD, 1, 0, 1)]


@pytest.mark.parametrize(
    ("module", "level", "unit"),
    [
        ("", 1, None),
        ("head", 2, None),
        ("layer1.0.conv1", 1, "layer1.0"),
        ("layer1.0.downsample.0", 1, "layer1.0"),
        ("layer1.0.downsample.0", 2, "layer1.0.downsample.0"),
        ("0", 1, "0"),
        ("model.layers.31", 2, "model.layers.31"),
    ],
)
def test_units_are_numbered_parts(module, level, unit):
    assert unit_of(module, level) == unit


def test_repeated_units_have_something_inside():
    assert repeated_units(training(3), 1) == ["layers.0", "layers.1", "layers.2"]
    # A single part repeats nothing, and a numbered layer alone is no part.
    assert repeated_units(training(1), 1) == []
    assert repeated_units(_plain_sequential(), 1) == []


def _plain_sequential():
    script = Script()
    script.enter(Phase.FORWARD, 1)
    for number in range(4):
        script.allocate(1, Category.ACTIVATION, str(number))
        script.allocate(1, Category.ACTIVATION, str(number))
    return script.timeline()


def test_sizes_of_parameters_and_their_halves():
    timeline = training(2, weight=1000)

    assert parameter_sizes(timeline) == {"layers.0.up": {1000, 500}, "layers.1.up": {1000, 500}}


def test_batch_norm_is_seen():
    assert not has_batch_norm(training())
    assert has_batch_norm(training(op="aten.native_batch_norm"))


def test_the_graph_is_what_forward_and_backward_make():
    kinds = {(b.category.value, b.phase.value) for b in training().blocks if of_the_graph(b)}

    assert kinds == {("activation", "forward"), ("temporary", "backward")}


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
