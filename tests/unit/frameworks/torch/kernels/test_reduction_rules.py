from dataclasses import replace

import pytest
import torch
from torch import nn

from memfit.core.timeline import Category, Phase
from tests.unit.frameworks.torch.builders import cuda, forward_blocks, made_in, observe, run

# As the device of the snapshot eor: 144 blocks of 512 threads fill it.
TURING = replace(cuda(7, 5), num_multiprocessors=72)
BLACKWELL = replace(cuda(12, 0), num_multiprocessors=188)
ROWS = 2**20


def inside(work, *inputs, device=TURING):
    _, traced = observe(work, *inputs, device=device)
    return [b.size_bytes for b in forward_blocks(traced) if b.category is Category.WORKSPACE]


# 128 blocks: a thread of each reads 16 values of the 2^20.
@pytest.mark.parametrize(
    ("work", "carried"),
    [
        (lambda x: x.sum(), 4),
        (lambda x: x.mean(), 4),
        (lambda x: x.norm(), 4),
        (lambda x: x.amax(), 4),
        (lambda x: x.max(), 4),
        (lambda x: x.prod(), 4),
        (lambda x: x.isnan().any(), 1),
        (lambda x: x.argmax(), 16),
        (lambda x: x.max(0), 16),
        (lambda x: x.var(), 16),
        (lambda x: torch.std_mean(x), 16),
        (lambda x: x.half().sum(), 4),
        (lambda x: x.half().amax(), 2),
        (lambda x: x.double().var(), 32),
    ],
)
def test_partial_results_have_the_size_of_what_is_carried(work, carried):
    assert inside(lambda x: work(x) is None, torch.empty(ROWS)) == [128 * carried, 4]


def test_flags_are_counted_in_a_copy_of_whole_numbers():
    # GIVEN a mask whose true elements are counted in int64
    assert inside(lambda x: (x > 0).sum() is None, torch.empty(ROWS)) == [ROWS * 8, 128 * 8, 4]


def test_half_precision_is_summed_in_float32_without_a_copy():
    assert inside(lambda x: x.half().sum(dtype=torch.float32) is None, torch.empty(ROWS)) == [128 * 4, 4]


def test_dimensions_may_be_negative_and_many():
    # GIVEN rows of 2,560 numbers, of which a snapshot has the sums
    assert inside(lambda x: x.sum((-3, 1)) is None, torch.empty(4, 512, 2560), device=BLACKWELL) == [41_943_040, 80]


def test_the_gradient_of_a_bias_is_such_a_sum():
    traced = run(nn.Linear(4, 512), torch.empty(8192, 4), device=BLACKWELL)

    buffers = [b for b in made_in(traced, Phase.BACKWARD) if b.op == "aten.sum" and b.category is Category.WORKSPACE]
    # THEN 128 blocks of 32 columns, four outputs each, read 64 rows
    assert [b.size_bytes for b in buffers] == [512 * 4 * 128 * 32 * 4, 4 * 4]


def test_the_gradient_of_a_convolutions_bias_is_one_too():
    traced = run(nn.Conv2d(3, 8, 1), torch.empty(16, 3, 128, 128), device=TURING)

    made = [b.size_bytes for b in made_in(traced, Phase.BACKWARD) if b.op == "aten.convolution_backward"]
    # THEN 18 blocks for each of eight channels fill the device, after the gradients are made
    assert made[-2:] == [8 * 18 * 4, 8 * 4]


def test_nothing_is_said_of_a_device_with_an_unknown_number_of_multiprocessors():
    assert inside(lambda x: x.sum() is None, torch.empty(ROWS), device=cuda(7, 5)) == []


def test_the_search_for_nan_of_anomaly_detection_is_one_as_well():
    # As the snapshot eor has it, once for each gradient.
    assert inside(lambda x: torch.ops.aten._is_any_true(x.isnan()) is None, torch.empty(1_966_080)) == [144, 4]
