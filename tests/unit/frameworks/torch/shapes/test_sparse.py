import warnings

import pytest
import torch
from torch import nn

from memfit.core.timeline import Category, Phase
from memfit.frameworks.torch.shapes import sparse
from tests.unit.frameworks.torch.builders import AMPERE, HOST, made_in, observe, run, total
from tests.unit.frameworks.torch.sessions import codes, made, running

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
    def work(dense, addend):
        return dense.add_(addend).layout, tuple(dense.shape)

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


def make_matrix(count=3, *, layout=torch.sparse_coo, dtype=torch.float32):
    """A matrix of ROWS rows that holds `count` numbers on its diagonal."""
    places = torch.arange(count)
    made = torch.sparse_coo_tensor(
        torch.stack([places, places]), torch.ones(count, dtype=dtype), (ROWS, WIDTH), check_invariants=False
    ).coalesce()
    if layout is torch.sparse_coo:
        return made
    with warnings.catch_warnings():
        # Of PyTorch, that compressed layouts are new.
        warnings.simplefilter("ignore")
        return made.to_sparse_csr() if layout is torch.sparse_csr else made.to_sparse_csc()


PARTS = {
    torch.sparse_coo: (2 * 3 * 8, 3 * 4),
    torch.sparse_csr: ((ROWS + 1) * 8, 3 * 8, 3 * 4),
    torch.sparse_csc: ((WIDTH + 1) * 8, 3 * 8, 3 * 4),
}


@pytest.mark.parametrize("layout", PARTS, ids=str)
def test_the_parts_of_a_sparse_tensor(layout):
    matrix = make_matrix(layout=layout)

    assert tuple(part.numel() * part.element_size() for part in sparse.parts(matrix)) == PARTS[layout]


def test_a_dense_tensor_has_no_sparse_parts():
    assert sparse.parts(torch.zeros(2)) == []


@pytest.mark.parametrize("dtype", [None, torch.float64], ids=str)
@pytest.mark.parametrize("layout", PARTS, ids=str)
def test_a_sparse_tensor_of_the_host_as_shapes(layout, dtype):
    matrix = make_matrix(layout=layout)

    made = sparse.to_device(matrix, dtype)

    assert (made.is_meta, made.layout, made.shape) == (True, layout, matrix.shape)
    assert made.dtype is (dtype or torch.float32)
    assert [part.shape for part in sparse.parts(made)] == [part.shape for part in sparse.parts(matrix)]


@pytest.mark.parametrize("coalesced", [True, False])
def test_whether_it_is_coalesced_goes_with_it(coalesced):
    given = make_matrix() if coalesced else make_sparse(3)
    with running():
        there = given.cuda()
        found = (
            given.is_coalesced(),
            there.is_coalesced(),
            there.clone().is_coalesced(),
            there.coalesce().is_coalesced(),
        )

    assert found == (coalesced, coalesced, coalesced, True)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", PARTS, ids=str)
def test_in_a_session_a_sparse_matrix_is_moved_by_its_parts(layout):
    matrix = make_matrix(layout=layout)
    with running() as session:
        moved = matrix.to("cuda")
        shown = moved.layout, moved.is_cuda, tuple(moved.shape)

    assert shown == (layout, True, (ROWS, WIDTH))
    assert sorted(block.size_bytes for block in made(session)) == sorted(PARTS[layout])


def test_a_sparse_tensor_becomes_dense():
    with running() as session:
        dense = make_matrix().cuda().to_dense()
        cast = make_matrix().cuda().to_dense(dtype=torch.float64)
        found = [(t.layout, tuple(t.shape), t.dtype) for t in (dense, cast)]

    assert found == [
        (torch.strided, (ROWS, WIDTH), torch.float32),
        (torch.strided, (ROWS, WIDTH), torch.float64),
    ]
    assert [b.size_bytes for b in made(session, op="_to_dense")] == [ROWS * WIDTH * 4, ROWS * WIDTH * 8]


def test_a_dense_tensor_becomes_sparse_with_as_many_elements_as_it_has():
    with running() as session:
        found = torch.randn(5, WIDTH, device="cuda").to_sparse()
        shown = found._nnz(), found.is_coalesced(), tuple(found.shape), found.layout

    assert shown == (5 * WIDTH, True, (5, WIDTH), torch.sparse_coo)
    assert codes(session) == ["data-dependent-shape"]
    assert sorted(b.size_bytes for b in made(session, op="_to_sparse")) == [5 * WIDTH * 4, 2 * 5 * WIDTH * 8]


@pytest.mark.filterwarnings("ignore:Sparse")
def test_rows_are_compressed_on_the_device():
    with running() as session:
        found = make_matrix().cuda().to_sparse_csr()
        shown = found.layout, tuple(found.shape), found._nnz()

    assert shown == (torch.sparse_csr, (ROWS, WIDTH), 3)
    assert sorted(b.size_bytes for b in made(session, op="_to_sparse_csr")) == sorted(PARTS[torch.sparse_csr])
