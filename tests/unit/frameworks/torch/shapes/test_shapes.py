import gc

import pytest
import torch

from memfit.frameworks.torch.shapes import shapes
from memfit.frameworks.torch.shapes.shapes import Behaviour, behaviour
from tests.unit.frameworks.torch.builders import observe

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (aten.view.default, Behaviour.VIEW),
        (aten.transpose.int, Behaviour.VIEW),
        (aten.split.Tensor, Behaviour.VIEW),
        (aten._unsafe_view.default, Behaviour.VIEW),
        (aten.relu_.default, Behaviour.IN_PLACE),
        (aten.add_.Tensor, Behaviour.IN_PLACE),
        (aten._foreach_add_.Scalar, Behaviour.SILENT),
        (aten.add.Tensor, Behaviour.FRESH),
        (aten.topk.default, Behaviour.FRESH),
        (aten.add.out, Behaviour.OTHER),
        (aten.resize_.default, Behaviour.OTHER),
        (aten.t_.default, Behaviour.OTHER),
        (aten.lift_fresh.default, Behaviour.OTHER),
        (aten.linear.default, Behaviour.COMPOSITE),
        (aten.matmul.default, Behaviour.COMPOSITE),
        (aten.flatten.using_ints, Behaviour.COMPOSITE),
        (aten.reshape.default, Behaviour.COMPOSITE),
        (aten.cross_entropy_loss.default, Behaviour.COMPOSITE),
    ],
    ids=str,
)
def test_what_operators_do_to_storages(op, expected):
    assert behaviour(op) is expected


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_signatures_tell_apart_what_shapes_depend_on():
    different = [
        (empty(2, 3),),
        (empty(3, 2),),
        (empty(3, 2).t(),),
        (empty(2, 3, dtype=torch.float16),),
        (torch.empty(2, 3),),
        (empty(2, 3), 1),
        (empty(2, 3), 1.0),
        (empty(2, 3), True),
        (empty(2, 3), None),
        (empty(2, 3), torch.float16),
        (empty(2, 3), [1, 2]),
        (empty(2, 3), [1, 2.0]),
        ([empty(2, 3)],),
    ]

    assert len({shapes.signature(args, []) for args in different}) == len(different)
    assert shapes.signature((empty(2, 3), [1]), []) == shapes.signature((empty(2, 3), [1]), [])


def test_sparse_tensors_have_no_signature():
    sparse = torch.eye(3).to_sparse()

    with pytest.raises(TypeError):
        shapes.signature((sparse,), [])


class Counting:
    """Runs operators and counts how often."""

    def __init__(self):
        self.calls = 0

    def __call__(self, func, args, kwargs):
        self.calls += 1
        return func(*args, **kwargs)


@pytest.fixture
def execute(monkeypatch):
    monkeypatch.setattr(shapes, "_cache", {})
    return Counting()


def run(*question):
    return shapes.run(*question)[0]


def test_the_same_question_is_asked_once(execute):
    first = run(aten.mm.default, (empty(2, 3), empty(3, 4)), {}, execute)
    second = run(aten.mm.default, (empty(2, 3), empty(3, 4)), {}, execute)

    assert execute.calls == 1
    assert first.shape == second.shape == (2, 4)
    # A kept answer is a tensor of its own, not the first one again.
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata


def test_another_question_is_another_answer(execute):
    wide = run(aten.mm.default, (empty(2, 3), empty(3, 4)), {}, execute)
    narrow = run(aten.mm.default, (empty(2, 3), empty(3, 1)), {}, execute)
    cast = run(aten.sum.default, (empty(2, 3),), {"dtype": torch.float64}, execute)
    plain = run(aten.sum.default, (empty(2, 3),), {}, execute)

    assert (wide.shape, narrow.shape) == ((2, 4), (2, 1))
    assert (cast.dtype, plain.dtype) == (torch.float64, torch.float32)


def test_what_is_kept_belongs_to_the_memory_of_the_operands(execute):
    """Figures of an operator differ where two operands are the same memory."""
    one, other = empty(2, 3), empty(2, 3)

    def known(*args):
        return shapes.run(aten.mul.Tensor, args, {}, execute)[1]

    assert known(one, one) is not known(one, other)
    assert known(one, one.view(2, 3)) is known(other, other)
    assert known(one, other) is known(other, one)


def test_strides_are_kept(execute):
    layout = torch.channels_last
    for _ in range(2):
        out = run(aten.relu.default, (empty(2, 3, 4, 4).to(memory_format=layout),), {}, execute)
        assert out.is_contiguous(memory_format=layout)
    assert execute.calls == 1


def test_lists_tuples_and_missing_outputs_are_kept(execute):
    data, weight = empty(2, 3, 8, 8), empty(4, 3, 3, 3)
    gradient = empty(2, 4, 6, 6)
    args = (gradient, data, weight, [0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])
    for _ in range(2):
        out = run(aten.convolution_backward.default, args, {}, execute)
        assert isinstance(out, tuple)
        assert [None if t is None else tuple(t.shape) for t in out] == [None, (4, 3, 3, 3), None]
    assert execute.calls == 1


def test_in_place_operators_return_their_argument(execute):
    for _ in range(2):
        tensor = empty(2, 3)
        assert run(aten.relu_.default, (tensor,), {}, execute) is tensor


def test_an_error_is_not_kept(execute):
    for _ in range(2):
        with pytest.raises(RuntimeError):
            run(aten.mm.default, (empty(2, 3), empty(2, 3)), {}, execute)
    assert execute.calls == 2


def test_the_cache_has_a_limit(execute, monkeypatch):
    monkeypatch.setattr(shapes, "_CACHE_LIMIT", 3)
    for n in range(1, 10):
        run(aten.relu.default, (empty(n),), {}, execute)

    assert len(shapes._cache) <= 3


def test_tensors_among_arguments_and_outputs():
    first, second, third = empty(1), empty(2), empty(3)

    assert list(shapes.tensors((first, 2, [second, None, (third, "a")], torch.float32))) == [first, second, third]
    assert list(shapes.tensors([])) == []
    assert list(shapes.tensors({"a": first}.values())) == [first]


def test_a_loss_over_classes_in_bytes_is_simulated():
    def step(data, classes):
        with torch.enable_grad():
            data = data.clone().requires_grad_()
            torch.nn.functional.cross_entropy(data, classes).backward()
        return data.grad.shape

    data, classes = torch.zeros(16, 5), torch.zeros(16, dtype=torch.uint8)
    assert step(data, classes) == (16, 5)

    shape, _ = observe(step, data, classes)

    assert shape == (16, 5)


def test_what_is_kept_for_a_storage_goes_with_it():
    kept = shapes.ByStorage()
    tensor, other = torch.zeros(3), torch.zeros(3)
    kept.set(tensor.untyped_storage(), "first")
    kept.set(tensor.untyped_storage(), "second")
    kept.set(other.untyped_storage(), "dropped")
    assert kept.get(tensor[1:].untyped_storage()) == "second"

    kept.drop(other.untyped_storage())
    assert kept.get(other.untyped_storage()) is None
    assert kept
    del tensor
    gc.collect()
    assert not kept


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, False), ({"device": None}, False), ({"device": "meta"}, False), ({"device": torch.device("cpu")}, True)],
    ids=str,
)
def test_whether_a_copy_goes_to_the_host(given, expected):
    assert shapes.to_host(given) is expected
