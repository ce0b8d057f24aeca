import pytest
import torch
from torch import nn

from memfit.core.timeline import Category, Phase
from tests.unit.adapters.torch.builders import AMPERE, HOST, made_in, observe, run, total

ROWS, WIDTH, COUNT = 1000, 4, 6
TOKENS = torch.zeros(COUNT, dtype=torch.int64)
INDICES, VALUES = COUNT * 8, COUNT * WIDTH * 4
DEVICES = pytest.mark.parametrize("device", [AMPERE, HOST], ids=["cuda", "host"])


def gradients(traced, step=1):
    return [b.size_bytes for b in made_in(traced, Phase.BACKWARD, step) if b.category is Category.GRADIENT]


@DEVICES
def test_the_gradient_of_an_embedding_holds_the_rows_that_were_used(device):
    traced = run(nn.Embedding(ROWS, WIDTH, sparse=True), TOKENS, device=device)

    assert sorted(gradients(traced)) == sorted([INDICES, VALUES])


@DEVICES
def test_rows_used_twice_are_counted_twice(device):
    # GIVEN a table that is looked into twice
    traced = run(nn.Embedding(ROWS, WIDTH, sparse=True), TOKENS, loss=lambda m, b: (m(b) * m(b)).sum(), device=device)

    # THEN its gradient is the uncoalesced sum of both
    assert sum(gradients(traced)) == 2 * (INDICES + VALUES)


OPTIMIZERS = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), 0),
    "adagrad": (lambda p: torch.optim.Adagrad(p), 1),
    "sparse adam": (lambda p: torch.optim.SparseAdam(p), 2),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@DEVICES
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_for_sparse_gradients(name, device):
    optimizer, copies = OPTIMIZERS[name]

    traced = run(nn.Embedding(ROWS, WIDTH, sparse=True), TOKENS, optimizer=optimizer, device=device)

    state = total(traced.timeline.live_at(traced.timeline.num_ticks - 1), Category.OPTIMIZER_STATE)
    assert state == pytest.approx(copies * ROWS * WIDTH * 4, abs=8)


def make_sparse(count):
    return torch.sparse_coo_tensor(
        torch.zeros(1, count, dtype=torch.int64), torch.ones(count, WIDTH), (ROWS, WIDTH), check_invariants=False
    )


def test_sums_append_and_coalescing_keeps():
    def work(left, right):
        grown = left.clone()
        grown.add_(right)
        return (left + right)._nnz(), grown._nnz(), (left + right).coalesce()._nnz(), (left.clone().mul_(2))._nnz()

    assert observe(work, make_sparse(3), make_sparse(4))[0] == (7, 7, 7, 3)


def test_a_sparse_addend_of_a_dense_tensor_leaves_it_dense():
    def work(dense, sparse):
        return dense.add_(sparse).layout, tuple(dense.shape)

    assert observe(work, torch.zeros(ROWS, WIDTH), make_sparse(3))[0] == (torch.strided, (ROWS, WIDTH))


def test_a_sparse_batch_and_a_sparse_buffer_are_counted_by_their_parts():
    model = nn.Linear(WIDTH, 1)
    model.register_buffer("graph", make_sparse(5))

    traced = run(model, (torch.ones(2, WIDTH), make_sparse(3)), loss=lambda m, b: m(b[0]).sum())

    assert total(traced.timeline.blocks, Category.BATCH) == 2 * WIDTH * 4 + 3 * (8 + WIDTH * 4)
    assert total(traced.timeline.blocks, Category.BUFFER) == 5 * (8 + WIDTH * 4)
    assert traced.batch_bytes == 2 * WIDTH * 4 + 3 * (8 + WIDTH * 4)


def test_a_dense_gradient_takes_the_whole_table():
    traced = run(nn.Embedding(ROWS, WIDTH), TOKENS)

    assert gradients(traced) == [ROWS * WIDTH * 4]
