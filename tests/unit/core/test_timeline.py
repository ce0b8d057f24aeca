import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.core.errors import BadFile
from memfit.core.timeline import Block, Category, Mark, Phase, Timeline


def block(size_bytes, start, end=None, category=Category.TEMPORARY, module="", op="aten.add"):
    return Block(size_bytes, start, end, category, Phase.FORWARD, module, op, "train.py:3")


#      tick  0    1    2    3    4
#      live 10   30   10    0    9
SMALL = Timeline(
    (
        block(10, 0, 3, Category.PARAMETER, "a"),
        block(20, 1, 2, Category.ACTIVATION, "b"),
        block(9, 4, None, Category.ACTIVATION, "a"),
    ),
    5,
    (Mark(0, Phase.SETUP, 0), Mark(1, Phase.FORWARD, 1), Mark(4, Phase.FORWARD, 2)),
)


@st.composite
def timelines(draw):
    """Timelines in which every tick is one event."""
    events = draw(st.lists(st.integers(0, 2**40), max_size=20))
    blocks, live, tick = [], [], 0
    for size in events:
        if live and draw(st.booleans()):
            index = live.pop(draw(st.integers(0, len(live) - 1)))
            blocks[index] = (*blocks[index][:2], tick)
        else:
            live.append(len(blocks))
            blocks.append((size, tick, None))
        tick += 1
    categories = draw(st.lists(st.sampled_from(Category), min_size=len(blocks), max_size=len(blocks)))
    return Timeline(tuple(block(*row, category) for row, category in zip(blocks, categories, strict=True)), tick)


def test_the_curve_counts_live_bytes():
    assert SMALL.curve() == [10, 30, 10, 0, 9]
    assert SMALL.peak() == (1, 30)


def test_nothing_allocated_has_no_peak():
    assert Timeline((), 0).peak() == (0, 0)
    assert Timeline((), 0).curve() == []


def test_events_come_in_order_of_time():
    assert list(SMALL.events()) == [(0, True), (1, True), (1, False), (0, False), (2, True)]


def test_live_blocks_exclude_what_is_freed_at_the_tick():
    assert [b.size_bytes for b in SMALL.live_at(1)] == [10, 20]
    assert [b.size_bytes for b in SMALL.live_at(2)] == [10]


def test_a_breakdown_is_largest_first():
    assert list(SMALL.breakdown(1, lambda b: str(b.category)).items()) == [("activation", 20), ("parameter", 10)]


def test_marks_hold_until_the_next():
    assert SMALL.mark_at(0) == Mark(0, Phase.SETUP, 0)
    assert SMALL.mark_at(3) == Mark(1, Phase.FORWARD, 1)
    assert SMALL.mark_at(99) == Mark(4, Phase.FORWARD, 2)
    assert Timeline((), 0).mark_at(0) == Mark(0, Phase.SETUP, 0)


def test_without_leaves_time_as_it_is():
    left = SMALL.without(lambda b: b.module == "a")

    assert [b.size_bytes for b in left.blocks] == [20]
    assert (left.num_ticks, left.marks) == (5, SMALL.marks)
    assert left.curve() == [0, 20, 0, 0, 0]


@given(timelines())
def test_json_gives_the_same_timeline_back(timeline):
    text = json.dumps(timeline.to_json())

    assert Timeline.from_json(text) == timeline
    assert Timeline.from_json(text.encode()) == timeline
    assert Timeline.from_json(json.loads(text)) == timeline


@given(timelines())
def test_a_breakdown_adds_up_to_the_curve(timeline):
    for tick, live in enumerate(timeline.curve()):
        assert sum(timeline.breakdown(tick, lambda b: str(b.category)).values()) == live


def test_json_stores_each_string_once():
    strings = SMALL.to_json()["strings"]

    assert len(strings) == len(set(strings))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("blocks"),
        lambda d: d.pop("strings"),
        lambda d: d.update(strings=[]),
        lambda d: d.update(num_ticks="many"),
        lambda d: d.update(num_ticks=2),
        lambda d: d.update(blocks=[[1, 2]]),
        lambda d: d.update(blocks=7),
        lambda d: d["blocks"].append([1, 3, 2, 0, 1, 2, 3, 4]),
        lambda d: d.update(marks=[[0, "siesta", 1]]),
        lambda d: d["strings"].__setitem__(0, "no category"),
    ],
)
def test_a_damaged_timeline_is_refused(change):
    data = json.loads(json.dumps(SMALL.to_json()))
    change(data)

    with pytest.raises(BadFile, match="not a timeline written by memfit"):
        Timeline.from_json(data)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", b"\xff", '{"format": "memfit.timeline"}'])
def test_what_is_no_timeline_is_refused(text):
    with pytest.raises(BadFile, match="not a timeline written by memfit"):
        Timeline.from_json(text)


@pytest.mark.parametrize("change", [{"version": 99}, {"format": "memfit.estimate"}])
def test_another_format_is_told(change):
    with pytest.raises(BadFile, match=r"expected a memfit\.timeline of version 1, got"):
        Timeline.from_json(SMALL.to_json() | change)
