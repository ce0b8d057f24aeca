from collections.abc import Callable

from memfit.allocator.ticks import signed_events
from memfit.core.timeline import Block, Category, Phase, Timeline


def test_the_events_are_those_of_the_timeline(script: Callable[..., Timeline]) -> None:
    # GIVEN
    timeline = script(("a", 1), ("b", 2), "a", ("c", 3), "c")

    # WHEN
    events = signed_events(timeline)

    # THEN
    assert events == [1, 2, -1, 3, -3]
    assert [(abs(event) - 1, event > 0) for event in events] == list(timeline.events())


def test_a_tick_without_event_is_zero() -> None:
    block = Block(1, 1, None, Category.TEMPORARY, Phase.FORWARD)

    assert signed_events(Timeline((block,), 3)) == [0, 1, 0]


def test_an_empty_timeline_has_no_events() -> None:
    assert signed_events(Timeline((), 0)) == []
