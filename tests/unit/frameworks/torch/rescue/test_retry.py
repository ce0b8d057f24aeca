import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from memfit.frameworks.torch.rescue.retry import Retrying, rerun  # noqa: E402
from tests.unit.frameworks.torch.rescue.failing import MESSAGE, Failing  # noqa: E402


def always(failure, num_failures, name):
    return num_failures < 3


def test_runs_again_until_there_is_room():
    failures = iter([RuntimeError(MESSAGE), RuntimeError(MESSAGE)])
    rooms, counted = [], []

    def call():
        for error in failures:
            raise error
        return 5

    def make_room(failure, num_failures, name):
        rooms.append((failure.requested_bytes, num_failures, name))
        return True

    assert rerun(call, make_room, "aten.add", lambda: counted.append(1)) == 5
    assert rooms == [(1000, 0, "aten.add"), (1000, 1, "aten.add")]
    assert counted == [1]


def test_the_original_error_where_nothing_is_left():
    errors = [RuntimeError(MESSAGE), RuntimeError(MESSAGE)]
    left = iter(errors)

    def call():
        raise next(left)

    with pytest.raises(RuntimeError) as caught:
        rerun(call, lambda failure, number, name: number < 1, "x", lambda: None)
    assert caught.value is errors[0]


def test_other_errors_pass_at_once():
    def call():
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        rerun(call, always, "x", lambda: None)


def test_nothing_of_the_failed_call_is_kept():
    references = []
    failures = iter([True, False])

    def call():
        temporary = torch.ones(10)
        references.append(weakref.ref(temporary))
        if next(failures):
            raise RuntimeError(MESSAGE)

    gc.disable()
    try:
        rerun(call, lambda *_: references[0]() is None, "x", lambda: None)
    finally:
        gc.enable()
    assert len(references) == 2


def run(operation, failing=None):
    with failing or Failing(-1), Retrying(always, lambda: None):
        return operation()


@pytest.mark.parametrize("late", [False, True], ids=["before it ran", "after it ran"])
@pytest.mark.parametrize(
    "operation",
    [
        lambda: torch.rand(100),
        lambda: F.dropout(torch.ones(100), 0.5),
        lambda: torch.ones(100).bernoulli_(0.5),
        lambda: torch.randn(100, generator=torch.Generator().manual_seed(3)),
        lambda: torch.ones(10).fill_(3).copy_(torch.arange(10.0)),
    ],
)
def test_random_numbers_are_drawn_again(operation, late):
    torch.manual_seed(1)
    expected = operation(), torch.rand(3)
    for number in range(3):
        torch.manual_seed(1)
        found = run(operation, Failing(number, late=late)), torch.rand(3)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("late", [False, True])
def test_statistics_of_norms_are_put_back(late):
    def operation():
        norm = torch.nn.BatchNorm1d(4)
        norm(torch.arange(8.0).view(2, 4))
        return torch.stack([norm.running_mean, norm.running_var])

    expected = operation()
    names = Failing(-1)
    run(operation, names)
    assert any("batch_norm" in name for name in names.seen)
    position = next(number for number, name in enumerate(names.seen) if "batch_norm" in name)
    assert torch.equal(run(operation, Failing(position, late=late)), expected)


def test_large_writes_in_place_are_not_run_again():
    target = torch.zeros(1024, 1024)

    def operation():
        return target.index_add_(0, torch.tensor([0]), torch.ones(1, 1024))

    names = Failing(-1)
    run(operation, names)
    position = next(number for number, name in enumerate(names.seen) if "index_add_" in name)
    with pytest.raises(RuntimeError, match="can't allocate"):
        run(operation, Failing(position))
