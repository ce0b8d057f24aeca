import random
from dataclasses import replace

import pytest

from memfit.allocator import replay
from memfit.core.errors import BadFile
from memfit.core.replay import AllocatorOptions
from memfit.core.timeline import Block, Category, Mark, Phase, Timeline
from memfit.core.units import MIB
from memfit.snapshots.difference import DifferenceKind, Simulated, SnapshotDifference, compare_with
from memfit.snapshots.reader import read_snapshot
from tests.snapshot_files import written

NUM_LAYERS = 20


def made_of(events):
    """A timeline of (block, whether it is its start)."""
    starts, ends = {}, {}
    for tick, (key, _) in enumerate(events):
        (ends if key in starts else starts)[key] = tick
    facts = dict(events)
    blocks = [
        Block(facts[key][0], start, ends.get(key), Category.TEMPORARY, Phase.FORWARD, "", *facts[key][1:])
        for key, start in starts.items()
    ]
    return blocks, len(events)


def steps(num_steps, *, extra=0):
    """Weights, then steps of a forward pass that keeps a block of each layer, and a backward pass that frees it."""
    events, marks = [], []
    for layer in range(NUM_LAYERS):
        events.append((("weight", layer), (MIB + 512 * layer, "aten.empty", "train.py:1")))
    for step in range(num_steps):
        marks.append(Mark(len(events), Phase.FORWARD, step + 1))
        for layer in range(NUM_LAYERS):
            fact = ((2 + layer) * MIB, "aten.add", f"train.py:{10 + layer}")
            events.append(((step, layer), fact))
            short = ((step, layer, "short"), (1024 * (layer + 1), "aten.sum", "train.py:5"))
            events += [short, short]
        for layer in reversed(range(NUM_LAYERS)):
            gradient = ((step, layer, "gradient"), ((2 + layer) * MIB + 512, "aten.mul", ""))
            events += [gradient, ((step, layer), ((2 + layer) * MIB, "aten.add", f"train.py:{10 + layer}")), gradient]
    blocks, num_ticks = made_of(events)
    return Timeline(tuple(blocks), num_ticks, tuple(marks))


def compared(real, simulated, path, **options):
    snapshot = read_snapshot(written(real, path / "snapshot.pickle", **options))
    return compare_with(
        snapshot, Simulated("train.py", "a GPU", simulated, replay(simulated, AllocatorOptions(), None))
    )


def kinds(result):
    return {(group.kind, group.op, group.source, group.count) for group in result.groups}


def test_the_same_program_is_the_same(tmp_path):
    result = compared(steps(2), steps(2), tmp_path)

    assert result.is_same
    assert result.is_whole
    assert result.groups == ()
    assert result.real == result.simulated
    assert (result.first_step, result.last_step) == (0, 2)
    assert result.num_operators == result.real.num_allocations


def test_what_the_simulation_lacks_is_missing_with_its_effect_on_the_peak(tmp_path):
    def keeps(block):
        return block.size_bytes != 21 * MIB

    lacking = steps(2).without(lambda block: not keeps(block))
    result = compared(steps(2), replace(lacking, num_ticks=steps(2).num_ticks), tmp_path)

    # THEN the last layer's block is missing in both steps, and lived at the peak of one
    [group] = result.groups
    assert (group.kind, group.op, group.source, group.count) == (DifferenceKind.MISSING, "aten.add", "train.py:29", 2)
    assert (group.size_bytes, group.sizes, group.peak_bytes) == (42 * MIB, ((21 * MIB, 2),), 21 * MIB)
    assert (result.num_missing, result.num_invented) == (2, 0)


def test_what_the_device_lacks_is_invented(tmp_path):
    result = compared(steps(2), steps(2), tmp_path, keeps=lambda block: block.source != "train.py:12")

    [group] = result.groups
    assert (group.kind, group.source, group.count, group.peak_bytes) == (
        DifferenceKind.INVENTED,
        "train.py:12",
        2,
        -4 * MIB,
    )


def test_a_history_that_began_late_is_found_in_the_last_step_like_it(tmp_path):
    # GIVEN a history of the third step of three
    simulated = steps(4)
    first = next(mark.tick for mark in simulated.marks if mark.step == 3) + 4
    result = compared(steps(3), simulated, tmp_path, first_tick=first)

    # THEN it is compared with the last, which is as warm
    assert not result.is_whole
    assert result.num_aligned == result.real.num_allocations == result.simulated.num_allocations
    assert (result.first_step, result.last_step) == (4, 4)
    assert result.real.before_bytes > 20 * MIB


@pytest.mark.parametrize("seed", range(12))
def test_a_history_that_began_and_ended_amid_steps_is_found_there(tmp_path, seed):
    # GIVEN a weight, six steps of twelve layers that are alike, and the allocations of a part of them
    step = [5 * MIB, *[2 * MIB, 3 * MIB, 512, 4 * MIB] * 12, 6 * MIB, *[7 * MIB, 2 * MIB, 1024] * 12, 8 * MIB]
    events = [("weight", (9 * MIB, "aten.empty", ""))]
    for number, size_bytes in enumerate(step * 6):
        events += [(number, (size_bytes, "aten.add", ""))] * 2
    blocks, num_ticks = made_of(events)
    simulated = Timeline(tuple(blocks), num_ticks, (Mark(0, Phase.FORWARD, 1),))
    draw = random.Random(seed)
    first = draw.randrange(100, num_ticks // 2)
    last = draw.randrange(first + 60, num_ticks)
    result = compared(simulated, simulated, tmp_path, first_tick=first, keeps=lambda block: block.start < last)

    # THEN none of the simulated allocations around them is compared with them
    assert result.num_aligned == result.real.num_allocations == result.simulated.num_allocations


def test_the_same_in_another_order(tmp_path):
    # GIVEN a program that computes two layers the other way round
    swapped = steps(2)
    places = {"train.py:12": "train.py:13", "train.py:13": "train.py:12"}
    sizes = {"train.py:12": 5 * MIB, "train.py:13": 4 * MIB}
    blocks = [
        replace(b, size_bytes=sizes[b.source], source=places[b.source]) if b.source in places else b
        for b in swapped.blocks
    ]
    result = compared(steps(2), replace(swapped, blocks=tuple(blocks)), tmp_path)

    assert result.num_moved == 4
    assert (result.num_missing, result.num_invented) == (0, 0)
    assert DifferenceKind.MOVED in {group.kind for group in result.groups}


def test_what_is_freed_at_another_time(tmp_path):
    # GIVEN a simulation that keeps the first layer's short block until the end of the step
    late = [
        replace(b, end=b.end + 30) if b.source == "train.py:5" and b.size_bytes == 1024 else b for b in steps(2).blocks
    ]
    taken = {b.end for b in late} - {None}
    assert len(taken) < len(late)
    events = sorted(
        [(b.start, n, 1) for n, b in enumerate(late)] + [(b.end, n, 0) for n, b in enumerate(late) if b.end]
    )
    ticks = {(n, kind): tick for tick, (_, n, kind) in enumerate(events)}
    blocks = [replace(b, start=ticks[n, 1], end=ticks.get((n, 0))) for n, b in enumerate(late)]
    result = compared(steps(2), Timeline(tuple(blocks), len(events)), tmp_path)

    assert kinds(result) == {(DifferenceKind.FREED_EARLIER, "aten.sum", "train.py:5", 2)}


def test_too_few_simulated_steps_are_told(tmp_path):
    result = compared(steps(3), steps(1), tmp_path)

    assert result.ends_early
    assert not compared(steps(3), steps(3), tmp_path).ends_early


def test_another_program_is_refused(tmp_path):
    other, num_ticks = made_of([((n,), (7 * MIB + 512 * n, "aten.add", "other.py:1")) for n in range(50)])

    with pytest.raises(BadFile, match=r"(?s)have nothing in common.*Name the program that made the snapshot"):
        compared(steps(1), Timeline(tuple(other), num_ticks), tmp_path)


def test_a_history_of_frees_alone_is_refused(tmp_path, saved):
    snapshot = saved(
        {"segments": [], "device_traces": [[{"action": "free_requested", "addr": 512, "size": 512, "stream": 0}]]}
    )
    timeline = steps(1)

    with pytest.raises(BadFile, match="without any allocation"):
        compare_with(snapshot, Simulated("train.py", "a GPU", timeline, replay(timeline, AllocatorOptions(), None)))


def test_json_comes_back(tmp_path):
    result = compared(steps(2), steps(2), tmp_path, keeps=lambda block: block.source != "train.py:12")

    assert SnapshotDifference.from_json(result.to_json()) == result
    assert result.to_json()["num_invented"] == 2
    with pytest.raises(BadFile, match="not a difference"):
        SnapshotDifference.from_json("{}")


def test_summary(tmp_path):
    result = compared(steps(1), steps(1), tmp_path)

    assert repr(result) == "<SnapshotDifference 80 of 80 real and 80 simulated allocations aligned>"
