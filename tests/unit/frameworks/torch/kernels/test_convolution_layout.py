import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.frameworks.torch.kernels.convolution_layout import (
    RULES,
    backward_rule,
    channels_last_format,
    forward_rule,
    is_channels_last,
)

CONVOLUTION = torch.ops.aten.convolution.default
BACKWARD = torch.ops.aten.convolution_backward.default


def nhwc(tensor):
    return tensor.to(memory_format=torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d)


def forward(data, weight, *, stride=1, padding=0, dilation=1, transposed=False, output_padding=0, groups=1):
    spread = [[value] * (data.dim() - 2) for value in (stride, padding, dilation, output_padding)]
    args = (data, weight, None, *spread[:3], transposed, spread[3], groups)
    return forward_rule(CONVOLUTION, args, {}, None)


@pytest.fixture
def two_threads():
    """oneDNN, which follows layouts, isn't taken for 1x1 kernels where there is one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(2, 3, 4, 5),
        nhwc(torch.empty(2, 3, 4, 5)),
        nhwc(torch.empty(2, 3, 4, 5, 6)),
        torch.empty(2, 3, 4, 5).transpose(1, 2),
        torch.empty(2, 3, 4, 5).transpose(2, 3),
        nhwc(torch.empty(2, 3, 4, 5))[:, :2],
        nhwc(torch.empty(2, 3, 4, 5))[:, :, ::2],
        torch.empty(2, 1, 4, 5),
        torch.empty(2, 3, 1, 1),
        nhwc(torch.empty(2, 1, 4, 5)),
        torch.empty(1, 1, 1, 1),
        torch.empty(1, 3, 4, 5).expand(2, 3, 4, 5),
        torch.empty(2, 3, 4),
        torch.empty(2, 3),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.stride()}",
)
def test_the_layout_is_the_one_that_pytorch_would_follow(tensor, two_threads):
    # GIVEN how an element-wise operator on a real tensor answers, which follows the suggested layout
    dims = tensor.dim()
    if dims < 4:
        assert not is_channels_last(tensor)
        return
    # A convolution with one weight per channel keeps the suggested layout of its input.
    convolve = F.conv2d if dims == 4 else F.conv3d
    weight = torch.empty(2, tensor.shape[1], *(1 for _ in range(dims - 2)))
    real = convolve(tensor, weight)
    ours = forward(tensor, weight)
    # Where a layout can be seen in the result at all, ours has it.
    assert ours.shape == real.shape
    if real.shape[1] > 1 and max(real.shape[2:]) > 1:
        assert ours.stride() == real.stride()


def test_one_channels_last_operand_is_enough():
    data, weight = torch.empty(2, 3, 8, 8), torch.empty(4, 3, 3, 3)

    assert channels_last_format(data, weight) is None
    assert channels_last_format(nhwc(data), weight) is torch.channels_last
    assert channels_last_format(data, nhwc(weight)) is torch.channels_last


OPTIONS = list(itertools.product([1, 2], [0, 1], [1, 2]))


@pytest.mark.parametrize(("stride", "padding", "dilation"), OPTIONS)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_sizes_are_those_of_real_convolutions(stride, padding, dilation, dims, groups):
    data = torch.empty(2, 4, *[9] * dims)
    weight = torch.empty(6, 4 // groups, *[3] * dims)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]

    real = convolve(data, weight, None, stride, padding, dilation, groups)
    ours = forward(data, weight, stride=stride, padding=padding, dilation=dilation, groups=groups)

    assert (ours.shape, ours.dtype) == (real.shape, real.dtype)


@pytest.mark.parametrize(("stride", "padding", "dilation"), OPTIONS)
def test_sizes_are_those_of_real_transposed_convolutions(stride, padding, dilation):
    data, weight = torch.empty(2, 4, 5, 5), torch.empty(4, 3, 3, 3)
    more = stride - 1

    real = F.conv_transpose2d(data, weight, None, stride, padding, more, 2, dilation)
    ours = forward(
        data, weight, stride=stride, padding=padding, dilation=dilation, transposed=True, output_padding=more, groups=2
    )

    assert ours.shape == real.shape


@pytest.mark.parametrize(
    ("data", "weight"),
    [
        (torch.empty(2, 5, 8, 8), torch.empty(4, 3, 3, 3)),  # channels disagree
        (torch.empty(2, 3, 2, 2), torch.empty(4, 3, 3, 3)),  # the kernel doesn't fit
    ],
)
def test_what_looks_wrong_is_refused_by_pytorch(data, weight):
    with pytest.raises(RuntimeError):
        forward(data.to("meta"), weight.to("meta"))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=3)))
def test_gradients_have_the_shapes_and_layout_of_their_operands(layout, wanted):
    data = torch.empty(2, 3, 8, 8, device="meta").to(memory_format=layout)
    weight = torch.empty(4, 3, 3, 3, device="meta")
    gradient = torch.empty(2, 4, 6, 6, device="meta")
    args = (gradient, data, weight, [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, list(wanted))

    parts = backward_rule(BACKWARD, args, {}, None)

    assert [p is not None for p in parts] == list(wanted)
    shapes = [data.shape, weight.shape, (4,)]
    for part, shape in zip(parts, shapes, strict=True):
        if part is not None:
            assert part.shape == shape
            assert part.dim() == 1 or part.is_contiguous(memory_format=layout)


def test_a_module_keeps_its_layout_from_end_to_end():
    layer = nn.Conv2d(3, 4, 3)
    data = nhwc(torch.empty(2, 3, 8, 8))

    assert forward(data, layer.weight).stride() == layer(data).stride()


ATEN = torch.ops.aten


def shapes(name, *args):
    made = RULES[f"aten::{name}"](None, args, {}, None)
    return [None if t is None else (tuple(t.shape), t.dtype) for t in (made if isinstance(made, tuple) else (made,))]


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float16, torch.float32), (torch.float64, torch.float64)])
def test_statistics_are_one_number_per_channel(dtype, kept):
    data = torch.empty(2, 5, 4, 4, dtype=dtype, device="meta")

    assert shapes("batch_norm_stats", data, 1e-5) == [((5,), kept)] * 2
    assert shapes("batch_norm_gather_stats_with_counts", data) == [((5,), kept)] * 2


def test_the_output_is_like_the_input():
    data = torch.empty(2, 5, 4, 4, dtype=torch.float16, device="meta")

    assert shapes("batch_norm_elemt", data) == [((2, 5, 4, 4), torch.float16)]
    assert shapes("batch_norm_backward_elemt", torch.empty(2, 5, 4, 4, device="meta"), data) == [
        ((2, 5, 4, 4), torch.float16)
    ]


def test_only_gradients_that_are_asked_for_are_made():
    data = torch.empty(2, 5, 4, 4, device="meta")
    channel = ((5,), torch.float32)

    assert shapes("batch_norm_backward_reduce", data, data, None, None, None, True, True, False) == [
        channel,
        channel,
        channel,
        None,
    ]
    assert shapes("batch_norm_backward_reduce", data, data, None, None, None, False, False, True) == [
        None,
        None,
        None,
        channel,
    ]


def test_the_operators_exist():
    for name in RULES:
        assert hasattr(ATEN, name.removeprefix("aten::"))


META = torch.device("meta")
DENSE = torch.empty(2, 3, 4, 5, device=META)
KINDS = {"dense": DENSE, "channels-last": DENSE.to(memory_format=torch.channels_last)}


def vector(dtype=torch.float32):
    return torch.empty(3, dtype=dtype, device=META)


def described(out):
    return [None if part is None else (tuple(part.shape), part.stride(), part.dtype) for part in out]


def by_rule(op, *args):
    return RULES[op._schema.name](op, args, {}, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_batch_norm(kind, dtype):
    batch_norm = torch.ops.aten.native_batch_norm.default
    statistics = [vector(torch.float64 if dtype is torch.float64 else torch.float32) for _ in range(4)]
    args = (KINDS[kind].to(dtype), *statistics)

    assert described(by_rule(batch_norm, *args, True, 0.1, 1e-5)) == described(batch_norm(*args, True, 0.1, 1e-5))
    assert by_rule(batch_norm, *args, False, 0.1, 1e-5) is NotImplemented


@pytest.mark.parametrize("mask", list(itertools.product([True, False], repeat=2)))
def test_the_gradient_of_batch_norm(mask):
    backward = torch.ops.aten.native_batch_norm_backward.default
    args = (DENSE, DENSE, *[vector()] * 5, True, 1e-5, [True, *mask])

    assert described(by_rule(backward, *args)) == described(backward(*args))


def test_batch_norm_makes_no_gradient_that_nobody_wants():
    # PyTorch's shape rule makes the input's gradient regardless; its CUDA kernel doesn't.
    backward = torch.ops.aten.native_batch_norm_backward.default

    made = by_rule(backward, DENSE, DENSE, *[vector()] * 5, True, 1e-5, [False, True, False])

    assert described(made) == [None, ((3,), (1,), torch.float32), None]
