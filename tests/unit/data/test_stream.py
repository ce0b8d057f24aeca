import copy
import itertools
import json
import os
import pickle
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import memfit
from memfit.catalogue.host import resident_bytes
from memfit.core.errors import BadInput
from memfit.core.units import MIB
from memfit.data.geometry import Geometry
from memfit.data.source import Layout
from memfit.data.stream import ArrayStream
from tests.sources import ArraySource, NamedSamples, stream_over


def stream_of(num_samples=1000, *, memory_bytes=MIB, **options):
    x = np.repeat(np.arange(num_samples, dtype=np.float64)[:, None], 16, axis=1)
    options = {"batch_size": 32, "memory_bytes": memory_bytes} | options
    return stream_over(ArraySource(x, np.arange(num_samples), labels=1), **options)


def large(**options):
    """One in several lanes, which real budgets have from some 40 MiB on."""
    x = np.arange(100_000)
    stream = stream_over(ArraySource(x, x, labels=1), **({"batch_size": 100, "memory_bytes": MIB} | options))
    stream.geometry = Geometry(100_000, stream.batch_size, 12, 2000, 50)
    return stream


def numbers(batches):
    return [labels.tolist() for _, labels in batches]


def flat(batches):
    return joined(numbers(batches))


def joined(lists):
    return [number for part in lists for number in part]


def test_an_epoch_gives_every_sample_once_in_an_order_of_its_own():
    stream = stream_of()
    first, second = numbers(stream), numbers(stream)

    assert sorted(joined(first)) == sorted(joined(second)) == list(range(1000))
    assert first != second
    assert len(stream) == len(first) == 32
    assert stream.epoch == 2
    again = stream_of()
    assert [numbers(again), numbers(again)] == [first, second]
    again.set_epoch(1)
    assert numbers(again) == second
    assert numbers(stream_of(seed=1)) != first


def test_without_shuffling_samples_come_as_they_are_stored():
    stream = stream_of(shuffle=False)

    assert flat(stream) == flat(stream) == list(range(1000))


def test_floating_values_are_converted_and_integers_are_not():
    features, labels = next(iter(stream_of()))
    assert (features.dtype, labels.dtype) == (np.float32, np.int64)
    assert next(iter(stream_of(dtype=None)))[0].dtype == np.float64
    assert next(iter(stream_of(dtype="float16")))[0].dtype == np.float16


def test_an_epoch_that_is_left_is_over():
    stream = stream_of()
    whole = [numbers(stream_of()), None]
    for _ in stream:
        break

    assert stream.epoch == 0
    assert numbers(stream) != whole[0]
    assert stream.epoch == 2


@pytest.mark.parametrize("make", [stream_of, large])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 5, 7])
def test_workers_taking_turns_give_the_same_order(make, num_workers):
    expected = numbers(make())
    stream = make()
    working = stream.working(num_workers)
    parts = [numbers(stream.part(worker, num_workers)) for worker in range(num_workers)]

    assert 1 <= working <= num_workers
    assert [parts[index % working][index // working] for index in range(len(expected))] == expected
    assert sum(map(len, parts)) == len(expected)


def test_workers_have_lanes_of_their_own_where_there_are_several():
    stream = large()

    assert [stream.working(count) for count in (1, 2, 3, 4, 5, 6, 7, 12, 20)] == [1, 2, 3, 4, 4, 6, 6, 12, 12]
    assert [stream.split(0, 3).working(count) for count in (1, 2, 3, 4, 5)] == [1, 2, 2, 4, 4]
    assert stream.split(0, 5).working(4) == 1


def test_more_workers_than_lanes_allow_work_where_there_is_something_else_to_do():
    assert stream_of().working(4) == 1
    assert stream_of(transform=lambda x: x).working(4) == 4
    assert stream_of(shuffle=False).working(4) == 4
    assert ArrayStream(NamedSamples(100), batch_size=4, memory_bytes=MIB).working(4) == 4


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("make", [stream_of, large])
def test_ranks_share_an_epoch_without_overlap_or_loss(make, num_ranks):
    whole = make()
    shares = [numbers(make().split(rank, num_ranks)) for rank in range(num_ranks)]

    assert sorted(number for share in shares for batch in share for number in batch) == list(range(whole.num_samples))
    assert len({len(share) for share in shares}) == 1
    # the rounds of all ranks, one after the other, are the order of the whole
    together = [number for round_ in zip(*shares, strict=True) for batch in round_ for number in batch]
    assert together == flat(whole)


@given(
    stop=st.integers(0, 40),
    ranks=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    num_workers=st.integers(0, 4),
    epoch=st.integers(0, 2),
    several_lanes=st.booleans(),
)
def test_a_stream_goes_on_with_other_numbers_of_ranks_and_workers(stop, ranks, num_workers, epoch, several_lanes):
    make = large if several_lanes else stream_of
    options = {"batch_size": 1000} if several_lanes else {}
    whole = make(**options)
    whole.set_epoch(epoch)
    expected = flat(whole)

    # GIVEN ranks that stop after a number of batches
    given_out, states = [], []
    for rank in range(ranks[0]):
        stream = make(**options).split(rank, ranks[0])
        stream.set_epoch(epoch)
        batches = iter(stream)
        given_out.append(numbers(batch for _, batch in zip(range(stop), batches, strict=False)))
        if len(given_out[-1]) < stop:
            return  # the epoch has fewer
        states.append(stream.state_dict())
    assert all(state == states[0] for state in states)
    state = json.loads(json.dumps(states[0]))

    # WHEN other ranks go on
    rest = []
    for rank in range(ranks[1]):
        stream = make(**options).split(rank, ranks[1])
        stream.load_state_dict(state)
        assert stream.epoch == epoch
        if num_workers:
            working = stream.working(num_workers)
            parts = [numbers(stream.part(worker, num_workers)) for worker in range(num_workers)]
            rest.append([parts[index % working][index // working] for index in range(sum(map(len, parts)))])
        else:
            rest.append(numbers(stream))
            assert stream.epoch == epoch + 1

    # THEN together they give the samples of the epoch in its order
    def in_order(shares):
        most = max(map(len, shares))
        rounds = ([share[turn] for share in shares if turn < len(share)] for turn in range(most))
        return [number for round_ in rounds for batch in round_ for number in batch]

    assert in_order(given_out) + in_order(rest) == expected


def test_a_state_can_be_told_without_reading():
    stream = stream_of()
    batches = iter(stream)
    for _ in range(5):
        next(batches)

    assert stream.state_dict() == stream_of().state_after(5)
    assert stream.state_after(3) == stream_of().state_after(8)
    batches.close()


def test_a_state_at_the_end_gives_nothing_and_goes_on_with_the_next_epoch():
    stream = stream_of(num_samples=64)
    batches = iter(stream)
    next(batches), next(batches)
    state = stream.state_dict()
    later = stream_of(num_samples=64)
    later.load_state_dict(state)

    assert list(later) == []
    list(batches)
    assert numbers(later) == numbers(stream)


def test_another_batch_size_goes_on_in_the_same_order():
    stream = stream_of()
    batches = iter(stream)
    before = numbers(next(batches) for _ in range(3))
    later = stream_of(batch_size=50)
    later.load_state_dict(stream.state_dict())
    batches.close()

    assert joined(before) + flat(later) == flat(stream_of())


def test_states_that_dont_belong_here_are_refused():
    state = stream_of().state_dict()
    message = r"it was taken with 1000 samples of x float64 \[16\], x1 int64 \[\], and arrays has 900"
    with pytest.raises(BadInput, match=message):
        stream_of(900).load_state_dict(state)
    with pytest.raises(BadInput, match="no state of a stream"):
        stream_of().load_state_dict({"epoch": 3})
    with pytest.raises(BadInput, match="damaged"):
        stream_of().load_state_dict(state | {"geometry": 3})
    with pytest.raises(BadInput, match="has format 9"):
        stream_of().load_state_dict(state | {"format": 9})
    with pytest.raises(BadInput, match="damaged: it is not as `state_dict` returned it"):
        stream_of().load_state_dict(state | {"samples": 2000})
    with pytest.raises(BadInput, match="shuffle=True, and the stream has False"):
        stream_of(shuffle=False).load_state_dict(state)
    with pytest.raises(BadInput, match=r"needs 148.* KiB of memory, and memory=19"):
        stream_of(memory_bytes=20_000).load_state_dict(state)


def test_streams_can_be_sent_to_other_processes():
    stream = pickle.loads(pickle.dumps(stream_of()))

    assert numbers(stream) == numbers(stream_of())


def test_drop_last_gives_full_batches_only():
    stream = stream_of(drop_last=True).split(1, 3)

    assert {len(batch) for batch in numbers(stream)} == {32}
    assert len(stream) == 1000 // 96


def test_what_it_tells_of_itself():
    stream = stream_of()

    assert stream.num_samples == 1000
    assert stream.batch_bytes == 32 * (16 * 4 + 8)
    assert [field.name for field in stream.fields] == ["x", "x1"]
    assert stream.classes == ()
    assert stream.in_flight_bytes + stream.window_bytes <= MIB
    assert ArrayStream(NamedSamples(10), batch_size=2, memory_bytes=MIB).classes == ("odd", "even")
    stream.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, but 0 was given"),
        ({"batch_size": 2.5}, "but 2.5 was given"),
        ({"seed": "a"}, "seed must be a whole number, but 'a' was given"),
        ({"dtype": "int8"}, "dtype='int8' can't be given: it is the type of floating values, one of float16"),
        ({"dtype": "nonsense"}, "dtype='nonsense' can't be given"),
        ({"memory_bytes": 100}, "memory=100 B is too little for batches of 32"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(BadInput, match=message):
        stream_of(**options)
    with pytest.raises(BadInput, match="rank 2 of 2 ranks"):
        stream_of().split(2, 2)


def test_epochs_made_by_processes_are_counted_as_others_are():
    stream, plain = stream_of(), stream_of()

    made = [numbers(stream.parallel(2)), numbers(stream.parallel(2))]

    assert made == [numbers(plain), numbers(plain)]
    batches = stream.parallel(2)
    next(batches)
    assert stream.state_dict() == plain.state_after(1)
    batches.close()


def test_no_more_workers_than_there_is_room_for_what_reading_takes():
    class Costly(ArraySource):
        @property
        def layout(self):
            return Layout(scratch_bytes=100_000)

        @layout.setter
        def layout(self, value):
            pass

    stream = ArrayStream(Costly(np.zeros((5000, 8))), batch_size=4, memory_bytes=MIB, shuffle=False)

    assert stream.working(8) == 2


def peak_of(stream):
    tracemalloc.start()
    try:
        for _ in stream:
            pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("transform", [None, float])
def test_very_small_samples_stay_within_the_budget(transform):
    stream = ArrayStream(
        ArraySource(np.zeros(4_000_000, np.float32)), batch_size=800, memory_bytes=8 * MIB, transform=transform
    )
    assert stream.geometry.window_samples < 1_000_000

    # Beside it: the places of some samples that are looked at together.
    assert peak_of(itertools.islice(stream, 3000 if transform is None else 3)) < 11 * MIB


def test_large_batches_stay_within_the_budget():
    x = np.zeros((20_000, 64), np.float32)
    stream = ArrayStream(ArraySource(x), batch_size=4000, memory_bytes=4 * MIB)

    assert 2 * stream.batch_bytes <= stream.in_flight_bytes
    assert stream.in_flight_bytes + stream.window_bytes <= 4 * MIB
    assert peak_of(stream) < 4.5 * MIB


def test_a_window_is_read_while_the_one_before_it_is_used():
    # GIVEN windows whose arrays don't end at a multiple of the alignment
    source, window = ArraySource(np.zeros((10_000, 3), np.float32)), 1001
    stream = ArrayStream(source, batch_size=10, memory_bytes=50_000)
    stream.geometry = Geometry(10_000, 10, 1, window, 1)

    batches = iter(stream)
    next(batches)

    deadline = time.monotonic() + 30
    while source.reads.sum() <= window and time.monotonic() < deadline:
        time.sleep(0.01)
    assert source.reads.sum() > window
    batches.close()


@pytest.mark.parametrize("name", ["format", "seed", "epoch", "samples", "shuffle", "geometry", "fingerprint", "digest"])
def test_states_that_lack_something_are_refused(name):
    state = stream_of().state_dict()
    del state[name]

    with pytest.raises(BadInput, match=r"no state of a stream: KeyError|the state of the stream is damaged"):
        stream_of().load_state_dict(state)


def test_workers_that_cant_be_started_use_up_no_epoch(monkeypatch):
    stream = stream_of()
    first = numbers(stream_of())

    def refused(*args, **options):
        raise OSError("no more processes")

    monkeypatch.setattr("memfit.data.stream.WorkerBatches", refused)
    with pytest.raises(OSError, match="no more processes"):
        stream.parallel(2)

    assert numbers(stream) == first


def test_transforms_of_labels_need_labels():
    source = ArraySource(np.zeros((10, 3)), name="x.npy")
    for options in ({"transform": lambda x, y: (x, y)}, {"batch_transform": lambda x, y: (x, y)}):
        with pytest.raises(BadInput, match=r"takes features and labels, and x\.npy has no labels"):
            stream_over(source, batch_size=2, memory_bytes=MIB, **options)


def test_ranks_that_cant_give_equally_many_batches_are_told(caplog):
    stream_of(12, batch_size=1).split(0, 4)
    stream_of(10, batch_size=1, drop_last=True).split(0, 4)
    stream_of(10, batch_size=1).split(1, 4)
    assert not caplog.records

    stream_of(10, batch_size=1).split(0, 4)

    assert "different numbers of batches, 3 and 2" in caplog.text
    assert "drop_last=True" in caplog.text


def test_data_that_changed_is_refused():
    state = stream_of().state_after(3) | {"fingerprint": "of the original"}
    stream = stream_of()

    with pytest.raises(BadInput, match=r'written or copied since the position was saved.*on_change="warn"\)'):
        stream.load_state_dict(state)

    # THEN nothing of the state was taken
    assert flat(stream) == flat(stream_of())


def test_a_file_that_was_rewritten_is_refused(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.arange(100.0))
    state = memfit.stream(path, batch_size=10).state_after(3)
    memfit.stream(path, batch_size=10).load_state_dict(state)
    np.save(path, np.arange(100.0)[::-1])
    os.utime(path, ns=(1, 1))

    with pytest.raises(BadInput, match="written or copied"):
        memfit.stream(path, batch_size=10).load_state_dict(state)
    memfit.stream(path, batch_size=10, options=memfit.StreamOptions(on_change="warn")).load_state_dict(state)
    with pytest.raises(BadInput, match='on_change must be "refuse" or "warn", but \'never\' was given'):
        memfit.stream(path, batch_size=10, options=memfit.StreamOptions(on_change="never"))


def leaves(state, path=()):
    """Every value of a state, with where it is."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for name, value in items:
        yield (*path, name), value
        yield from leaves(value, (*path, name))


def tampered(value):
    """Other values in its place: of another type, out of range, and such as could be."""
    yield from (None, [], {}, "", "x", float("nan"), -1, 2**70, True, b"x", [value], {"x": value})
    if type(value) is int:
        yield from (value + 1, float(value), value + 0.5, str(value), bool(value))
    if type(value) is str:
        yield from (value + "0", value[::-1], value.encode(), "f" * 32)
    if type(value) is bool:
        yield from (int(value), str(value), not value)


def test_no_state_is_taken_that_was_tampered_with(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.zeros((100, 2)), y=np.arange(100))
    stream = memfit.stream(tmp_path / "x.npz", labels="y", batch_size=8, options=memfit.StreamOptions(on_change="warn"))
    whole = stream.state_after(3)
    num_tried = 0
    for path, value in leaves(whole):
        for other in tampered(value):
            if type(other) is type(value) and other == value:
                continue
            state = copy.deepcopy(whole)
            place = state
            for name in path[:-1]:
                place = place[name]
            place[path[-1]] = other
            num_tried += 1
            if path == ("fingerprint",):
                # Might be that of other files: the user chose to be warned.
                stream.load_state_dict(state)
                continue
            with pytest.raises(BadInput):
                stream.load_state_dict(state)
    assert num_tried > 200
    for state in (whole | {"more": 1}, [whole], None, "state", list(whole)):
        with pytest.raises(BadInput):
            stream.load_state_dict(state)
    stream.load_state_dict(json.loads(json.dumps(whole)))


def test_data_that_was_copied_is_taken_with_a_warning_where_the_user_insists(caplog):
    state = stream_of().state_after(3) | {"fingerprint": "of the original"}
    stream = stream_of(on_change="warn")

    stream.load_state_dict(state)

    assert "written or copied since the position was saved" in caplog.text
    assert flat(stream) == flat(stream_of())[96:]


def test_types_may_be_named_as_pytorch_does():
    torch = pytest.importorskip("torch")

    assert stream_of(dtype=torch.float16).dtypes[0] == np.float16


def test_images_leave_half_of_the_memory_to_batches():
    source = NamedSamples(100, shapes=lambda number: (100, 100, 3))
    stream = ArrayStream(source, batch_size=8, memory_bytes=4 * MIB)

    assert stream.in_flight_bytes == 2 * MIB
    assert stream.in_flight_bytes + stream.window_bytes <= 4 * MIB


def test_epoch_after_epoch_takes_no_more_memory(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((16_384, 1024), np.float32))
    stream = memfit.stream(tmp_path / "x.npy", batch_size=64, memory="32MiB")
    for _ in zip(range(10), stream, strict=False):
        pass
    before, most = resident_bytes(), 0
    for _ in range(5):
        for number, _batch in enumerate(stream):
            if number % 16 == 0:
                most = max(most, resident_bytes() - before)

    assert most < 40 * MIB
