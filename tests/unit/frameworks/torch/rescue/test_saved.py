import gc

import pytest

torch = pytest.importorskip("torch")

from torch.autograd.graph import saved_tensors_hooks  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from memfit.frameworks.torch.rescue.copies import MappedFile, ReadFile  # noqa: E402
from memfit.frameworks.torch.rescue.saved import Shelf  # noqa: E402

SIDE = 512


@pytest.fixture(params=[MappedFile, ReadFile])
def shelf(request, tmp_path):
    return Shelf(lambda storage: request.param(storage, tmp_path), lambda call: call())


def chain(shelf, length=4):
    """The result of some multiplications, and a weak reference to each result in between."""
    value = torch.ones(SIDE, SIDE, requires_grad=True)
    start, references = value, []
    with saved_tensors_hooks(shelf.pack, shelf.unpack):
        for _ in range(length):
            value = (value * 1.25).sin()
            references.append(StorageWeakRef(value.untyped_storage()))
    return start, value.sum(), references


def test_gradients_are_the_same_and_everything_is_let_go(shelf):
    start, value, _ = chain(shelf)
    value.backward()
    expected = start.grad

    start, value, _ = chain(shelf)
    assert shelf.free(None) == shelf.moved_bytes > 0
    value.backward()
    assert torch.equal(start.grad, expected)
    # The graph is freed without the collector of cycles.
    gc.disable()
    try:
        del value
        assert len(shelf) == 0
    finally:
        gc.enable()


def test_the_oldest_goes_first_and_memory_is_really_freed(shelf):
    def run():
        kept = []
        with saved_tensors_hooks(shelf.pack, shelf.unpack):
            value = torch.ones(SIDE, SIDE, requires_grad=True)
            for _ in range(3):
                value = value.exp()  # saves its result
                kept.append(StorageWeakRef(value.untyped_storage()))
        return value.sum(), kept

    value, references = run()
    assert shelf.free(1) == SIDE * SIDE * 4
    assert [reference.expired() for reference in references] == [True, False, False]
    del value


def test_what_somebody_else_has_stays(shelf):
    with saved_tensors_hooks(shelf.pack, shelf.unpack):
        kept = torch.ones(SIDE, SIDE, requires_grad=True).exp()
        value = kept.sum()
    assert shelf.free(None) == 0
    del kept
    assert shelf.free(None) == SIDE * SIDE * 4
    value.backward()


def test_what_autograd_is_using_stays(shelf):
    # GIVEN a tensor that has been handed back to a backward pass
    with saved_tensors_hooks(shelf.pack, shelf.unpack):
        value = torch.ones(SIDE, SIDE, requires_grad=True).exp()
    saved = value.grad_fn._raw_saved_result
    del saved
    packed = shelf.pack(torch.full((SIDE, SIDE), 3.0))
    in_use = shelf.unpack(packed)

    # WHEN all is moved that can be
    del value
    shelf.free(None)

    # THEN it still has its elements
    assert in_use.sum() == 3 * SIDE * SIDE


@pytest.mark.parametrize("moved", [False, True])
def test_a_tensor_that_was_written_to_is_refused_as_autograd_does(shelf, moved):
    tensor = torch.ones(SIDE, SIDE)
    packed, alias = shelf.pack(tensor), tensor.detach()
    if moved:
        holder = torch.empty(0)
        holder.data = tensor  # shares the elements, not the count
        del holder
        block = next(iter(shelf._blocks.values()))
        block.move_away(shelf._make_copy)
    alias.add_(1)
    with pytest.raises(RuntimeError, match=r"FloatTensor \[512, 512\]\] is at version 1; expected version 0"):
        shelf.unpack(packed)


def test_small_tensors_parameters_and_their_views_are_left(shelf):
    weight = torch.nn.Parameter(torch.ones(SIDE, SIDE))
    packed = [shelf.pack(tensor) for tensor in (weight, weight.t(), torch.ones(8))]
    assert len(shelf) == 0
    assert [shelf.unpack(one).shape for one in packed] == [(SIDE, SIDE), (SIDE, SIDE), (8,)]


def test_other_kinds_of_tensors_pass(shelf):
    class Own(torch.Tensor):
        pass

    sparse = torch.ones(SIDE, SIDE).to_sparse()
    conjugated = torch.ones(SIDE, SIDE, dtype=torch.complex64).conj()
    for tensor in (torch.ones(SIDE, SIDE).as_subclass(Own), sparse, conjugated):
        packed = shelf.pack(tensor)
        assert len(shelf) == 0
        assert shelf.unpack(packed) is not None


def test_eager_moves_as_soon_as_nobody_else_has_it(tmp_path):
    shelf = Shelf(lambda storage: MappedFile(storage, tmp_path), lambda call: call(), eager=True)
    start, value, references = chain(shelf)
    assert shelf.moved_bytes >= 3 * SIDE * SIDE * 4
    assert references[0].expired()
    value.backward()
    moved = start.grad
    start, value, _ = chain(Shelf(lambda storage: MappedFile(storage, tmp_path), lambda call: call()))
    value.backward()
    assert torch.equal(start.grad, moved)
