import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.data.schedule import Schedule

schedules = st.builds(
    lambda total, start, batch_size, ranks, drop: Schedule(min(start, total), total, batch_size, ranks, drop),
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(1, 20),
    st.integers(1, 6),
    st.booleans(),
)


@given(schedules, st.integers(1, 5))
def test_every_sample_that_is_left_is_given_once(schedule, num_workers):
    given_out = [
        (place, rank, worker)
        for rank in range(schedule.num_ranks)
        for worker in range(num_workers)
        for start, stop in schedule.batches(rank, worker, num_workers)
        for place in range(start, stop)
    ]
    places = sorted(place for place, _, _ in given_out)
    end = schedule.num_samples
    if schedule.drop_last:
        per_round = schedule.batch_size * schedule.num_ranks
        end = schedule.start + (end - schedule.start) // per_round * per_round
    assert places == list(range(schedule.start, end))
    # and by whom is known without asking
    for rank in range(schedule.num_ranks):
        for worker in range(num_workers):
            mine = schedule.is_given_by(np.arange(schedule.num_samples), rank, worker, num_workers)
            expected = sorted(place for place, by, process in given_out if (by, process) == (rank, worker))
            assert np.flatnonzero(mine).tolist() == expected


@given(schedules)
def test_ranks_give_equally_many_batches(schedule):
    counts = {schedule.num_batches(rank) for rank in range(schedule.num_ranks)}
    if schedule.batch_size > 1 and schedule.num_samples - schedule.start >= schedule.num_ranks:
        assert len(counts) == 1
    assert max(counts) - min(counts) <= 1


@given(schedules)
def test_no_batch_is_larger_than_it_may_be(schedule):
    for rank in range(schedule.num_ranks):
        sizes = [stop - start for start, stop in schedule.batches(rank)]
        assert all(0 < size <= schedule.batch_size for size in sizes)
        assert len(sizes) == schedule.num_batches(rank)


@given(schedules, st.integers(0, 40))
def test_going_on_from_a_place_gives_the_rest(schedule, num_rounds):
    place = schedule.place_after(num_rounds)
    rest = Schedule(place, schedule.num_samples, schedule.batch_size, schedule.num_ranks, schedule.drop_last)
    if place + schedule.batch_size * schedule.num_ranks <= schedule.num_samples:
        whole = [list(schedule.batches(rank))[num_rounds] for rank in range(schedule.num_ranks)]
        if all(stop - start == schedule.batch_size for start, stop in whole):
            assert whole == [rest.batch(0, rank) for rank in range(schedule.num_ranks)]


def test_a_rest_is_spread_over_the_ranks():
    schedule = Schedule(0, 22, 5, 4)

    assert [schedule.batch(0, rank) for rank in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 11)]
    assert [schedule.batch(1, rank) for rank in range(4)] == [(11, 14), (14, 17), (17, 20), (20, 22)]


@pytest.mark.parametrize("drop_last", [False, True])
def test_nothing_left(drop_last):
    schedule = Schedule(10, 10, 4, 2, drop_last)

    assert schedule.num_rounds == 0
    assert list(schedule.batches(0)) == []
    assert schedule.num_batches(1) == 0
    assert schedule.place_after(0) == 10
