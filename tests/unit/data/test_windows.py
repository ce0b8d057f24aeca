import threading

import numpy as np
import pytest

from memfit.core.errors import BadFile
from memfit.data.geometry import Geometry
from memfit.data.order import EpochShare, Order, Piece
from memfit.data.windows import Windows
from tests.sources import ArraySource, samples_of

FLOAT = np.dtype("float32")


def windows_over(source, geometry, *, share=None, limit_bytes=10**9, seed=0):
    order = Order(geometry, None, seed, 0)
    share = share or EpochShare(0, geometry.num_samples, geometry.batch_size)
    return order, Windows(source, order, share, [FLOAT], limit_bytes, 4)


def drain(order, windows):
    values = []
    for start, stop in windows.share.batches():
        for piece in order.pieces(start, stop):
            out = [np.empty((piece.stop - piece.start, 3), FLOAT)]
            windows.take(piece, out)
            values.extend(out[0][:, 0].astype(int).tolist())
    windows.close()
    return values


def rows(count):
    return np.repeat(np.arange(count, dtype=np.float64)[:, None], 3, axis=1)


@pytest.mark.parametrize("num_lanes", [1, 2, 4])
def test_samples_are_those_of_the_order_and_each_is_read_once(num_lanes):
    source = ArraySource(rows(1000))
    order, windows = windows_over(source, Geometry(1000, 10, num_lanes, 60, 7))

    values = drain(order, windows)

    assert values == samples_of(order, 0, 1000).tolist()
    assert set(source.reads) == {1}


@pytest.mark.parametrize("num_lanes", [1, 4])
def test_workers_with_lanes_of_their_own_read_nothing_twice_and_others_keep_what_they_give(num_lanes):
    source, geometry = ArraySource(rows(1000)), Geometry(1000, 10, num_lanes, 120, 7)
    given = []
    for worker in range(2):
        share = EpochShare(0, 1000, 10, worker=worker, num_workers=2)
        order, windows = windows_over(source, geometry, share=share, limit_bytes=1000)
        given.append(drain(order, windows))

    assert sorted(given[0] + given[1]) == list(range(1000))
    assert source.reads.max() == (1 if num_lanes == 4 else 2)


def test_memory_stays_within_the_limit():
    source, geometry = ArraySource(rows(2000)), Geometry(2000, 10, 4, 60, 5)
    # Of each window the samples, and a number for each that says where it lies.
    limit = 6 * 60 * (12 + 4) + 6 * 2 * 64
    order, windows = windows_over(source, geometry, limit_bytes=limit)
    most = 0

    class Watched(dict):
        def __setitem__(self, key, value):
            nonlocal most
            super().__setitem__(key, value)
            most = max(most, sum(held.buffer.nbytes for held in self.values()))

    windows._held = Watched()
    drain(order, windows)

    assert 4 * 60 * (12 + 4) <= most <= limit


def test_a_limit_below_what_is_needed_at_once_doesnt_stop_the_reader():
    order, windows = windows_over(ArraySource(rows(500)), Geometry(500, 10, 4, 60, 5), limit_bytes=1)

    assert len(drain(order, windows)) == 500


def test_an_error_of_the_source_reaches_who_waits():
    order, windows = windows_over(ArraySource(rows(500), fails_at=300), Geometry(500, 10, 1, 60, 5))

    with pytest.raises(BadFile, match="damaged at sample 300"):
        drain(order, windows)
    windows.close()


def test_no_thread_is_left_behind():
    before = threading.active_count()
    order, windows = windows_over(ArraySource(rows(5000)), Geometry(5000, 10, 4, 60, 5), limit_bytes=5000)
    piece = next(order.pieces(0, 10))
    windows.take(piece, [np.empty((10, 3), FLOAT)])
    assert threading.active_count() > before

    windows.close()

    assert threading.active_count() == before


def test_values_are_converted_on_the_way_out():
    source, geometry = ArraySource(rows(50).astype(np.float16)), Geometry(50, 10, 1, 50, 5)
    order = Order(geometry, None, 0, 0)
    windows = Windows(source, order, EpochShare(0, 50, 10), [np.dtype("float16")], 10**6)
    out = [np.empty((50, 3), np.float64)]

    windows.take(Piece(0, 0, 0, 50), out)

    assert out[0][:, 1].tolist() == samples_of(order, 0, 50).tolist()


class Noting(ArraySource):
    """Notes which runs are read."""

    def __init__(self, *arrays, **options):
        super().__init__(*arrays, **options)
        self.runs = []

    def read(self, start, stop, out):
        self.runs.append((start, stop))
        super().read(start, stop, out)


def one_of_four(source, geometry, *, edges=None, seed=None):
    order = Order(geometry, edges, seed, 0)
    share = EpochShare(0, geometry.num_samples, geometry.batch_size, worker=1, num_workers=4)
    return order, Windows(source, order, share, [FLOAT], 10**9)


def test_a_worker_reads_only_its_batches_where_they_lie_apart():
    source = Noting(rows(80_000))
    order, windows = one_of_four(source, Geometry(80_000, 10_000, 1, 80_000, 80_000))

    assert drain(order, windows) == [*range(10_000, 20_000), *range(50_000, 60_000)]
    assert source.reads.sum() == 20_000


def test_what_is_read_beside_the_samples_of_a_worker_is_bounded():
    # GIVEN a window that is one span of 4.8 MB, of which a worker gives a sample in four
    source = Noting(rows(400_000))
    order, windows = one_of_four(source, Geometry(400_000, 10, 1, 400_000, 400_000), seed=3)

    values = drain(order, windows)

    assert len(values) == 100_000
    assert max(stop - start for start, stop in source.runs) * 12 <= 2**20
    assert source.reads.max() == 1


def test_natural_blocks_of_which_some_samples_are_wanted_are_read_one_by_one_and_once():
    edges = np.arange(0, 400_001, 100_000)
    source = Noting(rows(400_000), edges=edges)
    order, windows = one_of_four(source, Geometry(400_000, 10, 1, 400_000, 400_000), edges=edges)

    assert len(drain(order, windows)) == 100_000
    assert [start // 100_000 for start, _ in source.runs] == [0, 1, 2, 3]
    assert all(stop <= (start // 100_000 + 1) * 100_000 for start, stop in source.runs)


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_numbers_of_samples_are_those_of_the_order(seed, num_workers):
    source, geometry = ArraySource(rows(500)), Geometry(500, 10, 1, 120, 7)
    order = Order(geometry, None, seed, 0)
    share = EpochShare(30, 500, 10, worker=num_workers - 1, num_workers=num_workers)
    windows = Windows(source, order, share, [FLOAT], 10**6)

    for start, stop in share.batches():
        found, taken = [], []
        for piece in order.pieces(start, stop):
            found.extend(windows.numbers(piece).tolist())
            out = [np.empty((piece.stop - piece.start, 3), FLOAT)]
            windows.take(piece, out)
            taken.extend(out[0][:, 0].astype(int).tolist())
        assert found == taken == samples_of(order, start, stop).tolist()
    windows.close()
