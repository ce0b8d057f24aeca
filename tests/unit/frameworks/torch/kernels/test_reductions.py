import pytest
import torch

from memfit.core.device import Device, Kind, Origin
from memfit.frameworks.torch.kernels.reductions import (
    Elements,
    Layout,
    Multiprocessors,
    buffers,
    layout,
    multiprocessors,
)

FLOAT = Elements(4, 4, 4)
FLAG = Elements(1, 1, 1)
EXTREMUM = Elements(4, 4, 16, accumulates=False)
RTX_PRO_6000 = Multiprocessors(188, 1536)
H100 = Multiprocessors(132, 2048)
TURING_72 = Multiprocessors(72, 1024)


def contiguous(*shape):
    return torch.empty(shape, device="meta").stride()


def reduced(shape, dims, elements, device, strides=None):
    return buffers(layout(shape, strides or contiguous(*shape), frozenset(dims)), elements, device)


# Read off snapshots: gradients of RMSNorm's weights (linyun_xl_ctx512_full_step_*; niu_forward_and_backward_*, with
# 2,560 and 512 columns), where 100 tokens of ten sequences are too few.
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 512, 2560), [41_943_040, 80]),
        ((10, 100, 512), []),
        ((10, 150, 512), [6_291_456, 16]),
        ((10, 200, 512), [8_388_608, 16]),
    ],
)
def test_sums_over_rows_are_those_of_snapshots(shape, expected):
    assert reduced(shape, (0, 1), FLOAT, RTX_PRO_6000) == expected


# The snapshot eor: anomaly detection asks of each gradient whether it has a NaN; and a mean of a whole image.
@pytest.mark.parametrize(
    ("count", "elements", "expected"),
    [
        (1_966_080, FLAG, [144, 4]),
        (1_048_576, FLAG, [128, 4]),
        (524_288, FLAG, [64, 4]),
        (262_144, FLAG, [32, 4]),
        (131_072, FLAG, [16, 4]),
        (65_536, FLAG, []),
        (1_966_080, FLOAT, [576, 4]),
    ],
)
def test_reductions_of_whole_tensors_are_those_of_a_snapshot(count, elements, expected):
    assert reduced((count,), (0,), elements, TURING_72) == expected


# Sizes seen on an H100 for the maximum over a vocabulary of 10,000 that isn't the fastest dimension.
@pytest.mark.parametrize(("length", "expected"), [(128, 164_626_432), (256, 329_252_864), (512, 553_648_128)])
def test_maxima_over_a_slow_dimension_need_buffers(length, expected):
    shape, strides = (4, length, 10_000), (length * 10_000, 1, length)

    assert reduced(shape, (2,), EXTREMUM, H100, strides)[0] == expected
    # WHEN the vocabulary is the fastest dimension, a warp reads a row
    assert reduced(shape, (2,), EXTREMUM, H100) == []


def test_dimensions_are_ordered_by_stride_and_joined():
    # GIVEN images with channels last, reduced to their channels
    strides = (8 * 5 * 7, 1, 8 * 7, 8)

    assert layout((2, 8, 5, 7), strides, frozenset({0, 2, 3})) == Layout((70, 8), (8, 1), (0, 1))


def test_a_single_number_is_no_work():
    assert layout((), (), frozenset()) == Layout((), (), ())
    assert buffers(Layout((), (), ()), FLOAT, H100) == []


def test_odd_columns_are_made_one_by_one():
    # GIVEN rows of 2,559 numbers, which no wide load is aligned to
    assert reduced((8192, 2559), (0,), FLOAT, RTX_PRO_6000) == [4 * 2559 * 8 * 32, 80 * 4]


def test_tensors_beyond_32_bit_offsets_are_reduced_in_halves():
    # GIVEN 2.5 GB in bfloat16, whose sums have 32 columns: too few to fill the device
    shape = (40_000_000, 32)
    half = reduced((20_000_000, 32), (0,), Elements(2, 2, 4), H100)

    program = reduced(shape, (0,), Elements(2, 2, 4, accumulates=False), H100)

    # THEN sums of both halves are kept in float32, and each half has its buffer and frees it
    assert half
    assert program == [32 * 4, *half, ~2, ~1, *half, ~4, ~3]


@pytest.mark.parametrize(
    ("capability", "threads"), [((7, 5), 1024), ((8, 0), 2048), ((8, 6), 1536), ((9, 0), 2048), ((12, 0), 1536)]
)
def test_threads_of_a_multiprocessor_by_generation(capability, threads):
    device = Device("test", "Test GPU", Kind.CUDA, None, None, Origin.ASSUMED, capability, 10)

    assert multiprocessors(device) == Multiprocessors(10, threads)


def test_unknown_multiprocessors_are_unknown():
    assert multiprocessors(Device("test", "Test GPU", Kind.CUDA, None, None, Origin.ASSUMED, (8, 0))) is None
