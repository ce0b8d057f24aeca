import pytest
import torch
from torch import nn

from memfit.core.timeline import Category, Phase
from tests.unit.adapters.torch.builders import cuda, forward_blocks, made_in, run

BATCH, CHANNELS, SIDE = 2, 3, 8


def workspaces(traced, phase=Phase.FORWARD):
    return [b.size_bytes for b in made_in(traced, phase) if b.category is Category.WORKSPACE and "convolution" in b.op]


def convolve(layer=None, *, capability=(8, 6), dtype=torch.float32, layout=torch.contiguous_format, side=SIDE):
    layer = layer or nn.Conv2d(CHANNELS, 8, 3, padding=1, bias=False)
    data = torch.empty(BATCH, CHANNELS, side, side, dtype=dtype).to(memory_format=layout)
    return run(layer.to(dtype).to(memory_format=layout), data, device=cuda(*capability))


def padded(width, size):
    """Channels-last copies of input and output, channels padded to `width`, and the weight."""
    input_channels = -(-CHANNELS // width) * width
    return (BATCH * SIDE * SIDE * (input_channels + 8) + CHANNELS * 8 * 9) * size


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((8, 6), torch.float32, [padded(4, 4)]),
        ((8, 6), torch.float16, [padded(8, 2)]),
        ((7, 5), torch.float16, [padded(8, 2)]),
        ((7, 5), torch.float32, []),
        ((6, 1), torch.float16, []),
        ((8, 0), torch.float64, []),
    ],
)
def test_tensor_cores_convert_channels_first_tensors(capability, dtype, expected):
    assert workspaces(convolve(capability=capability, dtype=dtype)) == expected


def test_the_workspace_lives_inside_its_operator():
    traced = convolve()

    (block,) = [b for b in forward_blocks(traced) if b.category is Category.WORKSPACE]
    assert block.end == block.start + 1


def test_channels_last_tensors_need_no_conversion():
    assert workspaces(convolve(dtype=torch.float16, layout=torch.channels_last)) == []


def test_without_tf32_nothing_is_converted():
    torch.backends.cudnn.allow_tf32 = False
    try:
        assert workspaces(convolve()) == []
    finally:
        torch.backends.cudnn.allow_tf32 = True


def test_a_depthwise_convolution_has_no_workspace():
    layer = nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS, bias=False)

    assert workspaces(convolve(layer)) == []


def test_the_backward_pass_converts_as_well():
    traced = run(
        nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.Conv2d(CHANNELS, 8, 3, padding=1, bias=False)),
        torch.empty(BATCH, CHANNELS, SIDE, SIDE),
    )

    assert padded(4, 4) in workspaces(traced, Phase.BACKWARD)


def test_a_convolution_of_sequences_and_one_of_volumes_run():
    for layer, data in (
        (nn.Conv1d(3, 4, 3), torch.empty(2, 3, 16)),
        (nn.Conv3d(3, 4, 3), torch.empty(2, 3, 8, 8, 8)),
        (nn.ConvTranspose2d(3, 4, 3), torch.empty(2, 3, 8, 8)),
    ):
        traced = run(layer, data, precision="amp-fp16")
        assert made_in(traced, Phase.BACKWARD)


def test_operands_in_another_layout_are_copied():
    # GIVEN a channels-last input and a channels-first weight
    layer = nn.Conv2d(CHANNELS, 8, 3, padding=1, bias=False)
    data = torch.empty(BATCH, CHANNELS, SIDE, SIDE).to(memory_format=torch.channels_last)

    # WHEN they meet
    traced = run(layer, data)

    # THEN the weight is copied into the layout of the input, for as long as the convolution takes
    assert CHANNELS * 8 * 9 * 4 in workspaces(traced)
