from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.core.errors import StepFailed
from memfit.core.estimate import LACKS_PRECISION
from memfit.core.stack import read_stack
from memfit.core.timeline import Category, Phase
from memfit.core.units import KIB, MIB
from tests.unit.frameworks.torch.builders import cuda, forward_blocks, made_in, observe, run


def workspaces(blocks, op=""):
    return [b.size_bytes for b in blocks if b.category is Category.WORKSPACE and b.op.endswith(op)]


@pytest.mark.parametrize(("asked", "sizes"), [(":4096:8", [32 * MIB] * 2), (":0:0", []), ("unknown", [8320 * KIB] * 2)])
def test_the_workspace_that_the_environment_asks_for(monkeypatch, asked, sizes):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", asked)

    traced = run(nn.Linear(8, 8), torch.empty(4, 8), optimizer=torch.optim.Adam, device=cuda(7, 5))

    assert [b.size_bytes for b in traced.timeline.blocks if b.op == "cuBLAS workspace"] == sizes


def test_each_thread_that_multiplies_has_one_workspace_for_good():
    # GIVEN many layers and two steps
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))

    traced = run(model, torch.empty(4, 8), optimizer=torch.optim.Adam, device=cuda(7, 5))

    # THEN there is one workspace of the forward pass and one of the backward pass, and none is freed
    blocks = [b for b in traced.timeline.blocks if b.op == "cuBLAS workspace"]
    assert [(b.phase, b.size_bytes, b.end) for b in blocks] == [
        (Phase.FORWARD, 8320 * KIB, None),
        (Phase.BACKWARD, 8320 * KIB, None),
    ]


def test_no_multiplication_no_workspace():
    _, traced = observe(lambda data: data.sin().shape, torch.empty(4, 8))

    assert workspaces(traced.timeline.blocks) == []


def test_the_gradient_of_softmax_takes_a_product():
    traced = run(nn.Linear(8, 8), torch.empty(4, 8), loss=lambda m, b: F.softmax(m(b), -1).sin().sum())

    assert workspaces(made_in(traced, Phase.BACKWARD), "_softmax_backward_data") == [4 * 8 * 4]


# Ten words of two numbers: 307 runs of ten indices and ten words give at most 317 parts of segments. Four bits are
# sorted in one pass, by two blocks of 2304 and more: 256 counts for each, and 256 for the pass.
SORTED = [*[3073 * 8] * 3, 256 * 4 + 256 * 4, 3073 * 8, 8, 80, 80, 8, 317 * 8, 317 * 2 * 4]


@pytest.mark.parametrize(("count", "expected"), [(3072, []), (3073, SORTED)])
def test_the_gradient_of_a_large_embedding_sorts_its_indices_and_sums_segments(count, expected):
    traced = run(nn.Embedding(10, 2), torch.zeros(count, dtype=torch.int64))

    assert workspaces(made_in(traced, Phase.BACKWARD), "embedding_dense_backward") == expected


def test_dropout_makes_its_mask_before_its_output():
    traced = run(nn.Sequential(nn.Linear(10, 10), nn.Dropout()), torch.empty(100, 10))

    assert [b.size_bytes for b in made_in(traced, Phase.FORWARD) if "dropout" in b.op] == [1000, 4000]


def attention_outputs(dtype, torch_version, **options):
    def loss(model, batch):
        mixed = model(batch)
        return F.scaled_dot_product_attention(mixed, mixed, mixed, **options).sin().sum()

    device = replace(cuda(8, 6), stack=read_stack(f"torch{torch_version}"))
    traced = run(nn.Linear(32, 32, dtype=dtype), torch.empty(1, 2, 8, 32, dtype=dtype), loss=loss, device=device)
    return [b.size_bytes for b in made_in(traced, Phase.FORWARD) if "attention" in b.op]


@pytest.mark.parametrize(
    ("dtype", "torch_version", "options", "sizes"),
    [
        (torch.float16, "2.6", {}, [1024, 64]),
        (torch.float16, "2.7", {}, [1024, 64, 16, 8]),
        (torch.float32, "2.1", {}, [2048, 256]),
        (torch.float32, "2.6", {}, [8, 8, 2048, 256]),
        (torch.float32, "2.6", {"dropout_p": 0.1}, [2048, 256]),
    ],
)
def test_the_state_of_attention_s_random_numbers_is_on_the_device_in_some_releases(
    dtype, torch_version, options, sizes
):
    assert attention_outputs(dtype, torch_version, **options) == sizes


@pytest.mark.parametrize(("is_frozen", "expected"), [(True, [8 * 4] * 2), (False, [])])
def test_the_gradients_of_a_frozen_batch_norm_s_weights_are_made_all_the_same(is_frozen, expected):
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
    model[1].requires_grad_(not is_frozen)

    traced = run(model, torch.empty(3, 8, 5, 5))

    assert workspaces(made_in(traced, Phase.BACKWARD), "native_batch_norm_backward") == expected


def test_group_norm_has_numbers_of_channels_and_groups():
    # GIVEN three samples of eight channels in two groups
    traced = run(nn.Sequential(nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8)), torch.empty(3, 8, 5, 5))

    # THEN there are two numbers for each channel, and in the backward pass three, with two for each group
    channels, groups = 3 * 8 * 4, 3 * 2 * 4
    assert workspaces(made_in(traced, Phase.FORWARD), "native_group_norm") == [channels] * 2
    sizes = workspaces(made_in(traced, Phase.BACKWARD), "native_group_norm_backward")
    assert sizes == [channels, channels, groups, groups, channels]


def test_group_norm_without_weights_or_positions_has_fewer():
    plain = run(nn.Sequential(nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8, affine=False)), torch.empty(3, 8, 5, 5))
    flat = run(nn.Sequential(nn.Linear(8, 8), nn.GroupNorm(2, 8)), torch.empty(3, 8))

    assert workspaces(made_in(plain, Phase.FORWARD), "native_group_norm") == []
    assert workspaces(made_in(plain, Phase.BACKWARD), "native_group_norm_backward") == [96, 96, 24, 24]
    assert workspaces(made_in(flat, Phase.FORWARD), "native_group_norm") == []
    assert workspaces(made_in(flat, Phase.BACKWARD), "native_group_norm_backward") == [96, 96]


def test_the_gradient_of_flash_attention_accumulates_in_float32():
    # GIVEN a length that is no multiple of 128 and a head that is no multiple of 32
    data = torch.empty(2, 3, 100, 40, dtype=torch.float16)

    def loss(model, batch):
        mixed = model(batch)
        return F.scaled_dot_product_attention(mixed, mixed, mixed).float().sum()

    traced = run(nn.Linear(40, 40, dtype=torch.float16), data, loss=loss)

    # THEN both are padded in the accumulator, and the length in the row sums
    sizes = workspaces(made_in(traced, Phase.BACKWARD), "flash_attention_backward")
    assert sizes == [2 * 3 * 128 * 64 * 4, 2 * 3 * 128 * 4]


def test_a_mask_becomes_indices():
    def work(data):
        mask = data > 0
        data[mask]
        data[mask] = 0.0
        data[mask] = data.flatten()

    _, traced = observe(work, torch.empty(4, 8))

    # One int64 per element and dimension for reading and for writing many values; filling needs none.
    assert workspaces(forward_blocks(traced)) == [4 * 8 * 2 * 8, 4 * 8 * 2 * 8]


class Product(nn.Module):
    """One product in its own dtype."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 8, dtype=dtype))

    def forward(self, data):
        return data.to(self.weight.dtype) @ self.weight


@pytest.mark.parametrize(
    ("capability", "dtype", "lacks"),
    [
        ((7, 5), torch.bfloat16, True),
        ((7, 5), torch.float16, False),
        ((7, 0), torch.bfloat16, True),
        ((8, 0), torch.bfloat16, False),
    ],
)
def test_bfloat16_that_a_device_emulates_is_told_once(capability, dtype, lacks):
    # Twice: shapes are remembered from one trace to the next, and what is said must not depend on that.
    for _ in range(2):
        traced = run(Product(dtype), torch.empty(4, 8), device=cuda(*capability))
        told = [note.text for note in traced.notes if note.code == LACKS_PRECISION]
        assert len(told) == lacks
    assert all("float16" in text for text in told)


@pytest.mark.parametrize(("capability", "refused"), [((8, 6), True), ((8, 9), False), ((9, 0), False)])
def test_float8_products_need_a_device_that_has_them(capability, refused):
    def product(left, right, scale):
        return torch._scaled_mm(left, right.t(), scale, scale, out_dtype=torch.bfloat16).shape

    given = [torch.empty(16, 16).to(torch.float8_e4m3fn) for _ in range(2)]
    expected = pytest.raises(StepFailed, match=r"compute capability 8\.9") if refused else nullcontext()
    with expected:
        observe(product, *given, torch.ones(1), device=cuda(*capability))


BATCH, CHANNELS, SIDE = 2, 3, 8


def convolution_workspaces(traced, phase=Phase.FORWARD):
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
    assert convolution_workspaces(convolve(capability=capability, dtype=dtype)) == expected


def test_the_workspace_lives_inside_its_operator():
    traced = convolve()

    (block,) = [b for b in forward_blocks(traced) if b.category is Category.WORKSPACE]
    assert block.end == block.start + 1


def test_channels_last_tensors_need_no_conversion():
    assert convolution_workspaces(convolve(dtype=torch.float16, layout=torch.channels_last)) == []


def test_without_tf32_nothing_is_converted():
    torch.backends.cudnn.allow_tf32 = False
    try:
        assert convolution_workspaces(convolve()) == []
    finally:
        torch.backends.cudnn.allow_tf32 = True


def test_a_depthwise_convolution_has_no_workspace():
    layer = nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS, bias=False)

    assert convolution_workspaces(convolve(layer)) == []


def test_the_backward_pass_converts_as_well():
    traced = run(
        nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.Conv2d(CHANNELS, 8, 3, padding=1, bias=False)),
        torch.empty(BATCH, CHANNELS, SIDE, SIDE),
    )

    assert padded(4, 4) in convolution_workspaces(traced, Phase.BACKWARD)


def test_gradients_of_a_convolution_are_made_one_after_another():
    layer = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.Conv2d(CHANNELS, 8, 3, padding=1))

    traced = run(layer, torch.empty(BATCH, CHANNELS, SIDE, SIDE))

    # THEN the workspace of the first is given back before the next is there, and the bias's comes last
    made = [b for b in made_in(traced, Phase.BACKWARD) if b.op == "aten.convolution_backward" and b.module == "1"]
    by_data, first, by_weight, second, by_bias = made
    assert [b.size_bytes for b in (by_data, by_weight, by_bias)] == [
        BATCH * CHANNELS * SIDE * SIDE * 4,
        CHANNELS * 8 * 9 * 4,
        8 * 4,
    ]
    assert first.size_bytes == second.size_bytes == padded(4, 4)
    assert first.end < by_weight.start < second.start < second.end < by_bias.start


def test_layer_norm_copies_what_it_reads_before_its_output_is_there():
    # GIVEN channels that come first, as in ConvNeXt
    norm = nn.LayerNorm(CHANNELS)

    traced = run(norm, torch.empty(BATCH, CHANNELS, SIDE, SIDE), loss=lambda m, b: m(b.permute(0, 2, 3, 1)).sum())

    made = [b for b in forward_blocks(traced) if b.op == "aten.native_layer_norm"]
    assert [b.category is Category.WORKSPACE for b in made] == [True, False, False, False]
    assert made[0].size_bytes == made[1].size_bytes


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
    assert CHANNELS * 8 * 9 * 4 in convolution_workspaces(traced)


# 32 rows to a part; beyond 65,536 rows, and for columns too few to fill half of the 72 multiprocessors.
@pytest.mark.parametrize(
    ("rows", "columns", "stack", "expected"),
    [
        (65_568, 64, "torch2.13", [2049 * 64 * 4] * 2),
        (65_536, 64, "torch2.13", []),
        (65_568, 64, "torch2.6", []),
    ],
)
def test_layer_norm_of_many_rows_sums_gradients_in_parts(rows, columns, stack, expected):
    device = replace(cuda(7, 5), num_multiprocessors=72, stack=read_stack(stack))

    traced = run(nn.LayerNorm(columns), torch.empty(rows, columns), device=device)

    assert workspaces(made_in(traced, Phase.BACKWARD), "layer_norm_backward") == expected


def test_norms_of_many_tensors_have_as_many_parts_as_the_largest():
    tensors = [torch.empty(3), torch.empty(200_000)]

    _, traced = observe(lambda *given: torch.nn.utils.get_total_norm(given) is None, *tensors)

    assert workspaces(forward_blocks(traced), "_foreach_norm") == [2 * 4 * 4]


def test_logarithms_of_sigmoids_have_a_buffer_on_the_cpu_alone():
    _, traced = observe(lambda x: F.logsigmoid(x) is None, torch.empty(1000))

    assert [b.size_bytes for b in forward_blocks(traced)] == [4000]


def test_rows_that_do_not_lie_one_after_another_are_copied():
    # GIVEN logits with classes before positions, and an image whose channels are normalised
    data = torch.empty(2, 10, 30)

    def loss(model, batch):
        scores = model(batch)
        return F.cross_entropy(scores.transpose(1, 2), torch.zeros(2, 10, dtype=torch.int64, device=batch.device))

    traced = run(nn.Linear(30, 30), data, loss=loss)
    _, normalised = observe(lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (4,)) is None, torch.empty(2, 4, 5, 6))

    assert workspaces(forward_blocks(traced), "_log_softmax") == [2 * 10 * 30 * 4]
    assert workspaces(forward_blocks(normalised), "layer_norm") == [2 * 4 * 5 * 6 * 4]


def test_rows_that_do_are_read_where_they_are():
    _, traced = observe(lambda x: F.layer_norm(x.softmax(-1), (4,)) is None, torch.empty(3, 4))

    assert workspaces(forward_blocks(traced)) == []


def test_a_single_row_has_the_workspace_of_a_product_with_a_bias():
    # The snapshot eor, PyTorch 2.2: one image, 1,048,576 bytes for each of three layers.
    traced = run(nn.Linear(8, 8), torch.empty(1, 8), device=replace(cuda(7, 5), stack=read_stack("torch2.2")))

    assert workspaces(forward_blocks(traced), "addmm") == [1_048_576]


@pytest.mark.parametrize(
    ("groups", "kernel", "layout", "expected"),
    [
        # 4 channels, each with a window of 9 or 1, at 8 x 8 positions, of 2 samples
        (4, 3, torch.contiguous_format, 4 * 9 * 64 * 2 * 4),
        (2, 1, torch.contiguous_format, 4 * 64 * 2 * 4),
        (1, 3, torch.contiguous_format, 0),
        (4, 7, torch.contiguous_format, 0),
        (4, 3, torch.channels_last, 0),
    ],
)
def test_windows_of_grouped_convolutions_may_be_laid_out(groups, kernel, layout, expected):
    layer = nn.Conv2d(4, 4, kernel, padding="same", groups=groups).to(memory_format=layout)

    traced = run(layer, torch.empty(2, 4, 8, 8).contiguous(memory_format=layout), device=cuda(8, 6))

    assert traced.grouped_bytes == expected
