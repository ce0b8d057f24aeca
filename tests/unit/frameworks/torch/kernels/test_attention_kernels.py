import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.core.timeline import Category, Phase
from memfit.frameworks.torch.kernels.attention_kernels import Blocks, efficient_blocks, split_keys, workspace_bytes
from tests.unit.frameworks.torch.builders import cuda, made_in, run


def gradient_bytes(query, *, device, **options):
    """What the gradient of attention takes inside, where each argument needs one."""

    def loss(model, batch):
        mixed = model(batch).transpose(1, 2)
        return F.scaled_dot_product_attention(mixed, mixed, mixed, **options).transpose(1, 2).sin().sum()

    model = nn.Linear(query.shape[-1], query.shape[-1], dtype=query.dtype)
    traced = run(model, query, loss=loss, device=device)
    blocks = made_in(traced, Phase.BACKWARD)
    return [b.size_bytes for b in blocks if "attention" in b.op and b.category is Category.WORKSPACE]


def test_in_float32_gradient_times_output_is_as_large_as_the_output():
    # GIVEN two sequences of 100, three heads of 64
    query = torch.empty(2, 100, 3, 64)

    # THEN the product, its sums twice, and per head two tiles of 64 queries
    assert gradient_bytes(query, device=cuda(8, 6)) == [
        2 * 100 * 3 * 64 * 4,
        2 * 3 * 100 * 4,
        2 * 3 * 100 * 4,
        2 * 3 * 2 * (16 + 64 * 64 * 4),
    ]


def test_in_half_precision_the_kernel_makes_the_sums():
    query = torch.empty(2, 100, 3, 64, dtype=torch.float16)

    assert gradient_bytes(query, device=cuda(7, 5)) == [2 * 3 * 100 * 4, 2 * 3 * 2 * (16 + 64 * 64 * 4)]


@pytest.mark.parametrize(
    ("head", "capability", "is_half", "expected"),
    [
        (64, (7, 5), True, Blocks(64, 64, True)),
        (64, (9, 0), False, Blocks(64, 64, False)),
        (128, (9, 0), True, Blocks(128, 128, True)),
        (128, (7, 0), True, Blocks(128, 64, True)),
        (128, (7, 5), True, Blocks(64, 64, False)),
        (80, (8, 6), True, Blocks(128, 64, True)),
        (128, (8, 6), True, Blocks(64, 64, False)),
        (128, (8, 0), False, Blocks(128, 64, False)),
        (128, (12, 0), False, Blocks(64, 64, False)),
        (256, (8, 0), True, Blocks(128, 64, False)),
    ],
)
def test_blocks_by_head_and_generation(head, capability, is_half, expected):
    assert efficient_blocks(head, capability, is_half=is_half, has_dropout=False) == expected


def test_dropout_has_no_kernel_between_the_sizes():
    assert efficient_blocks(80, (8, 6), is_half=True, has_dropout=True) == Blocks(64, 64, False)


def test_results_that_registers_cannot_hold_are_summed_in_memory():
    # GIVEN half precision, heads of 128 and 1,000 keys in blocks of 64, which run in 200 // 12 parts
    query = torch.empty(3, 4, 1000, 128, dtype=torch.float16, device="meta")

    size = workspace_bytes(query, query, query, Blocks(64, 64, in_registers=False), is_half=True)

    assert size == 12 * (16 * 2 * (16 + 64 * 64 * 4) + 16 * 64 * (128 + 128) * 4)


def test_flash_attention_splits_its_keys_where_few_rows_don_t_fill_the_device():
    # GIVEN 12 heads of 1024 rows: 192 blocks for two slots on each of 132 multiprocessors, 73% of them; 2 parts fill
    # 384 of 528, 73%, and 4 parts 768 of 792, 97%; 3 of 4 blocks of keys would be as long as 2
    query = torch.empty(1, 12, 1024, 64, dtype=torch.bfloat16, device="meta")
    rows = 4 * 12 * 1024

    assert split_keys((query, query, query, 0.0), (2, 6), 132) == [rows * 4, rows * 64 * 4]

    # WHEN something is dropped, the release has no such rule, or 17 more heads fill the device, there is one part
    assert split_keys((query, query, query, 0.1), (2, 6), 132) == []
    assert split_keys((query, query, query, 0.0), (2, 1), 132) == []
    assert split_keys((query, query, query, 0.0), (2, 6), None) == []
    many = torch.empty(1, 29, 1024, 64, dtype=torch.bfloat16, device="meta")
    assert split_keys((many, many, many), (2, 6), 132) == []
