"""Real histories through the model: what the program and the device decide is given, the rest is compared."""

import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest

from memfit.core.errors import BadFile
from memfit.core.replay import AllocatorOptions
from memfit.core.units import GIB, MIB
from memfit.snapshots.reader import MemorySnapshot, read_snapshot
from memfit.snapshots.replay import SnapshotReplay, divisions_of, options_of, replay_snapshot

Saved = Callable[[dict[str, Any]], MemorySnapshot]


def event(action: str, address: int, size_bytes: int, stream: int = 0, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size_bytes, "stream": stream, **more}


def freed(address: int, size_bytes: int, stream: int = 0) -> list[dict[str, Any]]:
    return [event(action, address, size_bytes, stream) for action in ("free_requested", "free_completed")]


def taken(address: int, size_bytes: int, stream: int = 0, **more: Any) -> list[dict[str, Any]]:
    """A segment and the block that takes all of it."""
    return [event(action, address, size_bytes, stream, **more) for action in ("segment_alloc", "alloc")]


def segment(address: int, size_bytes: int, *blocks: tuple[int, str], **more: Any) -> dict[str, Any]:
    rows = [{"size": size, "requested_size": size, "state": state} for size, state in blocks]
    plain = {"device": 0, "stream": 0, "segment_type": "large", "is_expandable": False}
    return {**plain, "address": address, "total_size": size_bytes, "blocks": rows, **more}


def replayed(saved: Saved, events: list[dict[str, Any]], *segments: dict[str, Any]) -> SnapshotReplay:
    snapshot = saved({"segments": list(segments), "device_traces": [events]})
    return replay_snapshot(snapshot, driver_addresses=True)


def all_places_match(result: SnapshotReplay) -> bool:
    return result.num_placed + result.num_failures == result.num_allocations


def test_a_history_from_the_start_is_exact(saved: Saved) -> None:
    # GIVEN 3 MiB in a segment of 20, then 17 MiB in the rest of it, then 30 MiB in a segment of their own, below
    a, b = 1 << 40, 1 << 39
    events = [
        event("segment_alloc", a, 20 * MIB),
        event("alloc", a, 3 * MIB),
        event("alloc", a + 3 * MIB, 17 * MIB),
        *taken(b, 30 * MIB),
        *freed(a, 3 * MIB),
        event("alloc", a, 2 * MIB),
    ]

    result = replayed(saved, events)

    assert result.is_exact and all_places_match(result)
    assert (result.num_segments, result.num_matching, result.num_allocations) == (2, 2, 4)
    assert result.reserved_peak_bytes == result.simulated_peak_bytes == 50 * MIB


def test_a_segment_that_the_device_did_not_take_is_a_difference(saved: Saved) -> None:
    # GIVEN a device that gave 3 MiB a segment of 22, which PyTorch would not ask for
    events = [event("segment_alloc", 0, 22 * MIB), event("alloc", 0, 3 * MIB)]

    result = replayed(saved, events)

    assert not result.is_exact
    assert (result.num_segments, result.num_simulated, result.num_matching) == (1, 1, 0)
    assert result.difference is not None and result.difference.event == 1
    assert result.difference.real == (f"segment_alloc {22 * MIB} on stream 0",)
    assert result.difference.simulated == (f"segment_alloc {20 * MIB} on stream 0",)


def test_streams_do_not_share_what_is_free(saved: Saved) -> None:
    # GIVEN 12 MiB that one stream has freed, and a request for as much on another
    a, b = 1 << 40, 1 << 41
    events = [
        *taken(a, 12 * MIB),
        *freed(a, 12 * MIB),
        *taken(b, 12 * MIB, stream=7),
    ]

    assert replayed(saved, events).is_exact


def test_a_block_that_another_stream_uses_is_free_when_that_is_done(saved: Saved) -> None:
    # GIVEN a free that completes only after another request has needed a segment
    a, b = 1 << 40, 1 << 41
    events = [
        *taken(a, 12 * MIB),
        event("free_requested", a, 12 * MIB),
        *taken(b, 12 * MIB),
        event("free_completed", a, 12 * MIB),
        event("alloc", a, 12 * MIB),
    ]

    result = replayed(saved, events)

    assert result.is_exact and all_places_match(result)


@pytest.mark.parametrize("is_retry", [True, False])
def test_a_full_device_or_an_emptied_cache_returns_all_that_is_free(saved: Saved, is_retry: bool) -> None:
    # GIVEN 12 and 2 MiB cached, and a request for 30 or, after `empty_cache`, again for 12
    a, b, c = 1 << 40, 1 << 41, 1 << 42
    wanted = (30 if is_retry else 12) * MIB
    events = [
        *taken(a, 12 * MIB),
        event("segment_alloc", b, 2 * MIB),
        event("alloc", b, 1024),
        *freed(a, 12 * MIB),
        *freed(b, 1024),
        event("segment_free", a, 12 * MIB),
        event("segment_free", b, 2 * MIB),
        *taken(c, wanted),
    ]

    result = replayed(saved, events)

    assert result.is_exact
    assert result.num_segments == 5


def test_running_out_of_memory_is_the_model_s_answer_too(saved: Saved) -> None:
    # GIVEN a device on which 12 MiB are used, 12 are cached, and 100 are not to be had
    a, b = 1 << 40, 1 << 41
    events = [
        *taken(a, 12 * MIB),
        *taken(b, 12 * MIB),
        *freed(a, 12 * MIB),
        event("segment_free", a, 12 * MIB),
        {"action": "oom", "device_free": 5 * MIB, "size": 100 * MIB, "stream": 0},
        *freed(b, 12 * MIB),
    ]

    result = replayed(saved, events)

    assert result.is_exact
    assert (result.num_failures, result.num_failures_matching) == (1, 1)


def test_private_pools_keep_to_themselves(saved: Saved) -> None:
    # GIVEN a graph's pool with 12 MiB free, which serve no other request, and stay when the cache is emptied
    a, b, c = 1 << 40, 1 << 41, 1 << 42
    of_graph = {"pool_id": (0, 1)}
    events = [
        *taken(a, 12 * MIB, **of_graph),
        event("free_requested", a, 12 * MIB, **of_graph),
        event("free_completed", a, 12 * MIB, **of_graph),
        *taken(b, 14 * MIB),
        *freed(b, 14 * MIB),
        event("segment_free", b, 14 * MIB),
        *taken(c, 12 * MIB),
    ]

    assert replayed(saved, events).is_exact


def test_older_versions_name_private_pools_in_the_segments_only(saved: Saved) -> None:
    a, b = 1 << 40, 1 << 41
    events = [
        *taken(a, 12 * MIB),
        *freed(a, 12 * MIB),
        *taken(b, 12 * MIB),
    ]
    segments = (
        segment(a, 12 * MIB, (12 * MIB, "inactive"), segment_pool_id=(0, 1)),
        segment(b, 12 * MIB, (12 * MIB, "active_allocated"), segment_pool_id=(0, 0)),
    )

    assert replayed(saved, events, *segments).is_exact
    assert not replayed(saved, events).is_exact


def test_what_was_there_before_is_used(saved: Saved) -> None:
    # GIVEN a segment with a block that is freed in the history and one that stays; the free block begins behind slack
    a = 1 << 40
    events = [
        event("alloc", a + 10 * MIB, 4 * MIB),
        *freed(a, 9 * MIB + 512),
        event("alloc", a, 10 * MIB),
    ]
    rows = ((10 * MIB, "active_allocated"), (4 * MIB, "active_allocated"), (6 * MIB, "inactive"))

    result = replayed(saved, events, segment(a, 20 * MIB, *rows))

    assert result.is_exact and all_places_match(result)
    assert result.num_segments == 0
    assert result.reserved_peak_bytes == 20 * MIB


def test_pages_of_expandable_segments_are_compared(saved: Saved) -> None:
    # GIVEN pages of 20 MiB, mapped as needed: 3 MiB, then 30 beside the free 17 need one more
    a = (1 << 40) + 2 * MIB
    events = [
        event("segment_map", a, 20 * MIB),
        event("alloc", a, 3 * MIB),
        event("segment_map", a + 20 * MIB, 20 * MIB),
        event("alloc", a + 3 * MIB, 30 * MIB),
        *freed(a + 3 * MIB, 30 * MIB),
        event("segment_unmap", a + 20 * MIB, 20 * MIB),
        *freed(a, 3 * MIB),
    ]

    result = replayed(saved, events)

    assert result.is_exact and all_places_match(result)
    assert result.num_segments == 3


def test_private_pools_of_older_versions_have_plain_segments_beside_expandable_ones(saved: Saved) -> None:
    # GIVEN PyTorch 2.1 with expandable segments (`alloc_block`: "... && !p.pool->owner_PrivatePool"): a graph's pool
    # gets 12 MiB of `cudaMalloc`, split at 512 bytes (`should_split` asks for the setting alone); others get pages
    a, b = 1 << 40, 1 << 41
    graph = 12 * MIB - 1024
    events = [
        event("segment_map", a, 20 * MIB),
        event("alloc", a, 3 * MIB),
        event("segment_alloc", b, 12 * MIB),
        event("alloc", b, graph),
        event("segment_alloc", b + 20 * MIB, 20 * MIB),
        event("alloc", b + 20 * MIB, 2 * MIB),
        event("alloc", b + 22 * MIB, 2 * MIB),
        event("segment_map", a + 20 * MIB, 20 * MIB),
        event("alloc", a + 3 * MIB, 30 * MIB),
    ]
    segments = (
        segment(a, 40 * MIB, (3 * MIB, "active_allocated"), (30 * MIB, "active_allocated"), (7 * MIB, "inactive")),
        segment(b, 12 * MIB, (graph, "active_allocated"), (1024, "inactive"), segment_pool_id=(0, 1)),
        segment(
            *(b + 20 * MIB, 20 * MIB, (2 * MIB, "active_allocated"), (2 * MIB, "active_allocated")),
            (16 * MIB, "inactive"),
            segment_pool_id=(0, 1),
        ),
    )
    segments[0]["is_expandable"] = True

    result = replayed(saved, events, *segments)

    assert result.is_exact and all_places_match(result)
    assert result.num_segments == 4

    # WHEN the history began late, what was there is taken over by its kind
    late = replayed(saved, events[4:], *segments)
    assert late.is_exact and all_places_match(late)
    assert late.before == (15 * MIB - 1024, 32 * MIB)


def test_a_capture_does_not_release_the_cache(saved: Saved) -> None:
    # GIVEN 12 MiB cached, and a graph whose capture runs out of memory (`captures_underway.empty() && release...`)
    a, b = 1 << 40, 1 << 41
    events = [
        *taken(a, 12 * MIB),
        *freed(a, 12 * MIB),
        *taken(b, 20 * MIB, pool_id=(0, 1)),
        {"action": "oom", "device_free": 5 * MIB, "size": 100 * MIB, "stream": 0, "pool_id": (0, 1)},
        event("alloc", a, 12 * MIB),
    ]

    result = replayed(saved, events)

    assert result.is_exact and all_places_match(result)
    assert (result.num_segments, result.num_failures_matching) == (2, 1)


@pytest.mark.parametrize("left_out", ["free_requested", "free_completed"])
def test_a_recording_may_leave_out_one_of_a_free_s_events(saved: Saved, left_out: str) -> None:
    a, b = 1 << 40, 1 << 41
    events = [*taken(a, 12 * MIB), *freed(a, 12 * MIB), event("alloc", a, 11 * MIB), *taken(b, 12 * MIB)]

    result = replayed(saved, [one for one in events if one["action"] != left_out])

    assert result.is_exact and all_places_match(result)


def test_segments_of_settings_that_were_changed_are_counted(saved: Saved) -> None:
    # GIVEN a plain segment from before a program has turned expandable segments on
    a, b = 1 << 40, 1 << 41
    events = [event("segment_map", b, 20 * MIB), event("alloc", b, 3 * MIB)]

    result = replayed(saved, events, segment(a, 20 * MIB, (20 * MIB, "active_allocated")))

    assert (result.num_unknown, result.num_matching) == (2, 1)


@pytest.mark.parametrize("seed", range(40))
def test_what_a_device_records_is_replayed_exactly(recorded: Any, saved: Saved, seed: int) -> None:
    # GIVEN random requests on several streams of a small device, and a history that may have begun late
    draw = random.Random(seed)
    max_split = draw.choice([None, None, 64 * MIB])
    device = recorded(AllocatorOptions(max_split_size_bytes=max_split), draw.choice([None, 150 * MIB]))
    streams = [0, 7, 1_234_567][: draw.randint(1, 3)]
    for _ in range(150):
        kind = draw.random()
        if kind < 0.52:
            device.malloc(int(2 ** draw.uniform(5, 25.5)), draw.choice(streams), draw.choice([(0, 0), (0, 0), (0, 1)]))
        elif kind < 0.9 and device.live:
            is_used_elsewhere = len(streams) > 1 and draw.random() < 0.2
            device.free(draw.choice(list(device.live)), is_used_elsewhere=is_used_elsewhere)
        elif kind < 0.95 and device.waiting:
            device.complete(draw.choice(list(device.waiting)))
        elif kind > 0.97:
            device.empty_cache()

    # WHEN
    first = draw.choice([0, draw.randrange(len(device.events))])
    result = replay_snapshot(saved(device.content(first)), driver_addresses=True)

    # THEN
    assert result.is_exact, result.difference
    assert all_places_match(result)
    assert result.num_unknown == 0


@pytest.mark.parametrize("seed", range(20))
def test_what_a_device_with_expandable_segments_records_is_replayed_exactly(
    recorded: Any, saved: Saved, seed: int
) -> None:
    draw = random.Random(seed)
    device = recorded(AllocatorOptions(expandable_segments=True), draw.choice([None, 150 * MIB]))
    for _ in range(100):
        kind = draw.random()
        if kind < 0.52:
            device.malloc(int(2 ** draw.uniform(5, 25)), draw.choice([0, 7]))
        elif kind < 0.97 and device.live:
            device.free(draw.choice(list(device.live)))
        elif kind > 0.97:
            device.empty_cache()

    result = replay_snapshot(saved(device.content()), driver_addresses=True)

    assert result.is_exact, result.difference


def test_each_device_has_its_own_allocator(recorded: Any, saved: Saved) -> None:
    device = recorded()
    device.malloc(3 * MIB)
    content = device.content(device=1)
    content["device_traces"][0] = taken(0, 12 * MIB)
    snapshot = saved(content)

    assert [replay_snapshot(snapshot, number).reserved_peak_bytes for number in (0, 1)] == [12 * MIB, 20 * MIB]
    assert all(replay_snapshot(snapshot, number).is_exact for number in (0, 1))
    with pytest.raises(BadFile, match=r"several devices \(0: 1 allocations; 1: 1 allocations\)"):
        replay_snapshot(snapshot)


def test_a_snapshot_without_history_says_so(saved: Saved) -> None:
    snapshot = saved({"segments": [segment(0, 2 * MIB, (2 * MIB, "inactive"))], "device_traces": [[]]})

    with pytest.raises(BadFile, match="has no history"):
        replay_snapshot(snapshot)


@pytest.mark.parametrize(("address", "size_bytes"), [(0, -1), (-1, 512), (1 << 60, 512), (0, 1 << 60)])
def test_what_no_device_has_is_refused(saved: Saved, address: int, size_bytes: int) -> None:
    with pytest.raises(BadFile, match="which no device has"):
        replayed(saved, [event("alloc", address, size_bytes)])


def test_a_history_that_contradicts_its_end_is_replayed_as_far_as_it_goes(saved: Saved) -> None:
    # GIVEN frees of blocks in no segment, blocks that overlap, and events of a version to come
    a = 1 << 40
    events = [*freed(5, 512), *freed(a + 512, MIB * 15), event("from_the_future", a, 1), event("alloc", a, 512)]
    whole = segment(a, 20 * MIB, (20 * MIB, "active_allocated"))

    result = replayed(saved, events, whole)

    assert result.num_unknown == 1
    assert not result.is_exact


def test_settings_are_those_of_the_snapshot(saved: Saved) -> None:
    settings = {
        "max_split_size": 128 * MIB,
        "expandable_segments": False,
        "roundup_power2_divisions": {"1": 4, "2": 8, "32768": 2},
    }
    content = {"segments": [], "device_traces": [[event("alloc", 0, 1)]], "allocator_settings": settings}
    snapshot = saved(content)

    assert options_of(snapshot, snapshot.history()) == AllocatorOptions(max_split_size_bytes=128 * MIB)
    assert [divisions_of(snapshot.settings, size) for size in (1, MIB, 3 * MIB, 5 * MIB, 99 * GIB)] == [4, 4, 8, 0, 2]
    assert divisions_of({}, MIB) == 0


# What no program of NVIDIA's or PyTorch's has written.

SEGMENT = {"address": 1 << 45, "total_size": 2 << 20, "stream": 0, "device": 0, "segment_type": "small", "blocks": []}
EVENT = {"action": "alloc", "addr": 1 << 45, "size": 500, "stream": 0}


def _nested():
    value = ["x"]
    for _ in range(60):
        value = [value, value]
    return value


def hostile(path, segment=None, *events):
    content = {"segments": [{**SEGMENT, **(segment or {})}], "device_traces": [[{**EVENT, **each} for each in events]]}
    path.write_bytes(pickle.dumps(content))
    return path


@pytest.mark.parametrize("event", [{"size": float("inf")}, {"action": _nested()}, {"addr": float("inf")}])
def test_values_that_are_no_numbers_or_texts(tmp_path, event):
    with pytest.raises(BadFile, match=r"in a form that isn't known"):
        read_snapshot(hostile(tmp_path / "one.pickle", None, event))


def test_a_stack_in_another_form(tmp_path):
    (event,) = read_snapshot(hostile(tmp_path / "one.pickle", None, {"frames": [{"name": _nested()}]})).history()
    with pytest.raises(BadFile, match=r"a stack in a form that isn't known"):
        event.frames  # noqa: B018


@pytest.mark.parametrize(
    ("segment", "events"),
    [
        ({"is_expandable": True, "total_size": 1 << 45}, [{}]),
        ({}, [{"action": "segment_unmap", "size": 1 << 46}, {}]),
    ],
)
def test_segments_that_no_device_has(tmp_path, segment, events):
    with pytest.raises(BadFile, match=r"which no device has"):
        replay_snapshot(read_snapshot(hostile(tmp_path / "one.pickle", segment, *events)))


def test_events_that_contradict_each_other(tmp_path):
    kinds = ["free_completed", "free_requested", "free_requested", "alloc", "alloc", "segment_free", "segment_free"]
    sizes = {"segment_free": 2 << 20}
    events = [{"action": kind, "size": sizes.get(kind, 500)} for kind in kinds]
    block = {"size": 512, "state": "active_allocated", "address": 1 << 45}
    path = hostile(tmp_path / "one.pickle", {"blocks": [block]}, *events, {"action": "oom", "size": 1 << 50})
    with pytest.raises(BadFile, match=r"contradict each other"):
        replay_snapshot(read_snapshot(path))


def test_pools_that_are_no_numbers_are_not_told(tmp_path):
    path = hostile(tmp_path / "one.pickle", None, {"pool_id": ["a", float("inf")]})
    assert replay_snapshot(read_snapshot(path)).num_allocations == 1
