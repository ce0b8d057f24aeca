"""What was there before the first event, from the history and its end."""

from collections.abc import Callable
from typing import Any

from memfit.allocator.rounding import NO_LIMIT, round_size
from memfit.core.units import MIB
from memfit.snapshots.beginning import State, find_beginning
from memfit.snapshots.reader import MemorySnapshot

Saved = Callable[[dict[str, Any]], MemorySnapshot]
A = 1 << 40


def event(action: str, address: int, size_bytes: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size_bytes, "stream": 0}


def beginning(saved: Saved, events: list[dict[str, Any]], *segments: dict[str, Any]) -> State:
    snapshot = saved({"segments": list(segments), "device_traces": [events]})
    return find_beginning(snapshot, snapshot.history(), round_size, NO_LIMIT)


def segment(size_bytes: int, *states: tuple[int, str], **more: Any) -> dict[str, Any]:
    rows = [{"size": size, "state": state} for size, state in states]
    plain = {"device": 0, "address": A, "stream": 0, "segment_type": "large"}
    return {**plain, "total_size": size_bytes, "blocks": rows, **more}


def test_what_the_history_made_was_not_there(saved: Saved) -> None:
    events = [event("segment_alloc", A, 20 * MIB), event("alloc", A, 20 * MIB)]

    state = beginning(saved, events, segment(20 * MIB, (20 * MIB, "active_allocated")))

    assert state.segments == []


def test_segments_and_blocks_that_it_only_freed_were(saved: Saved) -> None:
    freed = [event("free_requested", A, 100), event("free_completed", A, 100)]
    events = [*freed, event("segment_free", A, 2 * MIB)]

    (old,) = beginning(saved, events).segments

    assert (old.address, old.size_bytes, old.is_large, old.used) == (A, 2 * MIB, False, [(A, 512, False)])


def test_a_block_that_waits_for_a_stream_was_freed_before(saved: Saved) -> None:
    (old,) = beginning(
        saved, [event("free_completed", A, 20 * MIB)], segment(20 * MIB, (20 * MIB, "inactive"))
    ).segments

    assert old.used == [(A, 20 * MIB, True)]


def test_a_short_gap_in_the_large_pool_belongs_to_the_block_before_it(saved: Saved) -> None:
    # GIVEN 19.5 MiB freed in a segment of 20: the rest was too little to split off
    events = [event("free_requested", A, 19 * MIB + MIB // 2)]

    (old,) = beginning(saved, events, segment(20 * MIB, (20 * MIB, "active_pending_free"))).segments

    assert old.used == [(A, 20 * MIB, False)]


def test_pages_are_those_of_the_end_with_the_changes_undone(saved: Saved) -> None:
    # GIVEN 40 MiB at the end, of which 20 were mapped in the history, and 20 that it unmapped
    events = [event("segment_map", A + 20 * MIB, 20 * MIB), event("segment_unmap", A + 60 * MIB, 20 * MIB)]

    old = beginning(saved, events, segment(40 * MIB, (40 * MIB, "inactive"), is_expandable=True)).segments

    assert [(one.address - A, one.size_bytes, one.is_expandable) for one in old] == [
        (0, 20 * MIB, True),
        (60 * MIB, 20 * MIB, True),
    ]


def test_a_block_in_no_segment_is_counted(saved: Saved) -> None:
    assert beginning(saved, [event("free_requested", 512, 512)]).num_unknown == 1


def test_unmapped_pages_are_of_the_pool_of_a_block_that_was_there(saved: Saved) -> None:
    # GIVEN ten pages of 2 MiB, unmapped at once, where a small block was freed; they are no page of 20 MiB
    freed = [event("free_requested", A + MIB, 1000), event("free_completed", A + MIB, 1000)]

    (old,) = beginning(saved, [*freed, event("segment_unmap", A, 20 * MIB)]).segments

    assert (old.size_bytes, old.is_large) == (20 * MIB, False)
