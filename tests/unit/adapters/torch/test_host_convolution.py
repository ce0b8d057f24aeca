import pytest
import torch

from memfit.adapters.torch.host_convolution import HostConvolution
from tests.unit.adapters.torch.measured import internal_bytes, needs_avx512

aten = torch.ops.aten
# Scratch of constant size that oneDNN's kernels take beside their copies, 12 to 127 KB, is not counted.
SLACK_BYTES = 140_000

# name: batch, input channels, spatial sizes, output channels, kernel, stride, padding, dilation, groups
SHAPES = {
    "3x3": (4, 64, (56, 56), 64, 3, 1, 1, 1, 1),
    "channels that fill no block": (4, 24, (56, 56), 40, 3, 1, 1, 1, 1),
    "1x1": (4, 64, (56, 56), 128, 1, 1, 0, 1, 1),
    "strided 1x1": (4, 128, (56, 56), 64, 1, 2, 0, 1, 1),
    "strided 3x3": (4, 64, (56, 56), 128, 3, 2, 1, 1, 1),
    "first layer": (4, 3, (112, 112), 64, 7, 2, 3, 1, 1),
    "four channels": (4, 4, (56, 56), 32, 3, 1, 1, 1, 1),
    "depthwise": (4, 96, (56, 56), 96, 3, 1, 1, 1, 96),
    "wide depthwise": (4, 96, (56, 56), 96, 7, 1, 3, 1, 96),
    "groups of 16": (4, 128, (28, 28), 128, 3, 1, 1, 1, 8),
    "groups of 4": (4, 128, (28, 28), 128, 3, 1, 1, 1, 32),
    "dilated": (4, 64, (56, 56), 64, 3, 1, 2, 2, 1),
    "widely dilated": (4, 64, (33, 33), 64, 3, 1, 12, 12, 1),
    "one dimension": (4, 96, (600,), 96, 3, 1, 1, 1, 1),
    "one dimension, dilated, causal": (4, 96, (632,), 96, 3, 1, 0, 16, 1),
    "one dimension, wide": (2, 192, (49,), 192, 32, 1, 16, 1, 8),
    "three dimensions": (2, 32, (8, 28, 28), 32, 3, 1, 1, 1, 1),
    "three dimensions, flat": (2, 64, (2, 14, 14), 64, 3, 1, 1, 1, 1),
    "three dimensions, few channels": (2, 8, (16, 16, 16), 16, 3, 1, 1, 1, 1),
    "one image": (1, 32, (56, 56), 32, 3, 1, 1, 1, 1),
    "one small image": (1, 16, (14, 14), 16, 3, 1, 1, 1, 1),
}


def tensors(shape, *, transposed=False, channels_last=False):
    batch, channels, sizes, outputs, kernel, stride, padding, dilation, groups = shape
    dims = len(sizes)
    data = torch.randn(batch, channels, *sizes)
    first, second = (channels, outputs // groups) if transposed else (outputs, channels // groups)
    weight = torch.randn(first, second, *[kernel] * dims)
    if channels_last:
        data, weight = (t.to(memory_format=torch.channels_last) for t in (data, weight))
    options = ([stride] * dims, [padding] * dims, [dilation] * dims, transposed, [0] * dims, groups)
    return data, weight, options


def check(shape, **options):
    data, weight, rest = tensors(shape, **options)
    out = aten.convolution.default(data, weight, None, *rest)
    forward = internal_bytes(aten.convolution.default, data, weight, None, *rest)
    gradient = torch.randn_like(out)
    backward = internal_bytes(
        aten.convolution_backward.default, gradient, data, weight, None, *rest, [True, True, False]
    )
    for measured, predicted in (forward, backward):
        assert predicted == pytest.approx(measured, rel=0.05, abs=SLACK_BYTES)


@needs_avx512
@pytest.mark.parametrize("name", SHAPES)
def test_channels_first(name):
    check(SHAPES[name])


@needs_avx512
@pytest.mark.parametrize("name", ["3x3", "1x1", "strided 3x3", "depthwise", "wide depthwise"])
def test_channels_last(name):
    check(SHAPES[name], channels_last=True)


@needs_avx512
@pytest.mark.parametrize("name", ["3x3", "strided 3x3", "channels that fill no block"])
def test_transposed(name):
    check(SHAPES[name], transposed=True)


@needs_avx512
def test_a_view_is_copied_first():
    data, weight, options = tensors(SHAPES["one dimension"])
    turned = torch.randn(4, 600, 96).transpose(1, 2)

    measured, predicted = internal_bytes(aten.convolution.default, turned, weight, None, *options)
    _, without_copy = internal_bytes(aten.convolution.default, data, weight, None, *options)

    assert predicted == without_copy + turned.numel() * 4
    assert predicted == pytest.approx(measured, rel=0.03, abs=SLACK_BYTES)


@needs_avx512
def test_the_weight_of_a_kernel_dilated_beyond_the_image_is_multiplied():
    data, weight, options = tensors((4, 64, (16, 16), 64, 3, 1, 12, 12, 1))
    gradient = torch.randn_like(data)

    measured, predicted = internal_bytes(
        aten.convolution_backward.default, gradient, data, weight, None, *options, [True, True, False]
    )

    assert predicted == pytest.approx(measured, rel=0.03, abs=SLACK_BYTES)


def test_doubles_are_unfolded_without_onednn():
    data, weight, options = tensors(SHAPES["3x3"])

    measured, predicted = internal_bytes(aten.convolution.default, data.double(), weight.double(), None, *options)

    assert predicted == pytest.approx(measured, rel=0.03, abs=SLACK_BYTES)
    assert predicted == 4 * 64 * 9 * 56 * 56 * 8


def test_only_wanted_gradients_cost_memory():
    data, weight, options = tensors(SHAPES["3x3"])
    shapes = tuple(torch.empty_like(t, device="meta") for t in (data, data, weight))

    def peak(*wanted):
        out = tuple(torch.empty_like(t) if w else None for t, w in zip(shapes[1:], wanted, strict=True))
        kept = sum(t.numel() * 4 for t in out if t is not None)
        return kept + sum(
            HostConvolution().backward(None, (*shapes, None, *options, [*wanted, False]), {}, (*out, None))
        )

    assert peak(False, False) == 0
    assert peak(True, False) < peak(True, True)
    assert peak(False, True) < peak(True, True)
