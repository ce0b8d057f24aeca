import pytest

from memfit.core.timeline import Category, Phase, Timeline
from memfit.planner.structure import (
    Span,
    Spans,
    has_batch_norm,
    has_dropout,
    of_the_graph,
    parameter_sizes,
    repeated_units,
    total_bytes,
    unit_of,
)
from tests.unit.planner.builders import Script, training


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
    assert total_bytes(timeline, Category.PARAMETER) == 2000


def test_batch_norm_is_seen():
    assert not has_batch_norm(training())
    assert has_batch_norm(training(op="aten.native_batch_norm"))


def test_dropout_is_seen():
    assert not has_dropout(training())
    assert has_dropout(training(op="aten.native_dropout"))
    assert has_dropout(training(op="aten.bernoulli_"))


def test_the_graph_is_what_forward_and_backward_make():
    kinds = {(b.category.value, b.phase.value) for b in training().blocks if of_the_graph(b)}

    assert kinds == {("activation", "forward"), ("temporary", "backward")}
