from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.data.geometry import Geometry
from memfit.data.order import EpochShare, Order, random_generator
from tests.sources import samples_of

geometries = st.builds(
    Geometry,
    num_samples=st.integers(1, 500),
    batch_size=st.integers(1, 20),
    num_lanes=st.sampled_from([1, 2, 3, 4, 6, 12]),
    window_samples=st.integers(1, 100),
    block_samples=st.integers(1, 30),
)


@given(geometries, st.integers(0, 3), st.integers(0, 3))
def test_every_sample_comes_once(geometry, seed, epoch):
    order = Order(geometry, None, seed, epoch)

    assert sorted(samples_of(order, 0, geometry.num_samples)) == list(range(geometry.num_samples))


@given(geometries, st.lists(st.integers(1, 499), max_size=20), st.integers(1, 5))
def test_natural_blocks_are_kept_together_in_windows(geometry, inner, num_merged):
    total = geometry.num_samples
    edges = np.unique([0, *(edge for edge in inner if edge < total), total])
    geometry = Geometry(total, geometry.batch_size, geometry.num_lanes, geometry.window_samples, 0, num_merged)
    order = Order(geometry, edges, 1, 0)

    assert sorted(samples_of(order, 0, total)) == list(range(total))


@given(geometries)
def test_places_of_windows_are_those_of_their_pieces(geometry):
    order = Order(geometry, None, 5, 2)
    for place in range(0, geometry.num_samples, 7):
        (piece,) = order.pieces(place, place + 1)
        first, last = order.extent(piece.lane, piece.window)
        assert order.lane_places(piece.lane, first, last)[piece.start] == place
        assert last - first <= max(1, geometry.window_samples)


@given(geometries)
def test_without_a_seed_a_single_lane_gives_samples_as_stored(geometry):
    geometry = Geometry(geometry.num_samples, geometry.batch_size, 1, geometry.window_samples, geometry.window_samples)

    samples = samples_of(Order(geometry, None, None, 3), 0, geometry.num_samples)

    assert samples.tolist() == list(range(geometry.num_samples))


def test_seeds_and_epochs_differ_and_repeat():
    geometry = Geometry(1000, 32, 4, 100, 10)
    orders = {
        (seed, epoch): tuple(samples_of(Order(geometry, None, seed, epoch), 0, 1000))
        for seed in (0, 1, -1, 2**70)
        for epoch in (0, 1)
    }

    assert len(set(orders.values())) == len(orders)
    assert tuple(samples_of(Order(geometry, None, 1, 1), 0, 1000)) == orders[1, 1]


def test_batches_take_turns_among_lanes():
    geometry = Geometry(1000, 10, 4, 50, 10)

    lanes = [next(Order(geometry, None, 0, 0).pieces(start, start + 10)).lane for start in range(0, 100, 10)]

    assert lanes == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_lanes_come_to_the_end_of_their_windows_at_different_times():
    order = Order(Geometry(12_000, 10, 4, 400, 10), None, 0, 0)

    assert [order.extent(lane, 0) for lane in range(4)] == [(0, 100), (0, 200), (0, 300), (0, 400)]


def test_the_order_is_near_that_of_a_full_shuffle():
    # GIVEN samples that are sorted by label, ten labels
    geometry = Geometry(200_000, 64, 12, 6_000, 30)
    samples = samples_of(Order(geometry, None, 0, 0), 0, 200_000)
    labels = samples // 20_000
    full = np.random.default_rng(0).permutation(200_000) // 20_000

    # THEN neighbours agree about as often, and positions don't tell where a sample came from
    runs, full_runs = np.count_nonzero(np.diff(labels)), np.count_nonzero(np.diff(full))
    assert runs == pytest.approx(full_runs, rel=0.02)
    assert abs(np.corrcoef(samples, np.arange(200_000))[0, 1]) < 0.05
    displacement = np.abs(samples - np.arange(200_000)).mean()
    assert displacement == pytest.approx(200_000 / 3, rel=0.05)


def test_generators_depend_on_their_key_alone():
    assert random_generator(1, 2).integers(2**62) == random_generator(1, 2).integers(2**62)
    assert random_generator(1, 2).integers(2**62) != random_generator(2, 1).integers(2**62)


def test_few_blocks_are_as_little_correlated_with_their_places_as_many():
    geometry = Geometry(30_000, 50, 1, 6_000, 100)

    def correlation(seed):
        return abs(np.corrcoef(samples_of(Order(geometry, None, seed, 0), 0, 30_000), np.arange(30_000))[0, 1])

    # By chance it would be 0.058 on average.
    assert max(correlation(seed) for seed in range(10)) < 0.03


shares = st.builds(
    lambda total, start, batch_size, ranks, drop: EpochShare(min(start, total), total, batch_size, ranks, drop),
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(1, 20),
    st.integers(1, 6),
    st.booleans(),
)


@given(shares, st.integers(1, 5))
def test_every_sample_that_is_left_is_given_once(share, num_workers):
    given_out = [
        (place, rank, worker)
        for rank in range(share.num_ranks)
        for worker in range(num_workers)
        for start, stop in replace(share, rank=rank, worker=worker, num_workers=num_workers).batches()
        for place in range(start, stop)
    ]
    places = sorted(place for place, _, _ in given_out)
    end = share.num_samples
    if share.drop_last:
        per_round = share.batch_size * share.num_ranks
        end = share.start + (end - share.start) // per_round * per_round
    assert places == list(range(share.start, end))
    # and by whom is known without asking
    for rank in range(share.num_ranks):
        for worker in range(num_workers):
            mine = replace(share, rank=rank, worker=worker, num_workers=num_workers).gives(np.arange(share.num_samples))
            expected = sorted(place for place, by, process in given_out if (by, process) == (rank, worker))
            assert np.flatnonzero(mine).tolist() == expected


@given(shares)
def test_ranks_give_equally_many_batches(share):
    counts = {replace(share, rank=rank).num_batches for rank in range(share.num_ranks)}
    if share.batch_size > 1 and share.num_samples - share.start >= share.num_ranks:
        assert len(counts) == 1
    assert max(counts) - min(counts) <= 1


@given(shares)
def test_no_batch_is_larger_than_it_may_be(share):
    for rank in range(share.num_ranks):
        sizes = [stop - start for start, stop in replace(share, rank=rank).batches()]
        assert all(0 < size <= share.batch_size for size in sizes)
        assert len(sizes) == replace(share, rank=rank).num_batches


@given(shares, st.integers(0, 40))
def test_going_on_from_a_place_gives_the_rest(share, num_rounds):
    place = share.place_after(num_rounds)
    rest = EpochShare(place, share.num_samples, share.batch_size, share.num_ranks, share.drop_last)
    if place + share.batch_size * share.num_ranks <= share.num_samples:
        whole = [list(replace(share, rank=rank).batches())[num_rounds] for rank in range(share.num_ranks)]
        if all(stop - start == share.batch_size for start, stop in whole):
            assert whole == [replace(rest, rank=rank).batch(0) for rank in range(share.num_ranks)]


def test_a_rest_is_spread_over_the_ranks():
    share = EpochShare(0, 22, 5, 4)

    assert [replace(share, rank=rank).batch(0) for rank in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 11)]
    assert [replace(share, rank=rank).batch(1) for rank in range(4)] == [(11, 14), (14, 17), (17, 20), (20, 22)]


@pytest.mark.parametrize("drop_last", [False, True])
def test_nothing_left(drop_last):
    share = EpochShare(10, 10, 4, 2, drop_last)

    assert share.num_rounds == 0
    assert list(share.batches()) == []
    assert replace(share, rank=1).num_batches == 0
    assert share.place_after(0) == 10
