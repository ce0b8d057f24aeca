import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.data.geometry import Geometry
from memfit.data.order import Order, random_generator

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

    assert sorted(order.samples(0, geometry.num_samples)) == list(range(geometry.num_samples))


@given(geometries, st.lists(st.integers(1, 499), max_size=20), st.integers(1, 5))
def test_natural_blocks_are_kept_together_in_windows(geometry, inner, num_merged):
    total = geometry.num_samples
    edges = np.unique([0, *(edge for edge in inner if edge < total), total])
    geometry = Geometry(total, geometry.batch_size, geometry.num_lanes, geometry.window_samples, 0, num_merged)
    order = Order(geometry, edges, 1, 0)

    assert sorted(order.samples(0, total)) == list(range(total))


@given(geometries)
def test_places_of_windows_are_those_of_their_pieces(geometry):
    order = Order(geometry, None, 5, 2)
    for place in range(0, geometry.num_samples, 7):
        (piece,) = order.pieces(place, place + 1)
        window = order.window(piece.lane, piece.window)
        assert order.places(window)[piece.start] == place
        assert window.num_samples <= max(1, geometry.window_samples)


@given(geometries)
def test_without_a_seed_a_single_lane_gives_samples_as_stored(geometry):
    geometry = Geometry(geometry.num_samples, geometry.batch_size, 1, geometry.window_samples, geometry.window_samples)

    samples = Order(geometry, None, None, 3).samples(0, geometry.num_samples)

    assert samples.tolist() == list(range(geometry.num_samples))


def test_seeds_and_epochs_differ_and_repeat():
    geometry = Geometry(1000, 32, 4, 100, 10)
    orders = {
        (seed, epoch): tuple(Order(geometry, None, seed, epoch).samples(0, 1000))
        for seed in (0, 1, -1, 2**70)
        for epoch in (0, 1)
    }

    assert len(set(orders.values())) == len(orders)
    assert tuple(Order(geometry, None, 1, 1).samples(0, 1000)) == orders[1, 1]


def test_batches_take_turns_among_lanes():
    geometry = Geometry(1000, 10, 4, 50, 10)

    lanes = [next(Order(geometry, None, 0, 0).pieces(start, start + 10)).lane for start in range(0, 100, 10)]

    assert lanes == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_lanes_come_to_the_end_of_their_windows_at_different_times():
    order = Order(Geometry(12_000, 10, 4, 400, 10), None, 0, 0)

    assert [order.window(lane, 0).num_samples for lane in range(4)] == [100, 200, 300, 400]


def test_the_order_is_near_that_of_a_full_shuffle():
    # GIVEN samples that are sorted by label, ten labels
    geometry = Geometry(200_000, 64, 12, 6_000, 30)
    samples = Order(geometry, None, 0, 0).samples(0, 200_000)
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
        return abs(np.corrcoef(Order(geometry, None, seed, 0).samples(0, 30_000), np.arange(30_000))[0, 1])

    # By chance it would be 0.058 on average.
    assert max(correlation(seed) for seed in range(10)) < 0.03
