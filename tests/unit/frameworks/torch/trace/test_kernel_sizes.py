import pytest
import torch

from memfit.core.profile import MovingSizes, ProductSizes
from memfit.frameworks.torch.trace.kernel_sizes import flops_of, sizes_of

aten = torch.ops.aten
CHANNELS_LAST = torch.channels_last


def meta(*shape, dtype=torch.float16):
    return torch.empty(shape, dtype=dtype, device="meta")


def sizes(func, *args):
    out = func(*args)
    outputs = [tensor for tensor in (out if isinstance(out, tuple) else (out,)) if isinstance(tensor, torch.Tensor)]
    return sizes_of(func._schema.name, args, [arg for arg in args if isinstance(arg, torch.Tensor)], outputs)


def convolution(groups=1, *, transposed=False, last=False):
    data, weight = meta(2, 8, 10, 10), meta(8, 16 // groups if transposed else 8 // groups, 3, 3)
    if last:
        data = data.contiguous(memory_format=CHANNELS_LAST)
    return sizes(aten.convolution.default, data, weight, None, [2, 2], [1, 1], [1, 1], transposed, [0, 0], groups)


def test_matrix_products():
    assert sizes(aten.mm.default, meta(3, 4), meta(4, 5)) == (1, 3, 5, 4)
    assert sizes(aten.bmm.default, meta(2, 3, 4), meta(2, 4, 5)) == (2, 3, 5, 4)
    assert sizes(aten.addmm.default, meta(5), meta(3, 4), meta(4, 5)) == (1, 3, 5, 4)
    assert flops_of(ProductSizes(2, 3, 5, 4)) == 2 * 2 * 3 * 5 * 4


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_convolution(groups):
    assert convolution(groups) == (2, 8, 8, groups, 100, 25, 9, 0, 0)
    assert flops_of(convolution(groups)) == 2 * 2 * 25 * 8 * (8 // groups) * 9


def test_arguments_by_keyword_leave_sizes_unknown():
    left = meta(3, 4)
    assert sizes_of("aten::mm", (left,), [left], [left]) is None
    assert flops_of(None) is None


def test_channels_last_are_seen():
    assert convolution(last=True).is_last == 1


def test_a_transposed_convolution_is_the_gradient_of_an_input():
    found = convolution(transposed=True)
    assert (found.images, found.inputs, found.outputs) == (2, 16, 8)
    assert found.pixels > found.output_pixels == 100
    assert found.gradients == 1


def test_gradients_of_a_convolution():
    data, weight, grad = meta(2, 8, 10, 10), meta(4, 8, 3, 3), meta(2, 4, 10, 10)
    args = (grad, data, weight, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert sizes(aten.convolution_backward.default, *args, [True, True, True]).gradients == 7
    assert sizes(aten.convolution_backward.default, *args, [False, True, False]).gradients == 2
    both = sizes(aten.convolution_backward.default, *args, [True, True, False])
    assert flops_of(both) == 2 * 2 * (2 * 100 * 4 * 8 * 9)


def test_a_copy_into_another_order():
    image = meta(2, 8, 10, 10)
    assert sizes(aten.clone.default, image) == (3200, 0, 0)
    assert sizes(aten.clone.default, image.contiguous(memory_format=CHANNELS_LAST)).is_permuted == 0
    turned = meta(4, 6).t()
    assert sizes_of("aten::clone", (turned,), [turned], [turned.contiguous()]) == (48, 1, 0)
    assert flops_of(MovingSizes(48, 1, 0)) is None


def test_batch_norm_takes_statistics_in_training():
    image, weight = meta(2, 8, 10, 10), meta(8)
    for training in (True, False):
        args = (image, weight, weight, weight, weight, training, 0.1, 1e-5)
        assert sizes_of("aten::native_batch_norm", args, [image], [image]).takes_statistics == training
