from dataclasses import replace

import pytest

from memfit.adapters.torch.onednn_convolution import Geometry, batch_shares, block_width

# 8 images of 64 channels and 32 x 32 pixels, a 3 x 3 kernel.
PLAIN = Geometry(
    source=(8, 64, 32, 32),
    result=(8, 64, 32, 32),
    kernel=(3, 3),
    stride=(1, 1),
    padding=(1, 1),
    dilation=(1, 1),
    groups=1,
    element_size=4,
    threads=2,
    block=16,
)
TENSOR = 8 * 64 * 32 * 32 * 4
WEIGHT = 64 * 64 * 9 * 4


def test_the_gather_copies_source_weight_and_result():
    assert PLAIN.gather_peak == 2 * TENSOR + WEIGHT


def test_the_scatter_copies_the_same():
    assert PLAIN.scatter_peak == 2 * TENSOR + WEIGHT


def test_threads_that_share_the_batch_have_a_weight_gradient_each():
    assert replace(PLAIN, threads=1).weigh_peak == 2 * TENSOR + WEIGHT
    assert PLAIN.weigh_peak == 2 * TENSOR + 2 * WEIGHT


# Watched under the profiler, as copies of the weight's gradient in the scratch.
@pytest.mark.parametrize(("threads", "shares"), [(1, 1), (2, 2), (4, 4), (8, 4)])
def test_how_threads_share_the_batch(threads, shares):
    assert batch_shares(replace(PLAIN, threads=threads)) == shares


def test_threads_share_channels_where_weights_are_larger_than_data():
    small = replace(PLAIN, source=(8, 512, 4, 4), result=(8, 512, 4, 4))

    assert batch_shares(small) == 1


def test_threads_share_groups_first():
    assert batch_shares(replace(PLAIN, groups=4)) == 1


def test_channels_are_padded_to_blocks():
    padded = replace(PLAIN, source=(8, 50, 32, 32))

    assert padded.gather_peak == PLAIN.gather_peak


def test_images_are_read_in_place():
    first_layer = replace(PLAIN, source=(8, 3, 32, 32))

    # Beside the result's two copies, only the weight, or while both results exist not even that.
    assert first_layer.gather_peak == 2 * TENSOR
    # 3 input channels, not padded; and a second weight gradient for the second thread.
    assert first_layer.weigh_peak == TENSOR + 2 * (3 * 64 * 9 * 4)


def test_few_channels_are_padded_to_half_a_block_by_the_weigh_pass():
    few = replace(PLAIN, source=(8, 5, 32, 32))

    assert few.weigh_peak == TENSOR + 8 * 8 * 32 * 32 * 4 + 8 * 64 * 9 * 4


def test_a_strided_scatter_ends_with_three_copies_of_the_gradient():
    strided = replace(PLAIN, result=(8, 64, 16, 16), stride=(2, 2))

    assert strided.scatter_peak == 3 * TENSOR


def test_kernels_too_wide_for_vector_code_multiply_matrices():
    wide = replace(
        PLAIN, source=(8, 64, 500), result=(8, 64, 500), kernel=(15,), stride=(1,), dilation=(1,), padding=(7,)
    )
    weight = 64 * 64 * 15 * 4
    columns = 2 * 64 * 15 * 416 * 4

    # Per thread a matrix of 416 pixels at most, and four times the weight's gradient.
    assert wide.weigh_peak == weight + columns + 2 * 4 * weight


@pytest.mark.parametrize(
    ("channels", "dilation", "fits"), [(64, 6, True), (64, 8, False), (16, 12, True), (16, 16, False)]
)
def test_a_dilated_kernel_must_not_reach_too_far_over_the_edge(channels, dilation, fits):
    dilated = replace(
        PLAIN,
        source=(8, channels, 40, 40),
        result=(8, channels, 40, 40),
        dilation=(dilation, dilation),
        padding=(dilation, dilation),
    )
    tensor = 8 * channels * 40 * 40 * 4

    assert (dilated.gather_peak == 2 * tensor + channels * channels * 9 * 4) is fits


def test_odd_groups_multiply_matrices():
    odd = replace(PLAIN, groups=16)

    assert odd.multiplies
    assert odd.gather_peak == 2 * TENSOR


def test_blocks_are_as_wide_as_vector_registers(monkeypatch):
    import torch

    for capability, width in (("AVX512", 16), ("AVX2", 8), ("DEFAULT", 8)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        assert block_width() == width
