import pytest
import torch
from torch import nn

from memfit.core.timeline import Category, Phase
from memfit.frameworks.torch.kernels.index_kernels import sort_bytes, sorted_index_put
from tests.unit.frameworks.torch.builders import made_in, run


class Rows(nn.Module):
    """A table whose rows are picked by indexing."""

    def __init__(self, rows, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, ids):
        return self.weight[ids]


# The snapshots linyun_xl_ctx128_full_step_none (512 tokens) and niu_forward_and_backward_100 (1,000 tokens).
@pytest.mark.parametrize("count", [512, 1000])
def test_the_gradient_of_an_index_sorts_as_in_snapshots(count):
    traced = run(Rows(10_000, 8), torch.zeros(count, dtype=torch.int64))

    blocks = [b for b in made_in(traced, Phase.BACKWARD) if b.category is Category.WORKSPACE and "index" in b.op]
    each = 8 * count
    # THEN wrapped indices go when they have been multiplied by their stride
    assert [b.size_bytes for b in blocks] == [each, each, each, each, each, 1]
    assert blocks[0].end < blocks[2].start
    assert all(b.end > blocks[5].start for b in blocks[1:])


def test_many_indices_are_copied_by_each_pass_of_the_sort():
    # GIVEN keys of 14 bits: two passes
    assert sort_bytes(38_400, 9_999) == 2 * 8 * 38_400 + 10 * 256 * 4 + 2 * 256 * 4
    # ... and of 8: one
    assert sort_bytes(38_400, 255) == 10 * 256 * 4 + 256 * 4


def test_values_that_are_no_dense_block_are_copied():
    ids = torch.zeros(100, dtype=torch.int64, device="meta")
    values = torch.empty(8, 100, device="meta").t()

    assert 8 * 100 * 4 in sorted_index_put(torch.empty(50, 8, device="meta"), [ids], values)


def test_several_indices_are_added_to_the_first():
    ids = torch.zeros(100, dtype=torch.int64, device="meta")
    values = torch.empty(100, device="meta")

    assert sorted_index_put(torch.empty(50, 8, device="meta"), [ids, ids], values) == [
        *[800, 800, ~0, 800, 800, ~2, ~3],
        *[800, 800, 800, 1],
    ]


def test_masks_become_as_many_positions_as_there_are_values():
    mask = torch.zeros(50, 8, dtype=torch.bool, device="meta")
    values = torch.empty(30, device="meta")

    program = sorted_index_put(torch.empty(50, 8, device="meta"), [mask], values)

    assert program == [30 * 16, 240, 240, ~1, 240, 240, ~3, ~4, 240, 240, 240, 1]
