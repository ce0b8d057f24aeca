"""Events in order; and host memory, where what is asked for is what is taken."""

from collections.abc import Callable

from memfit.allocator import replay, replay_plain, replay_variants
from memfit.allocator.replays import signed_events
from memfit.core.replay import OutOfMemory
from memfit.core.timeline import Block, Category, Phase, Timeline
from memfit.core.units import MIB

Script = Callable[..., Timeline]


def test_the_events_are_those_of_the_timeline(script: Script) -> None:
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


def test_nothing_is_rounded_and_all_is_returned(script: Script) -> None:
    timeline = script(("a", 1), ("b", 1000), "a", ("c", 0), "b", "c")

    result = replay_plain(timeline)

    assert result.allocated == (1, 1001, 1000, 1000, 0, 0)
    assert result.reserved == result.allocated
    assert result.allocated == tuple(timeline.curve())
    assert result.allocated_peak_bytes == result.reserved_peak_bytes == result.requested_peak_bytes == 1001
    assert result.fragmentation == 0
    assert result.out_of_memory is None


def test_the_first_allocation_beyond_the_capacity_ends_the_replay(script: Script) -> None:
    # GIVEN 60 + 50 > 100 at tick 1
    timeline = script(("a", 60), ("b", 50), "a", ("c", 70))

    result = replay_plain(timeline, capacity_bytes=100)

    assert result.out_of_memory == OutOfMemory(tick=1, requested_bytes=50, allocated_bytes=60, reserved_bytes=60)
    assert result.allocated == (60, 60, 60, 60)
    assert result.requested_peak_bytes == 60


def test_the_capacity_itself_fits(script: Script) -> None:
    assert replay_plain(script(("a", 60), ("b", 40)), 100).out_of_memory is None


def test_an_empty_timeline_needs_nothing() -> None:
    result = replay_plain(Timeline((), 0), 0)

    assert result.allocated == ()
    assert result.reserved_peak_bytes == 0


def test_what_one_stream_has_freed_serves_no_other() -> None:
    # GIVEN 12 MiB freed on the default stream, then asked for on another, then on the default one again
    def block(start: int, end: int | None, stream: int) -> Block:
        return Block(12 * MIB, start, end, Category.TEMPORARY, Phase.FORWARD, stream=stream)

    timeline = Timeline((block(0, 1, 0), block(2, None, 7), block(3, None, 0)), 4)

    assert [size // MIB for size in replay(timeline).reserved] == [12, 12, 24, 24]
    assert Timeline.from_json(timeline.to_json()) == timeline


def block(size_mib, start, end, category=Category.ACTIVATION, op=""):
    return Block(size_mib * MIB, start, end, category, Phase.FORWARD, op=op)


def test_variants_leave_out_and_halve_what_a_library_can_do_without():
    # GIVEN an activation, a convolution's workspace beside it, and a workspace that a library keeps
    workspace = block(100, 1, 2, Category.WORKSPACE, "aten.convolution")
    timeline = Timeline((block(40, 0, 4), workspace, block(8, 3, None, Category.WORKSPACE, "cuBLAS workspace")), 5)

    without, half = replay_variants(timeline)

    # THEN without it two segments are enough, and the library's own comes first
    assert (without.reserved_peak_bytes, half.reserved_peak_bytes) == (60 * MIB, 110 * MIB)
    assert replay(timeline).reserved_peak_bytes == 140 * MIB
    assert without.allocated[0] == 8 * MIB
    assert len(without.allocated) == timeline.num_ticks


def test_a_workspace_that_cudnn_can_do_without_is_left_out_where_it_does_not_fit():
    # GIVEN a cached segment, a convolution's workspace that is too large, and a tensor that then needs a new segment
    workspace = block(100, 2, 3, Category.WORKSPACE, "aten.convolution")
    timeline = Timeline((block(30, 0, 1), workspace, block(40, 4, None)), 5)

    result = replay(timeline, capacity_bytes=64 * MIB)

    # THEN the cache has been released for it, and the step goes on
    assert (result.out_of_memory, result.num_left_out, result.num_retries) == (None, 1, 1)
    assert [size // MIB for size in result.reserved] == [30, 30, 0, 0, 40]
    assert replay(timeline).num_left_out == 0


def test_a_step_without_optional_workspaces_has_one_variant():
    timeline = Timeline((block(40, 0, 1),), 2)

    (only,) = replay_variants(timeline)

    assert only.reserved == replay(timeline).reserved
