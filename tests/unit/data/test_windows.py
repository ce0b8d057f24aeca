import threading

import numpy as np
import pytest

from memfit.core.errors import BadFile
from memfit.data.geometry import Geometry
from memfit.data.order import Order, Piece
from memfit.data.schedule import Schedule
from memfit.data.windows import Room, Share, Windows
from tests.sources import ArraySource

FLOAT = np.dtype("float32")


def windows_over(source, geometry, *, share=None, limit_bytes=10**9, seed=0):
    order = Order(geometry, None, seed, 0)
    share = share or Share(Schedule(0, geometry.num_samples, geometry.batch_size))
    return order, Windows(source, order, share, [FLOAT], Room(limit_bytes, 4))


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

    assert values == order.samples(0, 1000).tolist()
    assert set(source.reads) == {1}


@pytest.mark.parametrize("num_lanes", [1, 4])
def test_workers_with_lanes_of_their_own_read_nothing_twice_and_others_keep_what_they_give(num_lanes):
    source, geometry = ArraySource(rows(1000)), Geometry(1000, 10, num_lanes, 120, 7)
    given = []
    for worker in range(2):
        share = Share(Schedule(0, 1000, 10), worker=worker, num_workers=2)
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
    windows = Windows(source, order, Share(Schedule(0, 50, 10)), [np.dtype("float16")], Room(10**6))
    out = [np.empty((50, 3), np.float64)]

    windows.take(Piece(0, 0, 0, 50), out)

    assert out[0][:, 1].tolist() == order.samples(0, 50).tolist()
