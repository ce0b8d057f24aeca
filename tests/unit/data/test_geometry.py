import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.core.errors import BadInput
from memfit.core.units import GIB, KIB, MIB
from memfit.data.geometry import SampleBytes, divide, in_flight_bytes, num_held, sizes_of, windows_bytes
from memfit.data.source import Field, Layout

ROW = SampleBytes(4096, 4096)


def test_windows_and_batches_stay_within_the_budget():
    geometry = divide(524_288, Layout(), ROW, 256, 512 * MIB, shuffle=True)

    assert geometry.num_lanes == 4
    held = geometry.num_windows_held * geometry.window_samples * 4096
    assert held + 8 * 256 * 4096 <= 512 * MIB
    assert held > 400 * MIB
    assert geometry.window_samples / geometry.block_samples > 72


def test_data_that_fits_into_the_budget_is_one_window_and_so_fully_shuffled():
    geometry = divide(1000, Layout(), ROW, 32, 512 * MIB, shuffle=True)

    assert (geometry.num_lanes, geometry.window_samples) == (1, 1000)


def test_large_natural_blocks_take_fewer_lanes_so_that_windows_have_many():
    # GIVEN chunks of 1 MiB
    edges = np.arange(0, 524_289, 256)

    geometry = divide(524_288, Layout(edges=edges), ROW, 256, 512 * MIB, shuffle=True)

    assert geometry.num_lanes == 2
    assert geometry.window_samples // 256 > 160
    assert geometry.block_samples == 0


def test_small_natural_blocks_are_read_several_at_a_time():
    layout = Layout(edges=np.arange(0, 10**7 + 1, 2))

    geometry = divide(10**7, layout, SampleBytes(64, 64), 256, 512 * MIB, shuffle=True)
    small = divide(10**7, layout, SampleBytes(64, 64), 256, MIB, shuffle=True)

    assert 64 * KIB <= geometry.num_merged * 2 * 64 <= 256 * KIB
    assert small.window_samples / (small.num_merged * 2) >= 60


def test_small_windows_have_small_blocks():
    geometry = divide(10**6, Layout(), SampleBytes(64, 64), 32, MIB, shuffle=True)

    assert geometry.window_samples / geometry.block_samples >= 60


def test_windows_of_very_small_samples_have_as_many_blocks_as_others():
    geometry = divide(10**8, Layout(), SampleBytes(4, 4), 32, 8 * MIB, shuffle=True)

    assert geometry.window_samples / geometry.block_samples >= 60
    assert windows_bytes(geometry, SampleBytes(4, 4), shuffle=True) == 2 * geometry.window_samples * 8


def test_the_order_of_very_many_blocks_is_bounded():
    geometry = divide(10**9, Layout(), ROW, 32, 256 * MIB, shuffle=True)

    assert 10**9 / geometry.block_samples <= 2**19


def test_windows_hold_the_narrower_type():
    fields = (Field("x", np.dtype("float64"), (10,)), Field("y", np.dtype("uint8"), ()))

    assert sizes_of(fields, (np.dtype("float32"), np.dtype("uint8"))) == SampleBytes(41, 41)
    assert sizes_of(fields[1:], (np.dtype("float32"),)) == SampleBytes(1, 4)


def test_a_budget_that_is_too_small_says_how_much_is_needed():
    with pytest.raises(
        BadInput, match=r"memory=1.00 MiB is too little for batches of 1024 samples, which take 4.00 MiB"
    ):
        divide(10**6, Layout(), ROW, 1024, MIB, shuffle=True)
    with pytest.raises(BadInput, match=r"one read takes 2.00 GiB beside the samples"):
        divide(10**6, Layout(scratch_bytes=2 * GIB), ROW, 16, GIB, shuffle=True)
    with pytest.raises(BadInput, match="too little"):
        divide(10, Layout(), SampleBytes(GIB, GIB), 1, MIB, shuffle=False)


@given(
    num_samples=st.integers(1, 10**7),
    sample_bytes=st.integers(1, 10**5),
    batch_size=st.integers(1, 512),
    memory_bytes=st.integers(1, 64).map(lambda size: size * 16 * MIB),
    shuffle=st.booleans(),
)
def test_any_division_is_within_the_budget(num_samples, sample_bytes, batch_size, memory_bytes, shuffle):
    sizes = SampleBytes(sample_bytes, sample_bytes)
    try:
        geometry = divide(num_samples, Layout(), sizes, batch_size, memory_bytes, shuffle=shuffle)
    except BadInput:
        assert batch_size * sample_bytes > memory_bytes // 3
        return
    assert 1 <= geometry.window_samples <= num_samples
    assert num_held(geometry.num_lanes) * geometry.window_samples * sample_bytes <= memory_bytes
    held = windows_bytes(geometry, sizes, shuffle=shuffle)
    assert held + in_flight_bytes(batch_size * sample_bytes, memory_bytes) <= memory_bytes


def test_reads_that_have_a_price_bring_more():
    near = divide(10**6, Layout(), ROW, 256, 512 * MIB, shuffle=True)
    far = divide(10**6, Layout(read_bytes=2 * MIB), ROW, 256, 512 * MIB, shuffle=True)

    assert near.block_samples * 4096 < MIB
    assert far.block_samples * 4096 > MIB
    assert far.num_lanes < near.num_lanes
