"""Physical sanity of single kernels, at whatever the fitted parameters are."""

from dataclasses import replace

import pytest

from memfit.catalogue import find_device
from memfit.timing.rates import rates_of
from memfit.timing.step import operator_seconds
from memfit.timing.table import table_of
from tests.unit.timing.operators import convolution, elementwise, product

DEVICES = ("t4", "rtx-3090", "a10g", "a100-40gb", "h100-80gb", "rtx-4090", "rtx-5090")


def seconds(*work, device="rtx-3090"):
    return operator_seconds(table_of(work), rates_of(find_device(device))).tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_more_work_never_takes_less(device):
    large = seconds(*(product(2**power, 1024, 1024) for power in range(6, 15)), device=device)
    moved = seconds(*(elementwise(2**power) for power in range(12, 30)), device=device)
    wide = seconds(*(convolution(2**power) for power in range(4, 10)), device=device)
    for times in (large, moved, wide):
        assert times == sorted(times) and times[0] > 0


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_faster_than_the_peak(device):
    known = find_device(device)
    work = product(8192, 8192, 8192)
    assert seconds(work, device=device)[0] > 0.85 * work.flops / known.flops["float16"]
    copy = elementwise(2**30)
    # A large cache serves a part of it.
    assert seconds(copy, device=device)[0] > copy.moved_bytes / known.bandwidth_bytes_per_second / 1.2


@pytest.mark.parametrize("device", DEVICES)
def test_a_large_product_reaches_a_good_part_of_the_peak(device):
    work = product(8192, 8192, 8192)
    assert seconds(work, device=device)[0] < 3 * work.flops / find_device(device).flops["float16"]


def test_a_wave_with_few_tiles_takes_as_long_as_a_full_one():
    # 82 multiprocessors: 82 tiles are one wave, 83 two.
    full, more = (seconds(product(128 * tiles, 256, 4096))[0] for tiles in (41, 42))
    assert more > 1.2 * full


def test_odd_sizes_waste_tensor_cores():
    even, odd = seconds(product(4096, 4096, 4096), product(4096, 4096, 4095))
    assert odd > 1.3 * even


def test_16_bits_are_faster_than_32():
    narrow, wide = seconds(product(4096, 4096, 4096), product(4096, 4096, 4096, dtype="float32"))
    assert wide > 1.5 * narrow


def test_depthwise_convolutions_cost_more_than_their_operations():
    dense, depthwise = convolution(256), convolution(256, groups=256)
    slow, fast = seconds(depthwise, dense)
    assert slow / depthwise.flops > 5 * fast / dense.flops


def test_channels_first_is_not_faster_on_tensor_cores():
    first, last = seconds(convolution(256, last=False), convolution(256))
    assert first > last


def test_both_gradients_take_longer_than_one():
    both, single, forward = seconds(convolution(256, gradients=3), convolution(256, gradients=1), convolution(256))
    assert both > single > 0.5 * forward


def test_a_copy_into_another_order_is_no_faster():
    straight, turned = seconds(elementwise(2**26, "aten.clone"), elementwise(2**26, "aten.clone", permuted=1))
    assert turned >= straight


def test_products_of_unknown_sizes_take_their_operations():
    known = product(4096, 4096, 4096)
    exact, rough = seconds(known, replace(known, sizes=()))
    assert rough == pytest.approx(exact, rel=0.3)


@pytest.mark.parametrize("groups", [1, 64])
def test_convolutions_that_a_compiler_laid_out_wait_less_for_memory(groups):
    work = convolution(64, groups=groups, taps=1, pixels=56 * 56)
    eager, compiled = seconds(work, replace(work, is_compiled=True))
    assert compiled < 0.8 * eager
